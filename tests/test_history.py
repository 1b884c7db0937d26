"""Pass rates per prompt: windows, pooling, NaN, thresholds, the prior, and a state that comes back whole."""

from __future__ import annotations

import copy
import json
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coba_core import PassRateHistory

RAW = {"prior_strength": 0.0}


def one(history: PassRateHistory, prompt: Any, rewards: list[float]) -> None:
    history.update([prompt], rewards, [0] * len(rewards))


# ---- counting ------------------------------------------------------------------------------------------------------


def test_raw_rates() -> None:
    history = PassRateHistory(**RAW)
    history.update(["a", "b"], [1, 0, 0, 1, 1], [0, 0, 1, 1, 1])
    assert history.pass_rates(["b", "a"]).tolist() == [2 / 3, 1 / 2]
    assert history.pass_rates(["a"]).dtype == np.float64
    assert len(history) == 2


def test_rows_in_any_order() -> None:
    history = PassRateHistory(**RAW)
    history.update([10, 20, 30], [1, 0, 1, 0, 0], [2, 0, 2, 0, 2])
    assert history.pass_rates([10, 30]).tolist() == [0.0, 2 / 3]
    assert history.seen([10, 20, 30]).tolist() == [True, False, True]


def test_window_drops_the_oldest_visit() -> None:
    history = PassRateHistory(window=2, **RAW)
    one(history, 7, [1, 1, 1, 1])
    one(history, 7, [0, 0])
    assert history.pass_rates([7]).tolist() == [4 / 6]
    one(history, 7, [0, 1])
    assert history.pass_rates([7]).tolist() == [1 / 4]
    one(history, 7, [1])
    assert history.pass_rates([7]).tolist() == [2 / 3]


def test_window_of_one_is_the_last_visit() -> None:
    history = PassRateHistory(window=1, **RAW)
    one(history, 0, [1, 1])
    one(history, 0, [0, 0, 1])
    assert history.pass_rates([0]).tolist() == [1 / 3]


def test_a_prompt_twice_in_a_step_is_pooled_and_ages_once() -> None:
    history = PassRateHistory(window=2, **RAW)
    one(history, "x", [1, 1])
    history.update(["x", "y", "x"], [0, 0, 1, 1], [0, 0, 1, 2])
    assert history.pass_rates(["x", "y"]).tolist() == [3 / 5, 1.0]
    one(history, "x", [1])
    assert history.pass_rates(["x"]).tolist() == [2 / 4]  # the first visit has gone, the pooled one is whole


def test_nan_is_left_out_and_a_visit_of_nan_is_none() -> None:
    history = PassRateHistory(window=2, **RAW)
    nan = float("nan")
    history.update(["a", "b"], [1, nan, nan, 0, nan], [0, 0, 1, 0, 1])
    assert history.pass_rates(["a"]).tolist() == [1 / 2]
    assert history.seen(["a", "b"]).tolist() == [True, False]
    one(history, "a", [nan, nan])
    one(history, "a", [nan])
    one(history, "a", [1])
    assert history.pass_rates(["a"]).tolist() == [2 / 3]


def test_threshold() -> None:
    history = PassRateHistory(**RAW)
    one(history, 0, [0.95, 0.5, 0.49, -1.0])
    assert history.pass_rates([0]).tolist() == [1 / 2]
    strict = PassRateHistory(threshold=1.0, **RAW)
    one(strict, 0, [0.95, 1.0, float("inf"), float("-inf")])
    assert strict.pass_rates([0]).tolist() == [1 / 2]
    negative = PassRateHistory(threshold=-0.5, **RAW)
    one(negative, 0, [-0.25, -0.75])
    assert negative.pass_rates([0]).tolist() == [1 / 2]


def test_fractional() -> None:
    history = PassRateHistory(fractional=True, **RAW)
    one(history, 0, [0.25, 0.75, float("nan"), 0.5])
    assert history.pass_rates([0]).tolist() == [0.5]
    before = history.state_dict()
    for wrong in (-0.01, 1.01, float("inf")):
        with pytest.raises(ValueError, match=rf"^rewards\[1\] is {wrong}, not in \[0, 1\]"):
            one(history, 0, [0.5, wrong])
    assert history.state_dict() == before


