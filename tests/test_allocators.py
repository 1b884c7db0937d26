"""The allocators that keep the history: rules, metrics, noise, and states that come back or are refused whole."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from coba_core import (
    Allocator,
    BetaPreference,
    BudgetError,
    BudgetWarning,
    CapabilityAllocator,
    CapabilitySchedule,
    CapabilityValue,
    Exponential,
    FirstSuccess,
    FixedSchedule,
    InverseVariance,
    KnapsackAllocator,
    KnapsackValue,
    LinearSchedule,
    MixedGroup,
    PassRateHistory,
    PowerPreference,
    RankAllocator,
    ReleasedAllocator,
    UniformAllocator,
    ValueAllocator,
    allocate,
    repeat_index,
)
from coba_core.allocators import DIFFICULTY_CLASSES, _share_by_weight, difficulty_class, even_budgets

pytestmark = pytest.mark.filterwarnings("ignore::coba_core.BudgetWarning")

KINDS: dict[str, Callable[..., Allocator]] = {
    "uniform": UniformAllocator,
    "value": lambda **o: ValueAllocator(PowerPreference(0, 1) * FirstSuccess(), **o),
    "knapsack": KnapsackAllocator,
    "capability": CapabilityAllocator,
    "capability-mixed": lambda **o: CapabilityAllocator(MixedGroup(), LinearSchedule(steps=4), **o),
    "capability-noisy": lambda **o: CapabilityAllocator(noise=0.05, seed=3, **o),
    "released": CapabilityAllocator.released,
    "released-noisy": lambda **o: CapabilityAllocator.released(noise=0.02, seed=4, **o),
}
every_kind = pytest.mark.parametrize("kind", KINDS)
RATES = [0.0, 0.1, 0.5, 0.9, 1.0]


def learn(allocator: Allocator, rates: list[float] = RATES, rollouts: int = 10) -> list[str]:
    """One step in which prompt i succeeded at rates[i]; its ids."""
    ids = [f"p{i}" for i in range(len(rates))]
    rewards = [float(j < round(rate * rollouts)) for rate in rates for j in range(rollouts)]
    allocator.update(ids, rewards, repeat_index([rollouts] * len(rates)))
    return ids


# ---- what every allocator does -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "value"])  # whose value is known from the start
def test_even_until_something_is_known(kind: str) -> None:
    allocator = KINDS[kind](high=64)
    ids = list(range(7))
    if "knapsack" in kind:
        assert sorted(allocator.allocate(ids, 59).tolist()) == [8, 8, 8, 8, 9, 9, 9]
    else:
        assert allocator.allocate(ids, 59).tolist() == even_budgets(7, 59).tolist() == [9, 9, 9, 8, 8, 8, 8]


@every_kind
@pytest.mark.parametrize("low, high", [(1, 9), (2, 128), (4, 4), (3, 20)])
def test_sum_and_bounds(kind: str, low: int, high: int) -> None:
    allocator = KINDS[kind](low=low, high=high)
    random = np.random.default_rng(41)
    ids = learn(allocator, random.choice([0.0, 0.02, 0.1, 0.5, 0.9, 1.0], 40).tolist(), 50)
    for total in {40 * low, 40 * low + (high - low), 40 * (low + high) // 2, 40 * high - 1, 40 * high}:
        if not 40 * low <= total <= 40 * high:
            continue
        budgets = allocator.allocate(ids, total)
        assert budgets.dtype == np.int64 and budgets.shape == (40,)
        assert budgets.sum() == total
        assert budgets.min() >= low and budgets.max() <= high


@every_kind
def test_metrics_are_flat_floats(kind: str) -> None:
    allocator = KINDS[kind](high=64)
    assert allocator.metrics == {}
    for _ in range(2):
        ids = learn(allocator)
        assert allocator.metrics["failure_rate"] == pytest.approx(0.5)
        assert allocator.metrics["mixed_groups"] == pytest.approx(3 / 5)
        budgets = allocator.allocate([*ids, "new"], 60)
        metrics = allocator.metrics
        assert all(type(name) is str and type(x) is float for name, x in metrics.items())
        assert json.loads(json.dumps(metrics)) == metrics
        assert metrics["budget_min"] == budgets.min() and metrics["budget_max"] == budgets.max()
        assert metrics["budget_mean"] == 10.0
        assert metrics["share_unseen"] == pytest.approx(1 / 6)
        assert metrics["clipped"] == 0.0
        shares = [metrics[f"budget_{name}"] for name in ("unsolved", "hard", "medium", "easy", "solved", "unseen")]
        assert shares == pytest.approx((budgets / 60).tolist())
        if kind.startswith(("capability", "released")):
            assert metrics["alpha"] + metrics["beta"] == pytest.approx(11.0)


def test_metrics_of_the_capability_schedule() -> None:
    allocator = CapabilityAllocator()
    learn(allocator)
    allocator.allocate(["a"], 8)
    assert allocator.metrics["mean_failure_rate"] == pytest.approx(0.5)
    assert (allocator.metrics["alpha"], allocator.metrics["beta"]) == pytest.approx((5.5, 5.5))


@every_kind
def test_no_prompts(kind: str) -> None:
    allocator = KINDS[kind]()
    for _ in range(2):
        assert allocator.allocate([], 0).shape == (0,)
        allocator.update([], [], [])
        with pytest.raises(BudgetError, match=r"^total_budget is 1; 0 prompts"):
            allocator.allocate([], 1)
        learn(allocator)


@every_kind
def test_totals_that_do_not_fit(kind: str) -> None:
    strict, clipping = KINDS[kind](high=16), KINDS[kind](high=16, on_infeasible="clip")
    for allocator in (strict, clipping):
        learn(allocator)
    before = strict.state_dict()
    for total, feasible in ((5, 6), (6, 6), (48, 48), (50, 48), (-3, 6)):
        if total == feasible:
            assert strict.allocate(["p1", "p2", "new"], total).sum() == total
        else:
            message = f"^total_budget is {total}; 3 prompts with budgets in \\[2, 16\\] take from 6 to 48"
            with pytest.raises(BudgetError, match=message):
                strict.allocate(["p1", "p2", "new"], total)
        assert clipping.allocate(["p1", "p2", "new"], total).sum() == feasible
        assert clipping.metrics["clipped"] == feasible - total
    if "noisy" not in kind:
        assert strict.state_dict() == before


@every_kind
def test_bad_steps_change_nothing(kind: str) -> None:
    allocator = KINDS[kind]()
    ids = learn(allocator)
    before, metrics = allocator.state_dict(), dict(allocator.metrics)
    for rewards, rows, message in (
        ([1.0], [0, 1], "one row a reward"),
        ([1.0], [5], r"rows\[0\] is 5"),
        ([1.0], [0.5], "rows has dtype float64"),
    ):
        with pytest.raises(ValueError, match=message):
            allocator.update(ids, rewards, rows)
        assert allocator.state_dict() == before and allocator.metrics == metrics
    with pytest.raises(ValueError, match=r"^prompt_ids\[0\] is 1.5"):
        allocator.update([1.5], [1.0], [0])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^prompt_ids\[0\] is 1.5"):
        allocator.allocate([1.5], 8)  # type: ignore[list-item]
    for total in (8.0, "8", None):
        with pytest.raises(ValueError, match=rf"^total_budget is {total!r}, not an integer"):
            allocator.allocate(ids, total)  # type: ignore[arg-type]
    assert allocator.state_dict() == before


@every_kind
def test_a_step_of_nothing_but_nan_is_no_step(kind: str) -> None:
    allocator = KINDS[kind]()
    ids = learn(allocator)
    before = allocator.state_dict()
    allocator.update(ids, [float("nan")] * 5, range(5))
    assert allocator.state_dict() == before


@pytest.mark.parametrize("kind", [k for k in KINDS if "noisy" not in k])
def test_the_same_prompt_twice(kind: str) -> None:
    """Pooled in the history; each occurrence has its own budget."""
    allocator, pooled = KINDS[kind](high=64), KINDS[kind](high=64)
    allocator.update(["a", "b", "a"], [1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 2, 2])
    pooled.update(["a", "b"], [1, 0, 1, 0, 1, 0], [0, 0, 1, 1, 0, 0])
    assert allocator.history.state_dict() == pooled.history.state_dict()
    budgets = allocator.allocate(["a", "b", "a"], 40)
    assert budgets.sum() == 40
    assert abs(int(budgets[0]) - int(budgets[2])) <= 1


@pytest.mark.parametrize("options", [{"low": 5, "high": 4}, {"low": -1}])
@every_kind
def test_bounds_refused(kind: str, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"^low is {options['low']}"):
        KINDS[kind](**options)


def test_options_refused() -> None:
    with pytest.raises(ValueError, match=r"^on_infeasible is 'ignore', not 'raise' or 'clip'"):
        UniformAllocator(on_infeasible="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^high is 8.5, not an integer"):
        UniformAllocator(high=8.5)  # type: ignore[arg-type]
    for noise in (-0.01, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"^noise is "):
            KnapsackAllocator(noise=noise)
    for make in (KnapsackAllocator, lambda **o: CapabilityAllocator(InverseVariance(), **o)):
        with pytest.raises(ValueError, match=r"^low is 0, below 1"):
            make(low=0)
    assert CapabilityAllocator(low=0).allocate([1, 2], 1).sum() == 1


def test_solver_and_backend_are_passed_on() -> None:
    with pytest.raises(ValueError, match=r"^solver is 'magic'"):
        KnapsackAllocator(solver="magic").allocate([1], 8)
    with pytest.raises(ValueError, match=r"^backend is 'magic'"):
        KnapsackAllocator(backend="magic").allocate([1], 8)
    expected = None
    for solver in ("threshold", "heap", "dp", "reference"):
        allocator = KnapsackAllocator(solver=solver, backend="numpy", high=64)
        budgets = allocator.allocate(learn(allocator), 50).tolist()
        assert expected is None or budgets == expected
        expected = budgets


def test_warning_when_one_prompt_may_take_a_fifth() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        KnapsackAllocator(high=8).allocate(range(10), 40)
        KnapsackAllocator(high=9, low=9).allocate(range(2), 18)
        KnapsackAllocator().allocate([1], 20)  # it must take them all
        UniformAllocator().allocate(range(10), 40)  # it never does
    allocator = KnapsackAllocator(high=9)
    with pytest.warns(BudgetWarning, match=r"^high = 9 is more than 20 % of the step's 40 rollouts"):
        allocator.allocate(range(10), 40)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allocator.allocate(range(10), 40)  # once is enough


# ---- the rules -----------------------------------------------------------------------------------------------------


def test_even_budgets() -> None:
    assert even_budgets(4, 10).tolist() == [3, 3, 2, 2]
    assert even_budgets(0, 0).tolist() == []
    assert even_budgets(1, 7).tolist() == [7]
    assert even_budgets(3, 9).tolist() == [3, 3, 3]


def test_difficulty_classes() -> None:
    p = np.array([0.0, 1e-9, 0.2, np.nextafter(0.2, 1), 0.79, 0.8, 0.99, 1.0, np.nan])
    assert difficulty_class(p).tolist() == [0, 1, 1, 2, 2, 3, 3, 4, -1]


def test_uniform_never_changes() -> None:
    allocator = UniformAllocator()
    learn(allocator)
    assert allocator.allocate(["p0", "p4", "p2"], 25).tolist() == [9, 8, 8]


@pytest.mark.parametrize(
    "value", [KnapsackValue(), CapabilityValue(7.26, 3.74), BetaPreference(2, 2) * InverseVariance()], ids=repr
)
def test_value_allocator_is_allocate_at_the_estimates(value: Any) -> None:
    allocator = ValueAllocator(value, high=64)
    ids = [*learn(allocator), "new"]
    estimates = allocator.history.pass_rates(ids)
    assert allocator.allocate(ids, 90).tolist() == allocate(estimates, 90, high=64, value=value).tolist()
    if isinstance(value.saturation, MixedGroup):
        knapsack = KnapsackAllocator(high=64)
        learn(knapsack)
        assert knapsack.allocate(ids, 90).tolist() == allocator.allocate(ids, 90).tolist()


@pytest.mark.parametrize("saturation", [Exponential(5.0), MixedGroup(), FirstSuccess(), InverseVariance()], ids=repr)
def test_capability_follows_the_schedule(saturation: Any) -> None:
    schedule = CapabilitySchedule(window=2)
    allocator = CapabilityAllocator(saturation, CapabilitySchedule(window=2), high=64)
    rates = [[0.0, 0.1, 0.2], [0.5, 0.5, 0.7], [1.0, 0.9, 1.0]]
    for step in rates:
        ids = learn(allocator, step)
        schedule.update(1.0 - float(np.mean(step)))
        value = BetaPreference(*schedule.alpha_beta()) * saturation
        estimates = allocator.history.pass_rates(ids)
        assert allocator.allocate(ids, 70).tolist() == allocate(estimates, 70, high=64, value=value).tolist()
        assert allocator.metrics["alpha"] == pytest.approx(schedule.alpha_beta()[0], rel=1e-14)


def test_the_failure_rate_is_of_prompts_not_of_rollouts() -> None:
    allocator = CapabilityAllocator(schedule=CapabilitySchedule(window=1))
    allocator.update(["a", "b"], [1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1])
    assert allocator.schedule.mean_failure_rate() == pytest.approx(0.5)


def test_default_capability_is_the_papers() -> None:
    allocator = CapabilityAllocator()
    assert (allocator.low, allocator.high, allocator.noise) == (2, 128, 0.0)
    assert isinstance(allocator.saturation, Exponential) and allocator.saturation.tau == 5.0
    assert allocator.schedule.at(0.5) == (5.5, 5.5)


def test_exploit_then_explore() -> None:
    """Much failure: the easier of two prompts gets more; little failure: the harder."""
    failing, solving = CapabilityAllocator(high=60), CapabilityAllocator(high=60)
    learn(failing, [0.1, 0.7, *[0.0] * 20])
    learn(solving, [0.1, 0.7, *[1.0] * 20])
    assert np.diff(failing.allocate(["p0", "p1"], 40))[0] > 0
    assert np.diff(solving.allocate(["p0", "p1"], 40))[0] < 0
    reverse = CapabilityAllocator(schedule=CapabilitySchedule(direction="explore_first"), high=60)
    learn(reverse, [0.1, 0.7, *[0.0] * 20])
    assert np.diff(reverse.allocate(["p0", "p1"], 40))[0] < 0


def test_a_fixed_schedule_needs_no_first_step() -> None:
    allocator = CapabilityAllocator(schedule=FixedSchedule(10.5, 1.5), high=64)
    assert allocator.allocate(["a", "b"], 20).tolist() == [10, 10]
    assert allocator.metrics["alpha"] == 10.5


# ---- the released recipe -------------------------------------------------------------------------------------------


def test_released_defaults() -> None:
    allocator = CapabilityAllocator.released()
    assert isinstance(allocator, ReleasedAllocator)
    assert allocator.history.window == 1 and allocator.history.prior_strength == 0.0
    assert (allocator.schedule.alpha_min, allocator.schedule.alpha_max) == (1.0, 10.0)


def test_released_shares() -> None:
    """Of the budget above low: 60 to 80 % to .05 <= p <= .99 by value, the rest by 1-p to p < .05."""
    for inside, share in ((2, 0.6), (7, 0.7), (9, 0.8)):
        allocator = CapabilityAllocator.released(high=1000)
        ids = learn(allocator, [0.5] * inside + [0.0] * (10 - inside), 100)
        budgets = allocator.allocate(ids, 1020) - 2
        assert budgets[:inside].sum() == int(1000 * share)
        assert np.ptp(budgets[:inside]) <= 1 and np.ptp(budgets[inside:]) <= 1


def test_released_gives_equal_prompts_equal_budgets() -> None:
    allocator = CapabilityAllocator.released(high=64)
    ids = learn(allocator, [0.0, 0.3, 0.0, 0.3, 0.0, 1.0, 1.0], 10)
    budgets = allocator.allocate(ids, 101)
    for same in ([0, 2, 4], [1, 3], [5, 6]):
        assert np.ptp(budgets[same]) <= 1


def test_released_is_without_noise_unless_asked() -> None:
    budgets = []
    for seed in (0, 1):
        allocator = CapabilityAllocator.released(high=64, seed=seed)
        budgets.append(allocator.allocate(learn(allocator, [0.1, 0.3, 0.6, 0.8], 10), 101).tolist())
    assert budgets[0] == budgets[1]


def test_what_is_left_goes_by_the_largest_remainders() -> None:
    """Weights 1, 3, 2 of 2 rollouts are 1/3, 1 and 2/3: one whole, and the other to 2/3."""
    budgets = np.full(3, 2, dtype=np.int64)
    _share_by_weight(budgets, np.arange(3), np.array([1.0, 3.0, 2.0]), 2, 10)
    assert budgets.tolist() == [2, 3, 3]
    budgets = np.full(4, 2, dtype=np.int64)
    _share_by_weight(budgets, np.arange(4), np.array([0.3, 0.2, 0.4, 0.1]), 1, 10)  # nobody's share is whole
    assert budgets.tolist() == [2, 2, 3, 2]


@pytest.mark.parametrize("rate, learnable", [(0.05, True), (0.99, True), (0.04, False), (1.0, False)])
def test_released_learnable_bounds(rate: float, learnable: bool) -> None:
    allocator = CapabilityAllocator.released(high=1000)
    ids = learn(allocator, [rate] + [0.0] * 9, 100)
    first = int(allocator.allocate(ids, 1020)[0]) - 2
    assert (first == 600) == learnable


def test_released_without_learnable_prompts() -> None:
    allocator = CapabilityAllocator.released(high=20)
    ids = learn(allocator, [0.0, 1.0, 0.0], 10)
    budgets = allocator.allocate(ids, 30)
    assert budgets[1] == 2 and abs(int(budgets[0]) - int(budgets[2])) <= 1
    assert allocator.allocate(ids, 59).tolist() == [20, 19, 20]


def test_released_tau_follows_the_variance() -> None:
    """τ = 3 + 9 clip(Var / .1667, 0, 1): the shared part is what allocate gives at that τ."""
    allocator = CapabilityAllocator.released(high=500)
    rates = [0.1, 0.9, 0.5, 0.3]
    ids = learn(allocator, rates, 10)
    tau = 3.0 + 9.0 * float(np.var(rates)) / 0.1667
    value = CapabilityValue(*allocator.schedule.alpha_beta(), tau)
    part = int(200 * 0.8)
    expected = allocate(rates, 8 + part, high=500, value=value)
    found = allocator.allocate(ids, 208)
    assert (found >= expected).all() and found.sum() == 208
    rest = found - expected
    weights = 1.0 - np.array(rates)
    assert np.abs(rest - 40 * weights / weights.sum()).max() <= 1.0


# ---- noise ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [KnapsackAllocator, CapabilityAllocator, CapabilityAllocator.released])
def test_noise_is_seeded(make: Callable[..., Allocator]) -> None:
    def budgets(seed: int, noise: float) -> list[list[int]]:
        allocator = make(noise=noise, seed=seed, high=64)
        ids = learn(allocator, np.linspace(0.1, 0.9, 30).tolist(), 20)
        return [allocator.allocate(ids, 500).tolist() for _ in range(3)]

    first, again, other, none = budgets(1, 0.05), budgets(1, 0.05), budgets(2, 0.05), budgets(1, 0.0)
    assert first == again
    assert first != other
    assert first[0] != first[1]
    assert none[0] == none[1] == none[2] != first[0]
    assert np.abs(np.array(first[0]) - np.array(none[0])).max() <= 8  # it is a nudge


@pytest.mark.parametrize("kind", ["capability-noisy", "released-noisy"])
def test_noise_goes_on_after_a_reload(kind: str, tmp_path: Path) -> None:
    allocator, again = KINDS[kind](high=64), KINDS[kind](high=64)
    ids = learn(allocator, np.linspace(0.1, 0.9, 30).tolist(), 20)
    allocator.allocate(ids, 500)
    allocator.save(tmp_path / "a.json")
    following = [allocator.allocate(ids, 500).tolist() for _ in range(3)]
    again.load(tmp_path / "a.json")
    assert [again.allocate(ids, 500).tolist() for _ in range(3)] == following


# ---- state ---------------------------------------------------------------------------------------------------------


@every_kind
def test_the_next_allocation_is_identical(kind: str, tmp_path: Path) -> None:
    allocator, again = KINDS[kind](high=64), KINDS[kind](high=64)
    for step in range(4):
        ids = learn(allocator, np.random.default_rng(step).uniform(0, 1, 12).tolist())
    allocator.allocate(ids, 120)
    path = tmp_path / "allocator.json"
    allocator.save(path)
    again.load(str(path))
    assert again.state_dict() == allocator.state_dict() == json.loads(json.dumps(allocator.state_dict()))
    for step in range(3):
        left = allocator.allocate([*ids, f"new{step}", 5], 130)
        assert again.allocate([*ids, f"new{step}", 5], 130).tolist() == left.tolist()
        for each in (allocator, again):
            learn(each, np.random.default_rng(step).uniform(0, 1, 9).tolist())
        assert again.metrics == allocator.metrics
    assert again.state_dict() == allocator.state_dict()


@every_kind
def test_damaged_files_name_the_file_and_change_nothing(kind: str, tmp_path: Path) -> None:
    allocator = KINDS[kind](high=64)
    learn(allocator)
    path = tmp_path / "allocator.json"
    allocator.save(path)
    whole = path.read_bytes()
    learn(allocator, [0.2, 0.4])
    before, metrics = allocator.state_dict(), dict(allocator.metrics)
    other = "knapsack" if kind != "knapsack" else "uniform"
    KINDS[other]().save(tmp_path / "other.json")
    damaged = [
        b"",
        whole[:1],
        whole[: len(whole) // 2],
        whole[:-1],
        whole.replace(b"1.0", b"0.0", 1),
        bytes([whole[0] ^ 1]) + whole[1:],
        whole[:-40] + bytes([whole[-40] ^ 4]) + whole[-39:],
        b"\x80\x04}q\x00.",
        b"null",
        (tmp_path / "other.json").read_bytes(),
    ]
    for content in damaged:
        assert content != whole
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^state file {re.escape(str(path))}: "):
            allocator.load(path)
        assert allocator.state_dict() == before and allocator.metrics == metrics
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        allocator.load(tmp_path / "absent.json")
    path.write_bytes(whole)
    allocator.load(path)
    assert allocator.state_dict() != before


@every_kind
def test_states_refused(kind: str, tmp_path: Path) -> None:
    from coba_core.state import write_state

    allocator = KINDS[kind](high=64)
    learn(allocator)
    good = allocator.state_dict()
    learn(allocator, [0.3])
    before = allocator.state_dict()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"version": 2}, "version 2 is newer than 1, the newest known"),
        ({"kind": "Other"}, "its kind is 'Other'"),
        ({"more": 1}, r"unknown keys \['more'\]"),
        ({"history": None}, "state of PassRateHistory"),
        ({"history": {**good["history"], "version": 7}}, "version 7 is newer"),
        ({"history": {**good["history"], "window": 9}}, "its window is 9"),
        ({"history": {**good["history"], "keys": ["x"]}}, "do not fit 1 keys"),
    ]
    if "random" in good:
        wrong += [
            ({"random": None}, "random is not a state of NumPy's generator"),
            ({"random": {**good["random"], "bit_generator": "MT19937"}}, "random is not a state"),
            ({"random": {**good["random"], "state": {}}}, "random is not a state"),
            ({"random": {**good["random"], "state": {"state": "x", "inc": 1}}}, "random is not a state"),
            ({"random": {**good["random"], "state": {"state": -1, "inc": 1}}}, "random is not a state"),
        ]
    if "schedule" in good:
        wrong += [
            ({"schedule": None}, "not a dict"),
            ({"schedule": {**good["schedule"], "kind": "Other"}}, "its kind is 'Other'"),
            ({"schedule": {**good["schedule"], "version": 3}}, "version 3 is newer"),
        ]
    path = tmp_path / "wrong.json"
    for changes, message in wrong:
        state = {**good, **changes}
        with pytest.raises(ValueError, match=message):
            allocator.load_state_dict(state)
        assert allocator.state_dict() == before, changes
        write_state(path, state)
        with pytest.raises(ValueError, match=f"^state file {re.escape(str(path))}: .*{message}"):
            allocator.load(path)
        assert allocator.state_dict() == before, changes
    for key in good:
        with pytest.raises(ValueError, match=r"^state of "):
            allocator.load_state_dict({k: v for k, v in good.items() if k != key})
        assert allocator.state_dict() == before
    allocator.load_state_dict(good)
    assert allocator.state_dict() == good


def test_saving_where_nothing_can_be_written(tmp_path: Path) -> None:
    allocator = CapabilityAllocator()
    learn(allocator)
    with pytest.raises(OSError, match="nowhere"):
        allocator.save(tmp_path / "nowhere" / "a.json")


# ---- any order of anything -----------------------------------------------------------------------------------------

IDS = st.one_of(st.integers(0, 6), st.sampled_from(["a", "b", "6"]))


STATEFUL = KINDS | {
    "rank": RankAllocator,
    "rank-sized": lambda **o: RankAllocator(dataset_size=3, **o),
    "rank-refreshed": lambda **o: RankAllocator(refresh_every=2, step=1, **o),
}


class Steps(RuleBasedStateMachine):
    """An allocator, and a twin that is thrown away and loaded again whenever it likes: the two never differ."""

    folder: Path

    @initialize(kind=st.sampled_from(sorted(STATEFUL)), clip=st.booleans(), fractional=st.booleans())
    def start(self, kind: str, clip: bool, fractional: bool) -> None:
        def make() -> Allocator:
            history = PassRateHistory(window=2, fractional=fractional)
            return STATEFUL[kind](low=1, high=12, history=history, on_infeasible="clip" if clip else "raise")

        self.make, self.clip = make, clip
        self.allocator, self.twin, self.saved = make(), make(), None
        self.passes = 0.0

    @rule(ids=st.lists(IDS, max_size=8), share=st.floats(-0.2, 1.2))
    def allocate(self, ids: list[Any], share: float) -> None:
        total = round(len(ids) * (1 + share * 11))
        feasible = min(max(total, len(ids)), 12 * len(ids))
        if total != feasible and not self.clip:
            before = self.allocator.state_dict()
            for each in (self.allocator, self.twin):
                with pytest.raises(BudgetError):
                    each.allocate(ids, total)
            assert self.allocator.state_dict() == before
            return
        budgets = self.allocator.allocate(ids, total)
        assert budgets.sum() == feasible
        assert len(budgets) == len(ids) and (not len(ids) or (budgets.min() >= 1 and budgets.max() <= 12))
        assert self.allocator.metrics["clipped"] == feasible - total
        assert self.twin.allocate(ids, total).tolist() == budgets.tolist()
        metrics = self.allocator.metrics
        assert self.twin.metrics == metrics
        if ids:
            shares = [metrics[f"budget_{name}"] for name in ("unseen", *DIFFICULTY_CLASSES)]
            assert sum(shares) == pytest.approx(1.0) and min(shares) >= 0.0
            assert metrics["budget_min"] <= metrics["budget_mean"] <= metrics["budget_max"]
        passes = metrics.get("passes", 0.0)
        assert passes >= self.passes
        self.passes = passes

    @rule(ids=st.lists(IDS, max_size=8), data=st.data())
    def update(self, ids: list[Any], data: st.DataObject) -> None:
        rows = data.draw(st.lists(st.integers(0, len(ids) - 1), max_size=12)) if ids else []
        reward = st.sampled_from([0.0, 1.0, 0.3, 0.7, float("nan")])
        rewards = data.draw(st.lists(reward, min_size=len(rows), max_size=len(rows)))
        for each in (self.allocator, self.twin):
            each.update(ids, rewards, rows)

    @rule(row=st.integers(-3, 9))
    def refused_update(self, row: int) -> None:
        before = self.allocator.state_dict()
        with pytest.raises(ValueError, match=r"rows"):
            self.allocator.update(["a"], [1.0, 0.0], [0, row] if row else [0])
        assert self.allocator.state_dict() == before

    @rule()
    def save(self) -> None:
        self.saved = (self.allocator.state_dict(), self.folder / "saved.json")
        self.allocator.save(self.saved[1])

    @rule()
    def go_back(self) -> None:
        if self.saved is not None:
            for each in (self.allocator, self.twin):
                each.load(self.saved[1])
            self.passes = 0.0
            assert self.allocator.state_dict() == self.saved[0]

    @rule()
    def restart_the_twin(self) -> None:
        path = self.folder / "twin.json"
        self.twin.save(path)
        self.twin = self.make()
        self.twin.load(path)

    @invariant()
    def alike(self) -> None:
        assert self.allocator.state_dict() == self.twin.state_dict()
        rates = self.allocator.history.pass_rates([*range(7), "a", "b", "6", "never"])
        assert ((rates >= 0.0) & (rates <= 1.0)).all()


def test_any_order_of_steps(tmp_path: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    class Here(Steps):
        folder = tmp_path

    run_state_machine_as_test(Here, settings=settings(max_examples=60, stateful_step_count=25))
