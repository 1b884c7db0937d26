"""The Triton kernels against the references: in Triton's interpreter, and (marked gpu) the same on a card.

TRITON_INTERPRET=1 has to be set before Triton is imported, so the first runs in a process of its own: make triton.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import coba_core  # noqa: E402
from coba_core import (  # noqa: E402
    BetaPreference,
    CapabilityAllocator,
    CapabilitySchedule,
    CapabilityValue,
    Exponential,
    FirstSuccess,
    FixedSchedule,
    InverseVariance,
    KnapsackValue,
    MixedGroup,
    PassRateHistory,
    PowerPreference,
    Value,
    kernels,
)
from coba_core.device import DeviceCapabilityAllocator, DevicePassRateHistory  # noqa: E402
from coba_core.kernels import numpy_backend, triton_backend, triton_threshold  # noqa: E402
from coba_core.kernels.numpy_backend import Form  # noqa: E402

Vectors = Callable[[str], list[dict[str, Any]]]
SATURATIONS = [Exponential(5.0), Exponential(0.02), FirstSuccess(), MixedGroup(), InverseVariance()]
VALUES = [
    CapabilityValue(7.26, 3.74),
    CapabilityValue(2.0, 3.0, 0.02),  # k above ½: the gain's other branch
    KnapsackValue(),
    PowerPreference(0.0, 1.0) * FirstSuccess(),
    PowerPreference(0.0, 0.0) * InverseVariance(),
    BetaPreference(2.0, 5.0) * MixedGroup(),
]


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)], autouse=True)
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Where the kernels run; skipped, with the reason, where they cannot."""
    interpreted = triton_backend.INTERPRETED
    if request.param == "interpreter":
        if not interpreted:
            pytest.skip("TRITON_INTERPRET=1 was not set when Triton was imported (make triton sets it)")
        with np.errstate(all="ignore"):  # the interpreter computes with NumPy what a card computes without a word
            yield torch.device("cpu")
        return
    if interpreted:
        pytest.skip("TRITON_INTERPRET=1: this process has no compiled kernels")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device")
    yield torch.device("cuda")


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and scratch start as NaN, or as a number that no result has."""
    empty, empty_like = torch.empty, torch.empty_like

    def fill(x: Any) -> Any:
        return x.fill_(math.nan if x.dtype.is_floating_point else -(2**31) + 7)

    monkeypatch.setattr(torch, "empty", lambda *args, **options: fill(empty(*args, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: fill(empty_like(*args, **options)))


def tensor(x: Any, device: Any, dtype: Any = None) -> Any:
    return torch.as_tensor(np.array(x), device=device).to(dtype or torch.float64)


def allocated(p: Any, value: Value, low: int, high: int, total: int) -> np.ndarray:
    """The CPU's answer."""
    return np.asarray(coba_core.allocate(np.asarray(p, dtype=np.float64), total, low=low, high=high, value=value))


def pass_rates(random: np.random.Generator, size: int) -> np.ndarray:
    """Of many kinds: spread, few distinct, at the ends, tiny."""
    kind = random.integers(5)
    if kind == 0:
        return random.uniform(0.0, 1.0, size)
    if kind == 1:
        return random.integers(0, 9, size) / 8.0
    if kind == 2:
        return random.integers(0, 2, size).astype(float)
    if kind == 3:
        return np.full(size, random.choice([0.0, 1e-30, 0.3, 0.5, 1.0 - 2.0**-53, 1.0]))
    return np.where(random.random(size) < 0.5, 10.0 ** random.uniform(-30, 0, size), random.beta(0.3, 0.3, size))