# ---- the prior -----------------------------------------------------------------------------------------------------


def test_estimates_lean_on_the_global_rate() -> None:
    history = PassRateHistory(prior_strength=2.0)
    assert history.global_rate() == 0.5
    assert history.pass_rates(["new"]).tolist() == [0.5]
    history.update(["a", "b"], [1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1, 1])
    assert history.global_rate() == 0.5  # of prompts, not of rollouts
    assert history.pass_rates(["a", "b", "new"]).tolist() == [4 / 5, 1 / 6, 0.5]
    one(history, "c", [1])
    assert history.global_rate() == pytest.approx(2 / 3)
    assert history.pass_rates(["b", "new"]).tolist() == pytest.approx([(4 / 3) / 6, 2 / 3])


def test_the_default_prior_is_one() -> None:
    history = PassRateHistory()
    assert (history.window, history.threshold, history.fractional, history.prior_strength) == (4, 0.5, False, 1.0)
    one(history, 0, [0] * 7)
    one(history, 1, [1] * 7)
    assert history.pass_rates([0, 1]).tolist() == [0.5 / 8, 7.5 / 8]


def test_raw_estimates_of_the_unseen_are_nan() -> None:
    history = PassRateHistory()
    assert np.isnan(history.estimates([1, 2])[1]).all()
    one(history, 1, [1])
    estimated, raw = history.estimates([1, 2])
    assert raw[0] == 1.0 and np.isnan(raw[1])
    assert estimated.tolist() == [1.0, 1.0]
    assert history.pass_rates([]).shape == (0,)
    assert history.seen([]).shape == (0,)


# ---- against a plain dictionary of deques --------------------------------------------------------------------------

KEYS = st.one_of(st.integers(-2, 4), st.sampled_from(["a", "b", "1"]))
REWARDS = st.sampled_from([0.0, 1.0, 0.4, 0.6, float("nan")])


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[list[Any], list[float], list[int]]]:
    result = []
    for _ in range(draw(st.integers(1, 6))):
        keys = draw(st.lists(KEYS, min_size=1, max_size=5))
        rows = draw(st.lists(st.integers(0, len(keys) - 1), max_size=10))
        result.append((keys, draw(st.lists(REWARDS, min_size=len(rows), max_size=len(rows))), rows))
    return result


@given(steps(), st.integers(1, 3), st.booleans(), st.sampled_from([0.0, 1.0, 2.5]))
def test_against_deques(
    sequence: list[tuple[list[Any], list[float], list[int]]], window: int, fractional: bool, strength: float
) -> None:
    history = PassRateHistory(window=window, fractional=fractional, prior_strength=strength)
    plain: dict[Any, deque[tuple[float, int]]] = {}
    for keys, rewards, rows in sequence:
        history.update(keys, rewards, rows)
        visit: dict[Any, list[float]] = {}
        for reward, row in zip(rewards, rows, strict=True):
            if reward == reward:
                visit.setdefault(keys[row], []).append(reward if fractional else float(reward >= 0.5))
        for key, successes in visit.items():
            plain.setdefault(key, deque(maxlen=window)).append((sum(successes), len(successes)))
        rates = {key: sum(s for s, _ in v) / sum(n for _, n in v) for key, v in plain.items()}
        mean = sum(rates.values()) / len(rates) if rates else 0.5
        asked = [*dict.fromkeys(keys), "never"]
        expected = [
            (sum(s for s, _ in plain[k]) + strength * mean) / (sum(n for _, n in plain[k]) + strength)
            if k in plain
            else mean
            for k in asked
        ]
        assert history.pass_rates(asked).tolist() == pytest.approx(expected, abs=1e-12)
        assert history.seen(asked).tolist() == [k in plain for k in asked]
        assert history.global_rate() == pytest.approx(mean, abs=1e-12)
        assert len(history) == len(plain)

    again = PassRateHistory(window=window, fractional=fractional, prior_strength=strength)
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    everybody = [*plain, "never"]
    assert again.pass_rates(everybody).tolist() == history.pass_rates(everybody).tolist()
    for keys, rewards, rows in sequence:
        history.update(keys, rewards, rows)
        again.update(keys, rewards, rows)
    assert again.state_dict() == history.state_dict()


