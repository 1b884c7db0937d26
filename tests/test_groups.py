"""Groups of unequal size by id: NumPy and torch alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coba_core import group_advantages, pad_to_multiple, prompt_weights, repeat_index

try:
    import torch
except ImportError:
    torch = None  # type: ignore[assignment]

NAN = float("nan")
needs_torch = pytest.mark.skipif(torch is None, reason="torch is not installed")


def plain(rewards: list[float], rows: list[int], scale: str, eps: float) -> list[float]:
    """The definition, group by group."""
    kept = [r for r in rewards if r == r]
    result = []
    for reward, row in zip(rewards, rows, strict=True):
        group = [r for r, k in zip(rewards, rows, strict=True) if k == row and r == r]
        if reward != reward or len(set(group)) <= 1:
            result.append(0.0)
            continue
        pool = {"group": group, "batch": kept, "none": []}[scale]
        spread = float(np.std(pool, ddof=1)) + eps if pool else 1.0
        result.append((reward - float(np.mean(group))) / spread)
    return result


@pytest.fixture(params=["numpy", pytest.param("torch", marks=needs_torch)])
def advantages(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    """group_advantages on arrays and on tensors."""
    if request.param == "numpy":
        return lambda rewards, rows, **options: group_advantages(np.array(rewards), np.array(rows), **options)

    def tensor(rewards: Any, rows: Any, **options: Any) -> np.ndarray:
        given = torch.tensor(rewards, dtype=torch.float64)
        before = given.clone()
        found = group_advantages(given, torch.tensor(rows, dtype=torch.int64), **options)
        assert isinstance(found, torch.Tensor) and found.dtype == torch.float64
        assert torch.equal(given.nan_to_num(-7.0), before.nan_to_num(-7.0))
        return found.numpy()

    return tensor


# ---- advantages ----------------------------------------------------------------------------------------------------


def test_vectors(advantages: Any, vectors: Callable[[str], list[dict[str, Any]]]) -> None:
    for case in vectors("group_advantages"):
        rewards = [float(r) for group in case["groups"] for r in group]
        rows = repeat_index([len(group) for group in case["groups"]]).tolist()
        for scale, key in (("none", "centred"), ("group", "standardised_ddof1")):
            expected = [a for group in case[key] for a in group]
            assert advantages(rewards, rows, scale=scale, eps=0.0).tolist() == pytest.approx(expected, abs=1e-14)
        with_eps = advantages(rewards, rows)
        for row, group in enumerate(case["groups"]):
            here = with_eps[np.array(rows) == row]
            spread = float(np.std(group, ddof=1)) if len(group) > 1 else 0.0
            centred = np.array(group, dtype=float) - np.mean(group)
            assert here.tolist() == pytest.approx((centred / (spread + 1e-4)).tolist(), abs=1e-12)


@given(
    data=st.data(),
    rows=st.lists(st.integers(0, 4), max_size=20),
    scale=st.sampled_from(["group", "none", "batch"]),
    eps=st.sampled_from([0.0, 1e-4, 0.5]),
)
def test_against_the_definition(data: st.DataObject, rows: list[int], scale: Any, eps: float) -> None:
    reward = st.one_of(st.sampled_from([0.0, 1.0, 0.1, NAN]), st.floats(-100, 100))
    rewards = data.draw(st.lists(reward, min_size=len(rows), max_size=len(rows)))
    rewards = [round(r, 3) for r in rewards]
    expected = plain(rewards, rows, scale, eps)
    found = group_advantages(np.array(rewards, dtype=np.float64), np.array(rows, dtype=np.int64), scale=scale, eps=eps)
    assert found.dtype == np.float64
    assert found.tolist() == pytest.approx(expected, rel=1e-7, abs=1e-9)
    if torch is not None:
        tensor = group_advantages(
            torch.tensor(rewards, dtype=torch.float64), torch.tensor(rows, dtype=torch.int64), scale=scale, eps=eps
        )
        assert tensor.tolist() == pytest.approx(found.tolist(), rel=1e-9, abs=1e-10)


def test_a_group_of_one_and_equal_rewards_have_exactly_none(advantages: Any) -> None:
    """0.1 + 0.1 + 0.1 is not 0.3: the zeros must be exact all the same, or eps = 0 would blow them up."""
    rewards = [5.0, *[0.1] * 7, *[1e6 / 3] * 3, 0.0, 1.0]
    rows = [0, *[1] * 7, *[2] * 3, 3, 3]
    for eps in (1e-4, 0.0):
        for scale in ("group", "none", "batch"):
            found = advantages(rewards, rows, scale=scale, eps=eps)
            assert found[:11].tolist() == [0.0] * 11
            assert found[11] == -found[12] != 0.0


def test_nan_is_no_failure(advantages: Any) -> None:
    rewards, rows = [1.0, NAN, 0.0, NAN, 3.0, NAN], [0, 0, 0, 1, 1, 2]
    found = advantages(rewards, rows, scale="none")
    assert found.tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, 0.0]
    spread = float(np.std([1.0, 0.0, 3.0], ddof=1)) + 1e-4
    assert advantages(rewards, rows, scale="batch").tolist() == pytest.approx([0.5 / spread, 0, -0.5 / spread, 0, 0, 0])
    assert advantages([NAN, NAN], [0, 0]).tolist() == [0.0, 0.0]


def test_interleaved_ids(advantages: Any) -> None:
    rewards, rows = [1.0, 10.0, 3.0, 14.0, 2.0], [7, 2, 7, 2, 7]
    assert advantages(rewards, rows, scale="none").tolist() == [-1.0, -2.0, 1.0, 2.0, 0.0]
    order = np.argsort(rows, kind="stable")
    grouped = advantages(np.array(rewards)[order], np.array(rows)[order])
    assert advantages(rewards, rows)[order].tolist() == grouped.tolist()


def test_sparse_huge_ids(advantages: Any) -> None:
    """Memory by rows, not by the largest id."""
    rewards, rows = [1.0, 0.0, 5.0, 7.0], [2**62, 2**62, 0, 10**15]
    assert advantages(rewards, rows, scale="none").tolist() == [0.5, -0.5, 0.0, 0.0]
    dense = advantages(rewards, [2, 2, 0, 1])
    assert advantages(rewards, rows).tolist() == dense.tolist()


def test_no_rollouts(advantages: Any) -> None:
    for scale in ("group", "none", "batch"):
        assert advantages([], [], scale=scale).shape == (0,)


def test_batches_of_one_and_two_rewards(advantages: Any) -> None:
    assert advantages([3.0], [0], scale="batch").tolist() == [0.0]
    assert advantages([3.0, 5.0], [0, 0], scale="batch", eps=0.0).tolist() == pytest.approx([-(0.5**0.5), 0.5**0.5])


def test_sums_vanish_by_group(advantages: Any) -> None:
    random = np.random.default_rng(31)
    rows = random.integers(0, 300, 20_000)
    found = advantages(random.normal(1e3, 1.0, 20_000).tolist(), rows.tolist())
    sums = np.bincount(rows, found)
    assert np.abs(sums).max() < 1e-9
    squares = np.bincount(rows, found * found) / (np.bincount(rows) - 1)
    assert squares == pytest.approx(np.ones(300), abs=1e-3)


def test_sequences_and_mixed_kinds() -> None:
    expected = [-0.5, 0.5, 0.0]
    assert group_advantages([0, 1, 4], (0, 0, 1), scale="none").tolist() == expected
    assert group_advantages(np.array([0, 1, 4], dtype=np.float32), [0, 0, 1], scale="none").tolist() == expected
    frozen = np.array([0.0, 1.0, 4.0])
    frozen.flags.writeable = False
    found = group_advantages(frozen, np.array([0, 0, 1], dtype=np.int8), scale="none")
    assert found.tolist() == expected and found.flags.writeable


@needs_torch
def test_torch_kinds() -> None:
    rows = torch.tensor([0, 0, 1], dtype=torch.int32)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        found = group_advantages(torch.tensor([0.0, 1.0, 4.0], dtype=dtype), rows, scale="none")
        assert found.dtype == dtype and found.tolist() == [-0.5, 0.5, 0.0]
    whole = group_advantages(torch.tensor([0, 1, 4]), rows, scale="none")
    assert whole.dtype == torch.float32 and whole.tolist() == [-0.5, 0.5, 0.0]
    from_list = group_advantages(torch.tensor([0.0, 1.0, 4.0]), [0, 0, 1], scale="none")
    assert isinstance(from_list, torch.Tensor) and from_list.tolist() == [-0.5, 0.5, 0.0]
    from_tensor_rows = group_advantages([0.0, 1.0, 4.0], rows, scale="none")
    assert isinstance(from_tensor_rows, np.ndarray) and from_tensor_rows.tolist() == [-0.5, 0.5, 0.0]


def test_advantages_refused() -> None:
    for rewards, rows, message in (
        ([1.0, 2.0], [0], r"^rewards has shape \(2,\) and rows \(1,\)"),
        ([[1.0]], [[0]], r"^rewards has shape \(1, 1\)"),
        ([1.0, 2.0], [0, -3], r"^rows\[1\] is -3, which must be not negative"),
        ([1.0, 2.0], [0.0, 1.0], r"^rows has dtype float64"),
    ):
        with pytest.raises(ValueError, match=message):
            group_advantages(rewards, rows)
    with pytest.raises(ValueError, match=r"^scale is 'std', not 'group', 'none' or 'batch'"):
        group_advantages([1.0], [0], scale="std")  # type: ignore[call-overload]


@needs_torch
def test_advantages_of_tensors_refused() -> None:
    with pytest.raises(ValueError, match=r"^rewards has shape \(2,\) and rows \(1,\)"):
        group_advantages(torch.zeros(2), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"^rewards has shape \(1, 2\)"):
        group_advantages(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64))


# ---- repeat_index --------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 6), max_size=20))
def test_repeat_index(budgets: list[int]) -> None:
    expected = [i for i, b in enumerate(budgets) for _ in range(b)]
    for kind in (list, tuple, lambda b: np.array(b, dtype=np.int64), lambda b: np.array(b, dtype=np.uint8)):
        found = repeat_index(kind(budgets))
        assert found.dtype == np.int64 and found.tolist() == expected
    if torch is not None:
        tensor = repeat_index(torch.tensor(budgets, dtype=torch.int64))
        assert tensor.dtype == torch.int64 and tensor.tolist() == expected


@pytest.mark.parametrize(
    "budgets, message",
    [
        ([2, -1, -5], r"^budgets\[1\] is -1, which must not be negative"),
        ([1.0, 2.0], r"^budgets has shape \(2,\) and dtype float64, not integers"),
        ([[1, 2]], r"^budgets has shape \(1, 2\)"),
        (3, r"^budgets has shape \(\)"),
    ],
)
def test_repeat_index_refused(budgets: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        repeat_index(budgets)


@needs_torch
def test_repeat_index_of_tensors_refused() -> None:
    for wrong in (torch.tensor([1.0, 2.0]), torch.tensor([[1, 2]])):
        with pytest.raises(ValueError, match=r"^budgets has shape .* not integers"):
            repeat_index(wrong)


# ---- weights -------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30), st.booleans())
def test_weights(rows: list[int], sparse: bool) -> None:
    ids = [r * 10**12 for r in rows] if sparse else rows
    by_prompt, by_rollout = prompt_weights(ids), prompt_weights(ids, weighting="rollout")
    assert by_prompt.sum() == pytest.approx(1.0) and by_rollout.sum() == pytest.approx(1.0)
    assert by_rollout.tolist() == [1.0 / len(rows)] * len(rows)
    for row in set(rows):
        total = sum(w for w, r in zip(by_prompt.tolist(), rows, strict=True) if r == row)
        assert total == pytest.approx(1.0 / len(set(rows)))
        assert len({w for w, r in zip(by_prompt.tolist(), rows, strict=True) if r == row}) == 1
    if torch is not None:
        for weighting, expected in (("prompt", by_prompt), ("rollout", by_rollout)):
            tensor = prompt_weights(torch.tensor(ids), weighting=weighting)
            assert tensor.dtype == torch.float64 and tensor.tolist() == pytest.approx(expected.tolist(), rel=1e-15)


def test_weights_of_nothing() -> None:
    for weighting in ("prompt", "rollout"):
        assert prompt_weights([], weighting=weighting).shape == (0,)
        if torch is not None:
            empty = torch.zeros(0, dtype=torch.int64)
            assert prompt_weights(empty, weighting=weighting).shape == (0,)


def test_weighted_advantages_are_the_mean_over_prompts() -> None:
    """What a trainer that averages over rollouts must multiply by."""
    rows, losses = [0, 0, 0, 1], np.array([3.0, 3.0, 3.0, 1.0])
    assert float(np.mean(losses * 4 * prompt_weights(rows))) == pytest.approx(2.0)


def test_weights_refused() -> None:
    with pytest.raises(ValueError, match=r"^weighting is 'token', not 'prompt' or 'rollout'"):
        prompt_weights([0], weighting="token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^rows\[1\] is -1"):
        prompt_weights([0, -1])
    with pytest.raises(ValueError, match=r"^rows has dtype float64"):
        prompt_weights([0.5])


# ---- padding -------------------------------------------------------------------------------------------------------


def test_padding() -> None:
    assert pad_to_multiple(3509, 640) == 331
    assert pad_to_multiple(640, 640) == 0
    assert pad_to_multiple(0, 7) == 0
    assert pad_to_multiple(5) == 0
    assert pad_to_multiple(10, 4, 6) == 2


@given(st.integers(0, 10**6), st.lists(st.integers(1, 60), min_size=1, max_size=3))
def test_padding_is_the_least(rows: int, multiples: list[int]) -> None:
    added = pad_to_multiple(rows, *multiples)
    assert all((rows + added) % m == 0 for m in multiples)
    assert not any(all((rows + fewer) % m == 0 for m in multiples) for fewer in range(min(added, 500)))


@pytest.mark.parametrize(
    "args, message",
    [
        ((-1, 4), r"^rows is -1, which must not be negative"),
        ((5, 0), r"^multiples\[0\] is 0, not at least 1"),
        ((5, 2, -2), r"^multiples\[1\] is -2, not at least 1"),
    ],
)
def test_padding_refused(args: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pad_to_multiple(*args)