# ---- gains -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-12)])
def test_log_density_against_mpmath(device: Any, dtype: str, tolerance: float, poison: None) -> None:
    from mpmath import mp, mpf

    random = np.random.default_rng(0)
    alpha, beta = (np.exp(random.uniform(0.0, math.log(1000.0), 230)) for _ in range(2))
    p = 10.0 ** random.uniform(-30.0, 0.0, 230)
    p[:100] = (alpha / (alpha + beta))[:100]  # at the mode the terms cancel most
    alpha[200:], beta[200:], p[200:215] = 1000.0, 1000.0, 0.5
    alpha[220:], beta[210:] = 1.0, 1.0
    rates = tensor(p, device, getattr(torch, dtype))
    given = rates.double().tolist()
    with mp.workdps(40):

        def worst(found: Any, a: np.ndarray, b: np.ndarray) -> float:
            errors = []
            for y, q, x, z in zip(found.double().tolist(), given, a.tolist(), b.tolist(), strict=True):
                exact = (x - 1) * mp.log(mpf(q)) + (z - 1) * mp.log(1 - mpf(q)) - mp.log(mp.beta(x, z))
                errors.append(float(abs(mpf(y) - exact) / max(1, abs(exact))))
            return max(errors)

        found = triton_backend.log_density(rates, tensor(alpha, device), tensor(beta, device))
        assert found.dtype == rates.dtype
        assert worst(found, alpha, beta) <= tolerance
        for a, b in ((7.26, 3.74), (1.0, 1000.0), (1000.0, 1000.0)):
            found = triton_backend.log_density(rates, a, b)
            assert worst(found, np.full(230, a), np.full(230, b)) <= tolerance


def test_log_density_at_the_ends(device: Any) -> None:
    p = tensor([0.0, 1.0, 0.0, 1.0, math.nan, -0.1, 1.5], device)
    alpha, beta = tensor([1, 1, 2, 2, 2, 2, 2], device), tensor([2, 1, 2, 3, 2, 2, 2], device)
    found = triton_backend.log_density(p, alpha, beta).cpu().numpy()
    none = -math.inf
    np.testing.assert_allclose(found, [math.log(2.0), 0.0, none, none, math.nan, math.nan, math.nan], atol=1e-15)


@pytest.mark.parametrize("saturation", SATURATIONS, ids=repr)
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
def test_saturation(device: Any, saturation: Any, dtype: str, tolerance: float, poison: None) -> None:
    random = np.random.default_rng(1)
    p = np.concatenate([[0.0, 1.0, 1e-30, 0.5], random.uniform(0.0, 1.0, 1200)])
    budgets = random.integers(1, 300, len(p))
    rates = tensor(p, device, getattr(torch, dtype))
    expected = saturation.levels(rates.double().cpu().numpy(), budgets.astype(float))
    form = Value(PowerPreference(), saturation).form
    found = triton_backend.saturation(rates, form, tensor(budgets, device, torch.int64))
    assert found.dtype == rates.dtype
    np.testing.assert_allclose(found.double().cpu().numpy(), expected, rtol=tolerance, atol=tolerance * 1e-2)


@pytest.mark.parametrize("value", VALUES, ids=range(len(VALUES)))
@pytest.mark.parametrize("size", [1, 63, 1000, 1025])
def test_gains_are_the_references(device: Any, value: Value, size: int, poison: None) -> None:
    random = np.random.default_rng(size)
    p = random.uniform(0.0, 1.0, size)
    p[: size // 8] = random.integers(0, 2, size // 8)
    budgets = random.integers(2, 500, size)
    given = tensor(budgets, device, torch.int64)
    logs, plain = triton_backend.log_gains_and_gains(tensor(p, device), value.form, given)
    for found, expected in ((logs, value.log_gains(p, budgets)), (plain, value.gains(p, budgets))):
        if device.type == "cpu":
            np.testing.assert_array_equal(found.numpy(), expected)
        else:  # here multiply and add may be fused
            np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-11, atol=1e-300)


def test_gains_by_prompt_and_in_float32(device: Any) -> None:
    random = np.random.default_rng(3)
    p, alpha, beta = random.uniform(0.0, 1.0, 700), random.uniform(1, 1000, 700), random.uniform(1, 1000, 700)
    tau, budgets = random.uniform(0.02, 20.0, 700), random.integers(2, 128, 700)
    rates = tensor(p, device, torch.float32)
    expected = CapabilityValue(alpha, beta, tau).log_gains(rates.double().cpu().numpy(), budgets)
    form = triton_backend.capability_form(tensor(alpha, device), tensor(beta, device), tensor(tau, device), rates)
    found = triton_backend.log_gains(rates, form, tensor(budgets, device, torch.int64))
    assert found.dtype == torch.float32
    error = np.abs(found.double().cpu().numpy() - expected) / np.maximum(1.0, np.abs(expected))
    assert error.max() <= 1e-6
    found = triton_backend.log_gains(rates.double(), form, tensor(budgets, device, torch.int64)).cpu().numpy()
    assert (np.abs(found - expected) / np.maximum(1.0, np.abs(expected))).max() <= 1e-12