def test_many_prompts() -> None:
    """Growth beyond the first capacity, and keys that stay apart."""
    history = PassRateHistory(window=2, **RAW)
    for start in range(0, 3000, 100):
        ids = np.arange(start, start + 100)
        history.update(ids, (ids % 3 == 0).astype(float), np.arange(100))
    rates = history.pass_rates(np.arange(3000))
    assert rates.tolist() == [float(i % 3 == 0) for i in range(3000)]
    assert len(history) == 3000
    assert history.global_rate() == pytest.approx(1 / 3)


# ---- keys and kinds of input ---------------------------------------------------------------------------------------


def test_keys_are_ints_and_strings_and_stay_apart() -> None:
    history = PassRateHistory(**RAW)
    history.update([1, "1"], [1, 0], [0, 1])
    assert history.pass_rates([1, "1"]).tolist() == [1.0, 0.0]
    assert history.pass_rates(np.array([1, 1])).tolist() == [1.0, 1.0]
    assert history.pass_rates(np.array(["1"])).tolist() == [0.0]
    assert history.pass_rates([np.int32(1), np.str_("1")]).tolist() == [1.0, 0.0]
    huge = 2**80
    one(history, huge, [1])
    assert history.seen([huge, huge + 1]).tolist() == [True, False]


@pytest.mark.parametrize("key", [1.0, None, True, b"a", (1, 2), ["a"]])
def test_other_keys_are_refused(key: Any) -> None:
    history = PassRateHistory()
    for call in (history.pass_rates, history.seen, lambda k: history.update(k, [1, 1], [0, 1])):
        with pytest.raises(ValueError, match=r"^prompt_ids\[1\] is .*, not an int or a string"):
            call(["fine", key])
    assert len(history) == 0


def test_kinds_of_rewards_and_rows() -> None:
    expected = None
    rewards, rows = [1.0, 0.0, 1.0], [0, 0, 1]
    kinds: list[tuple[Any, Any]] = [
        (rewards, rows),
        (tuple(rewards), tuple(rows)),
        (np.array(rewards, dtype=np.float32), np.array(rows, dtype=np.uint8)),
        (np.array([True, False, True]), np.array(rows, dtype=np.int32)),
        (np.repeat(rewards, 2)[::2], np.repeat(rows, 2)[::2]),
    ]
    try:
        import torch
    except ImportError:
        pass
    else:
        kinds.append((torch.tensor(rewards), torch.tensor(rows)))
        kinds.append((torch.tensor(rewards, dtype=torch.bfloat16, requires_grad=True), torch.tensor(rows)))
    for reward, row in kinds:
        history = PassRateHistory()
        history.update([5, 6], reward, row)
        state = history.state_dict()
        assert expected is None or state == expected
        expected = state


@pytest.mark.parametrize(
    "rewards, rows, message",
    [
        ([1.0, 0.0], [0], r"^rewards has shape \(2,\) and rows \(1,\)"),
        ([], [0], r"^rewards has shape \(0,\) and rows \(1,\)"),
        ([[1.0]], [[0]], r"^rewards has shape \(1, 1\)"),
        ([1.0, 1.0], [0, 2], r"^rows\[1\] is 2, which must be in \[0, 2\)"),
        ([1.0, 1.0], [-1, 0], r"^rows\[0\] is -1, which must be in \[0, 2\)"),
        ([1.0, 1.0], [0.0, 1.0], r"^rows has dtype float64, not an integer one"),
        ([1.0, 1.0], [True, False], r"^rows has dtype bool, not an integer one"),
    ],
)
def test_rows_refused(rewards: Any, rows: Any, message: str) -> None:
    history = PassRateHistory()
    one(history, 1, [1])
    before = history.state_dict()
    with pytest.raises(ValueError, match=message):
        history.update([1, 2], rewards, rows)
    assert history.state_dict() == before


def test_nothing_to_take() -> None:
    history = PassRateHistory()
    history.update([], [], [])
    history.update([1], [], [])
    assert len(history) == 0
    with pytest.raises(ValueError, match=r"^rows\[0\] is 0"):
        history.update([], [1.0], [0])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"window": 0}, r"^window is 0, not at least 1"),
        ({"window": 1.5}, r"^window is 1.5, not an integer"),
        ({"threshold": float("nan")}, r"^threshold is nan, not a finite number"),
        ({"prior_strength": -1}, r"^prior_strength is -1.0, not a number of at least 0"),
    ],
)
def test_parameters_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PassRateHistory(**options)