def test_no_difference_is_taken(device: Any) -> None:
    """V(451) - V(450) cancels to 0 in float64; the gain is 4.1e-18 times the preference."""
    form = Value(PowerPreference(), Exponential(3.0)).form
    gain = triton_backend.gains(tensor([0.5], device), form, tensor([450], device, torch.int64)).item()
    assert gain == pytest.approx(math.exp(-450 / 12) * -math.expm1(-1 / 12), rel=1e-12)


# ---- allocation ------------------------------------------------------------------------------------------------------


def value_of(case: dict[str, Any]) -> Value:
    if "alpha" in case:
        return CapabilityValue(case["alpha"], case["beta"], case["tau"])
    if "preference" not in case:
        return KnapsackValue()
    preferences = {"beta": BetaPreference, "power": PowerPreference}
    saturations = {
        "exponential": Exponential,
        "mixed_group": MixedGroup,
        "first_success": FirstSuccess,
        "inverse_variance": InverseVariance,
    }
    preference, *exponents = case["preference"]
    saturation, *tau = case["saturation"]
    return preferences[preference](*exponents) * saturations[saturation](*tau)


@pytest.mark.parametrize("name", ["capability_allocations", "knapsack_allocations", "value_allocations"])
@pytest.mark.parametrize("launches", ["one", "many"])
def test_every_vector_like_the_cpu(device: Any, vectors: Vectors, name: str, launches: str, poison: None) -> None:
    cases = vectors(name)
    assert len(cases) >= 23
    for case in cases if launches == "one" or device.type == "cuda" else cases[::6]:
        value, total, low, high = value_of(case), case["total_budget"], case["low"], case["high"]
        p = case["pass_rates"]
        found = triton_backend.threshold(tensor(p, device), value.form, low, high, total, launches=launches)
        assert found.dtype == torch.int64
        assert found.tolist() == allocated(p, value, low, high, total).tolist(), case["name"]
        gap = case["relative_gap_at_cut"]
        if gap is None or gap > 1e-9:
            assert found.tolist() == case["budgets"], case["name"]


def test_vectors_in_float32(device: Any, vectors: Vectors) -> None:
    """Widened exactly: the CPU's budgets for the same float32 numbers (ties apart, none), the total within 1e-6."""
    for case in vectors("capability_allocations")[::3]:
        value, total, low, high = value_of(case), case["total_budget"], case["low"], case["high"]
        rates = tensor(case["pass_rates"], device, torch.float32)
        found = triton_backend.threshold(rates, value.form, low, high, total)
        assert found.tolist() == allocated(rates.double().cpu().numpy(), value, low, high, total).tolist(), case["name"]
        assert value.total(case["pass_rates"], found.cpu().numpy()) == pytest.approx(float(case["value"]), rel=1e-6)


@pytest.mark.parametrize("part", range(4))
def test_random_instances_against_the_reference(device: Any, part: int, poison: None) -> None:
    random = np.random.default_rng(part)
    for i in range(25):
        size = int(random.choice([1, 2, 3, 7, 63, 255, 256, 257, 400]))
        value = VALUES[int(random.integers(len(VALUES)))]
        low, high = sorted(random.integers(value.concave_from, 140, 2).tolist()) if i % 5 else (2, 128)
        total = int(random.integers(size * low, size * high + 1))
        p = pass_rates(random, size)
        expected = numpy_backend.reference(p, value.form, low, high, total)
        launches = "many" if i % 6 == 0 else "one"
        found = triton_backend.threshold(tensor(p, device), value.form, low, high, total, launches=launches)
        assert found.tolist() == expected.tolist(), (part, i, size, low, high, total, launches)


@pytest.mark.parametrize("launches", ["one", "many"])
@pytest.mark.parametrize(
    ("p", "low", "high", "total"),
    [
        ([0.3], 2, 9, 5),
        ([0.3], 0, 1, 1),
        ([0.0, 1.0, 0.0, 1.0, 0.0], 2, 128, 33),
        ([0.0] * 7, 2, 6, 42),
        ([0.5] * 300, 2, 128, 300 * 2),
        ([0.5] * 300, 2, 128, 300 * 128),
        ([0.5] * 300, 2, 128, 300 * 7 + 11),
        ([0.2, 0.8] * 150, 3, 3, 900),
        ([0.1, 0.5, 0.0, 0.9], 2, 8, 30),  # more than the prompts that gain can hold
    ],
)
def test_ties_and_ends(
    device: Any, p: list[float], low: int, high: int, total: int, launches: str, poison: None
) -> None:
    value = CapabilityValue(2.0, 2.0)
    found = triton_backend.threshold(tensor(p, device), value.form, low, high, total, launches=launches)
    assert found.tolist() == numpy_backend.reference(np.array(p), value.form, low, high, total).tolist()


def test_lines_so_flat_that_gains_round_together(device: Any) -> None:
    p = np.array([1e-17, 3e-17, 1e-16, 1e-15, 0.5, 1e-17])
    value = Value(PowerPreference(), Exponential(5.0))
    for total in (24, 100, 333, 700):
        expected = numpy_backend.reference(p, value.form, 2, 128, total)
        assert triton_backend.threshold(tensor(p, device), value.form, 2, 128, total).tolist() == expected.tolist()


def test_parameters_on_the_card_and_by_prompt(device: Any) -> None:
    random = np.random.default_rng(5)
    p, alpha, beta = random.uniform(0.0, 1.0, 300), random.uniform(1.0, 20.0, 300), random.uniform(1.0, 20.0, 300)
    for a, b in ((alpha, beta), (7.26, beta), (7.26, 3.74)):
        form = triton_backend.capability_form(
            *(tensor(x, device) if isinstance(x, np.ndarray) else x for x in (a, b)), 5.0, tensor(p, device)
        )
        host = CapabilityValue(a, b).form
        for found, expected in zip(form[1:], host[1:], strict=True):
            np.testing.assert_allclose(found.cpu().numpy(), np.broadcast_to(expected, found.shape), rtol=0, atol=2e-13)
        same = Form(form.saturation, *(x.cpu().numpy() for x in form[1:]))
        expected = numpy_backend.threshold(p, same, 2, 128, 4000)
        assert triton_backend.threshold(tensor(p, device), form, 2, 128, 4000).tolist() == expected.tolist()


def test_value_of_the_batch_itself(device: Any) -> None:
    """What allocate() does with no value: the published capability value at the batch's failure rate."""
    random = np.random.default_rng(13)
    for p in (random.beta(1.0, 4.0, 200), random.beta(4.0, 1.0, 77), np.full(3, 0.5)):
        form = triton_backend.batch_form(tensor(p, device), CapabilitySchedule(), 5.0)
        host = CapabilityValue(*CapabilitySchedule().at(1.0 - float(p.mean()))).form
        for found, expected in zip(form[1:], host[1:], strict=True):
            assert found.item() == pytest.approx(expected, rel=1e-13)
        budgets = triton_backend.threshold(tensor(p, device), form, 2, 128, 9 * len(p))
        assert budgets.tolist() == coba_core.allocate(p, 9 * len(p)).tolist()


def test_what_is_no_pass_rate_gains_nothing(device: Any) -> None:
    value = CapabilityValue(2.0, 2.0)
    found = triton_backend.threshold(tensor([0.5, math.nan, -1.0, 0.5, 2.0], device), value.form, 2, 16, 20)
    expected = triton_backend.threshold(tensor([0.5, 0, 0, 0.5, 0], device), value.form, 2, 16, 20)
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("steps", [1, 2])
def test_one_program_closes_what_the_steps_left_open(device: Any, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_threshold, "STEPS", steps)
    p = np.random.default_rng(14).uniform(0.0, 1.0, 700)
    taken = torch.zeros(1, dtype=torch.int32, device=device)
    found = triton_backend.threshold(
        tensor(p, device), VALUES[0].form, 2, 128, 9000, launches="many", steps_out=taken
    )
    assert taken.item() > steps
    assert found.tolist() == allocated(p, VALUES[0], 2, 128, 9000).tolist()


def test_interpolation_makes_steps_few(device: Any) -> None:
    random = np.random.default_rng(6)
    steps = torch.zeros(1, dtype=torch.int32, device=device)
    for value in VALUES:
        p = random.uniform(0.0, 1.0, 512)
        triton_backend.threshold(tensor(p, device), value.form, 2, 128, 8192, steps_out=steps)
        assert 1 <= steps.item() <= 8