# ---- state ---------------------------------------------------------------------------------------------------------


def filled() -> PassRateHistory:
    history = PassRateHistory(window=3)
    history.update([3, "three"], [1, 0, 1], [0, 0, 1])
    one(history, 3, [0])
    return history


def test_an_empty_state() -> None:
    history = filled()
    history.load_state_dict(PassRateHistory(window=3).state_dict())
    assert len(history) == 0 and history.global_rate() == 0.5
    one(history, 3, [1])
    assert history.pass_rates([3]).tolist() == [1.0]


def test_the_state_is_a_copy() -> None:
    history = filled()
    state = history.state_dict()
    kept = copy.deepcopy(state)
    one(history, 3, [1, 1])
    assert state == kept
    history.load_state_dict(state)
    one(history, 3, [1, 1])
    assert state == kept


def test_a_long_life_comes_back() -> None:
    """Hundreds of visits, a visit of hundreds of rollouts."""
    history, again = PassRateHistory(window=3), PassRateHistory(window=3)
    for visit in range(300):
        one(history, "a", [float(visit % 2)] * (1 + visit))
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    assert again.state_dict() == history.state_dict()
    one(history, "a", [1.0])
    one(again, "a", [1.0])
    assert again.pass_rates(["a"]).tolist() == history.pass_rates(["a"]).tolist()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "Other"}, "its kind is 'Other'"),
        ({"version": 2}, "version 2 is newer than 1"),
        ({"window": 4}, "its window is 4, this history's is 3"),
        ({"more": 1}, r"unknown keys \['more'\]"),
        ({"keys": None}, "keys is None, not a list"),
        ({"keys": [3, 3]}, "keys holds a prompt twice"),
        ({"keys": [3, None]}, r"keys\[1\] is None"),
        ({"keys": [3]}, "do not fit 1 keys"),
        ({"successes": [[1.0, 0.0, 0.0]]}, "do not fit 2 keys"),
        ({"successes": "much"}, "do not fit 2 keys"),
        ({"successes": [[3.0, 0.0, 0.0], [1.0, 0.0, 0.0]]}, "contradict each other"),
        ({"successes": [[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]}, "contradict each other"),
        ({"successes": [[float("nan"), 0.0, 0.0], [1.0, 0.0, 0.0]]}, "contradict each other"),
        ({"counts": [[2, 1, 1], [1, 0, 0]]}, "contradict each other"),
        ({"counts": [[2, 0, 0], [1, 0, 0]]}, "contradict each other"),
        ({"counts": [[2.5, 1, 0], [1, 0, 0]]}, "contradict each other"),
        ({"counts": [[2, None, 0], [1, 0, 0]]}, "contradict each other"),
        ({"counts": [[10**400, 1, 0], [1, 0, 0]]}, "do not fit 2 keys"),
        ({"visits": [2, 0]}, "contradict each other"),
        ({"visits": [2, 1.5]}, "contradict each other"),
        ({"visits": [2, 10**30]}, "contradict each other"),
        ({"visits": [2, -1]}, "contradict each other"),
        ({"rate_sum": float("nan")}, "rate_sum is nan"),
        ({"rate_sum": 0.5}, "rate_sum is 0.5, not the sum of the pass rates"),
        ({"rate_sum": None}, "rate_sum is None, not a number"),
    ],
)
def test_states_refused(changes: dict[str, Any], message: str) -> None:
    history = filled()
    before = history.state_dict()
    with pytest.raises(ValueError, match=message):
        history.load_state_dict({**before, **changes})
    assert history.state_dict() == before
    assert history.pass_rates([3, "three", 4]).tolist() == filled().pass_rates([3, "three", 4]).tolist()


def test_states_with_missing_keys_are_refused() -> None:
    history = filled()
    for key in history.state_dict():
        state = history.state_dict()
        del state[key]
        with pytest.raises(ValueError, match=rf"^state of PassRateHistory: .*({key}|None)"):
            history.load_state_dict(state)