def test_one_program_and_many_at_their_border(device: Any) -> None:
    size = triton_threshold.ONE_PROGRAM
    value = CapabilityValue(7.26, 3.74)
    for prompts in (size, size + 1) if device.type == "cuda" else (size // 16,):
        p = np.random.default_rng(7).uniform(0.0, 1.0, prompts)
        for launches in ("one", "many"):
            found = triton_backend.threshold(tensor(p, device), value.form, 2, 128, 16 * prompts, launches=launches)
            np.testing.assert_array_equal(found.cpu().numpy(), allocated(p, value, 2, 128, 16 * prompts))


def test_wrong_arguments_are_named(device: Any) -> None:
    p, form = tensor([0.5, 0.5], device), CapabilityValue(2.0, 2.0).form
    with pytest.raises(ValueError, match="launches is 'few'"):
        triton_backend.threshold(p, form, 2, 8, 8, launches="few")
    with pytest.raises(ValueError, match=r"pass_rates has shape \(1, 2\)"):
        triton_backend.threshold(p[None], form, 2, 8, 8)
    with pytest.raises(ValueError, match=r"budgets has shape \(3,\)"):
        triton_backend.gains(p, form, torch.ones(3, dtype=torch.int64, device=device))
    with pytest.raises(ValueError, match=r"a parameter has shape \(3,\)"):
        triton_backend.log_density(p, torch.ones(3, device=device), 2.0)
    with pytest.raises(ValueError, match="by forms"):
        triton_backend.threshold(p, np.ones((2, 8)), 2, 8, 8)  # type: ignore[arg-type]


# ---- groups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budgets", [[5], [2, 0, 3, 0, 0, 7], [0, 0, 4], [1] * 1500, [3] * 63 + [0, 900]])
def test_repeat_index(device: Any, budgets: list[int], poison: None) -> None:
    found = triton_backend.repeat_index(tensor(budgets, device, torch.int64), sum(budgets))
    assert found.tolist() == coba_core.repeat_index(budgets).tolist()


@pytest.mark.parametrize("scale", ["group", "none", "batch"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float64", 1e-14)])
def test_group_advantages(device: Any, scale: Any, dtype: str, tolerance: float, poison: None) -> None:
    random = np.random.default_rng(8)
    rows = random.integers(0, 30, 400) ** 2  # sparse ids, some of one rollout
    rewards = random.normal(1e4, 1.0, 400)
    rewards[rows == 4] = 0.1
    rewards[::13] = math.nan
    given = tensor(rewards, device, getattr(torch, dtype))
    expected = coba_core.group_advantages(given.double().cpu().numpy(), rows, scale=scale)
    found = triton_backend.group_advantages(given, tensor(rows, device, torch.int64), scale, 1e-4)
    assert found.dtype == given.dtype
    np.testing.assert_allclose(found.double().cpu().numpy(), expected, rtol=tolerance * 10, atol=tolerance * 100)
    assert not found.cpu().numpy()[rows == 4].any()


def test_group_advantage_vectors(device: Any, vectors: Vectors) -> None:
    for case in vectors("group_advantages"):
        rewards = tensor([x for group in case["groups"] for x in group], device)
        rows = tensor([i for i, group in enumerate(case["groups"]) for _ in group], device, torch.int64)
        for scale, eps, name in (("none", 1e-4, "centred"), ("group", 0.0, "standardised_ddof1")):
            expected = [x for group in case[name] for x in group]
            found = triton_backend.group_advantages(rewards, rows, scale, eps).cpu().numpy()
            np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)


def test_group_statistics(device: Any, poison: None) -> None:
    random = np.random.default_rng(9)
    rows, rewards = random.integers(0, 20, 900), random.normal(0.0, 1.0, 900).astype(np.float32)
    rows[rows == 3], rewards[rows == 5], rewards[10] = 2, math.nan, math.nan
    counts, means, deviations = triton_backend.group_statistics(
        tensor(rewards, device, torch.float32), tensor(rows, device, torch.int64), 21
    )
    for group in range(21):
        kept = rewards[(rows == group) & ~np.isnan(rewards)].astype(np.float64)
        assert counts[group].item() == len(kept)
        assert means[group].item() == pytest.approx(kept.mean() if len(kept) else math.nan, rel=1e-13, nan_ok=True)
        assert deviations[group].item() == pytest.approx(kept.std(ddof=1) if len(kept) > 1 else 0.0, rel=1e-12)


# ---- state on the device ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fractional", [False, True])
@pytest.mark.parametrize("saturation", [None, FirstSuccess()], ids=repr)
def test_allocator_like_the_cpus(device: Any, fractional: bool, saturation: Any) -> None:
    """Fourteen steps beside the CPU's: prompts that occur twice, NaN rewards, rows in any order, states both ways."""
    random = np.random.default_rng(10)

    def pair() -> tuple[CapabilityAllocator, DeviceCapabilityAllocator]:
        options: dict[str, Any] = {"window": 3, "fractional": fractional}
        return (
            CapabilityAllocator(saturation, history=PassRateHistory(**options), high=32),
            DeviceCapabilityAllocator(
                40, saturation, history=DevicePassRateHistory(40, device=device, **options), high=32
            ),
        )

    cpu, card = pair()
    everything = list(range(40))
    for _ in range(14):
        ids = random.integers(0, 40, 20)
        expected = cpu.allocate(ids.tolist(), 163)
        budgets = card.allocate(tensor(ids, device, torch.int64), 163)
        assert budgets.tolist() == expected.tolist()
        rows = random.permutation(coba_core.repeat_index(expected))
        rewards = random.random(len(rows)) if fractional else (random.random(len(rows)) < ids[rows] / 40).astype(float)
        rewards[random.random(len(rows)) < 0.1] = math.nan
        rewards[rows == 1] = math.nan
        cpu.update(ids.tolist(), rewards, rows)
        card.update(tensor(ids, device, torch.int64), tensor(rewards, device), tensor(rows, device, torch.int64))
    np.testing.assert_allclose(
        card.history.pass_rates(everything).cpu().numpy(), cpu.history.pass_rates(everything), rtol=0, atol=1e-14
    )
    assert card.history.seen(everything).tolist() == cpu.history.seen(everything).tolist()
    assert card.history.global_rate() == pytest.approx(cpu.history.global_rate(), rel=1e-13)
    assert card.metrics == pytest.approx(cpu.metrics, rel=1e-12)
    to_cpu, to_card = pair()
    to_cpu.load_state_dict(card.state_dict())
    to_card.load_state_dict(cpu.state_dict())
    expected = cpu.allocate(everything, 200).tolist()
    for other in (card, to_cpu, to_card):
        assert other.allocate(everything, 200).tolist() == expected


@pytest.mark.filterwarnings("ignore::coba_core.BudgetWarning")
def test_allocator_before_and_without_rewards(device: Any) -> None:
    card = DeviceCapabilityAllocator(10, device=device)
    ids = torch.arange(5, device=device)
    assert card.allocate(ids, 33).tolist() == [7, 7, 7, 6, 6]
    card.update(ids, torch.full((33,), math.nan, device=device), torch.zeros(33, dtype=torch.int64, device=device))
    assert card.allocate(ids, 33).tolist() == [7, 7, 7, 6, 6]
    assert "alpha" not in card.metrics
    assert len(card.device_history) == 0


@pytest.mark.filterwarnings("ignore::coba_core.BudgetWarning")
def test_allocator_refuses(device: Any) -> None:
    with pytest.raises(ValueError, match="not a CapabilitySchedule"):
        DeviceCapabilityAllocator(10, schedule=FixedSchedule(2.0, 2.0), device=device)  # type: ignore[arg-type]
    card = DeviceCapabilityAllocator(10, schedule=CapabilitySchedule(direction="explore_first"), device=device)
    with pytest.raises(coba_core.BudgetError, match="from 4 to 256"):
        card.allocate([0, 1], 3)
    with pytest.raises(ValueError, match="prompt_ids has"):
        card.allocate([0.5], 3)
    clipping = DeviceCapabilityAllocator(10, on_infeasible="clip", device=device)
    assert clipping.allocate([0, 1], 3).tolist() == [2, 2]
    assert clipping.metrics["clipped"] == 1.0
    state = card.state_dict()
    state["history"] = {**state["history"], "keys": [10], "successes": [[1, 0, 0, 0]], "counts": [[1, 0, 0, 0]]}
    state["history"].update(visits=[1], rate_sum=1.0)
    with pytest.raises(ValueError, match=r"keys\[0\] is 10, not an index below 10"):
        card.load_state_dict(state)
    with pytest.raises(ValueError, match="device is 'meta'"):
        DevicePassRateHistory(10, device="meta")


# ---- the public calls ------------------------------------------------------------------------------------------------


def test_tensors_on_the_cpu_go_the_cpus_way(device: Any) -> None:
    p = np.random.default_rng(15).uniform(0.0, 1.0, 64)
    for rates in (torch.from_numpy(p), torch.from_numpy(p)[::2], torch.from_numpy(p).float().requires_grad_()):
        budgets = coba_core.allocate(rates, 10 * len(rates))
        assert budgets.device == rates.device
        assert budgets.tolist() == coba_core.allocate(rates.detach().double().numpy(), 10 * len(rates)).tolist()
        rows = coba_core.repeat_index(budgets, total=10 * len(rates))
        assert rows.tolist() == coba_core.repeat_index(budgets.numpy()).tolist()
    for given in (budgets, budgets.numpy()):
        with pytest.raises(ValueError, match="total is 7, the budgets' sum 640"):
            coba_core.repeat_index(given, total=7)


def test_the_backend_is_for_tensors_on_a_gpu(device: Any) -> None:
    with pytest.raises(ValueError, match="'triton' cannot run here: it takes tensors that lie on a GPU"):
        coba_core.allocate([0.5], 8, backend="triton")
    usable, reason = kernels.available()["triton"]
    assert usable == (device.type == "cuda")
    assert usable or "TRITON_INTERPRET" in reason
    assert kernels.for_gpu("numba") is None
    if not usable:
        with pytest.raises(ValueError, match="backend 'triton' cannot run here: TRITON_INTERPRET"):
            kernels.for_gpu("triton")


# ---- on a card only --------------------------------------------------------------------------------------------------


@pytest.fixture
def card(device: Any) -> Any:
    if device.type != "cuda":
        pytest.skip("of a card only: graphs and synchronisation")
    return device


def test_public_calls_stay_on_the_card(card: Any) -> None:
    random = np.random.default_rng(11)
    p = random.uniform(0.0, 1.0, 512)
    rates = tensor(p, card)
    value = CapabilityValue(7.26, 3.74)
    coba_core.allocate(rates, 8192, value=value)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        budgets = coba_core.allocate(rates, 8192, value=value)
        rows = coba_core.repeat_index(budgets, total=8192)
        advantages = coba_core.group_advantages(torch.zeros(8192, device=card), rows)
        coba_core.allocate(rates, 8192)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert budgets.device == rows.device == advantages.device == rates.device
    assert budgets.tolist() == allocated(p, value, 2, 128, 8192).tolist()


def test_allocator_step_does_not_wait(card: Any) -> None:
    allocator = DeviceCapabilityAllocator(512, device=card)
    ids = torch.arange(512, device=card)
    rewards = (torch.rand(8192, device=card) < 0.3).float()
    for _ in range(2):
        rows = coba_core.repeat_index(allocator.allocate(ids, 8192), total=8192)
        allocator.update(ids, rewards, rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        rows = coba_core.repeat_index(allocator.allocate(ids, 8192), total=8192)
        allocator.update(ids, rewards, rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("launches", ["one", "many"])
def test_captures_in_a_graph(card: Any, launches: str) -> None:
    random = np.random.default_rng(12)
    value = CapabilityValue(7.26, 3.74)
    rates = tensor(random.uniform(0.0, 1.0, 512), card)

    def step() -> tuple[Any, Any]:
        budgets = triton_backend.threshold(rates, value.form, 2, 128, 8192, launches=launches)
        return budgets, triton_backend.repeat_index(budgets, 8192)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        budgets, rows = step()
    for _ in range(3):
        p = random.uniform(0.0, 1.0, 512)
        rates.copy_(tensor(p, card))
        graph.replay()
        expected = allocated(p, value, 2, 128, 8192)
        assert budgets.tolist() == expected.tolist()
        assert rows.tolist() == coba_core.repeat_index(expected).tolist()
