"""Faults of the published code of CoBA-RL, Knapsack-RL and E3 that this package must not have: each with what is right.

The faults of temperature schedules are in test_temperature.py.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from coba_core import (
    BudgetError,
    CapabilityAllocator,
    CapabilityValue,
    KnapsackAllocator,
    KnapsackValue,
    PassRateHistory,
    UniformAllocator,
    allocate,
    group_advantages,
    repeat_index,
)
from coba_core.rank import rank_budgets

pytestmark = pytest.mark.filterwarnings("ignore::coba_core.BudgetWarning")
KNAPSACK = KnapsackValue()
CAPABILITY = CapabilityValue(7.26, 3.74)


def test_knapsack_gives_to_the_better_prompt(solver: Any) -> None:
    """Published: [3, 3]."""
    assert solver([0.4, 0.1], 6, low=2, high=16, value=KNAPSACK).tolist() == [4, 2]


def test_knapsack_of_four_alike(solver: Any) -> None:
    """Published: an AssertionError."""
    assert solver([0.5] * 4, 32, value=KNAPSACK).tolist() == [8, 8, 8, 8]


@pytest.mark.parametrize("value", [KNAPSACK, CAPABILITY, None], ids=["knapsack", "capability", "default"])
def test_unsolved_prompts_share_evenly(solver: Any, value: Any) -> None:
    """Published: [10, 8, 6], by position."""
    assert solver([0.0, 0.0, 0.0], 24, low=2, value=value).tolist() == [8, 8, 8]
    assert solver([1.0, 0.0, 1.0, 0.0], 34, low=2, value=value).tolist() == [9, 9, 8, 8]


def test_unsolved_prompts_share_evenly_in_a_step() -> None:
    for allocator in (CapabilityAllocator(high=24), KnapsackAllocator(high=24), CapabilityAllocator.released(high=24)):
        allocator.update(["a", "b", "c"], [0.0] * 24, repeat_index([8, 8, 8]))
        assert allocator.allocate(["a", "b", "c"], 24).tolist() == [8, 8, 8]


def test_ranks_stay_below_the_cap() -> None:
    """Published: [5, 4, 4, 19]."""
    assert rank_budgets([0, 0, 0, 0.75], 32, 4, 12).tolist() == [7, 7, 6, 12]


def test_a_total_that_cannot_be_spent_is_said(solver: Any) -> None:
    """Published: [4, 4], half of it spent in silence."""
    for value in (KNAPSACK, CAPABILITY, None):
        with pytest.raises(BudgetError, match=r"^total_budget is 16; 2 prompts .* take from 4 to 8$"):
            solver([0.5, 0.5], 16, high=4, value=value)


def test_clipping_is_in_the_metrics() -> None:
    allocator = UniformAllocator(high=4, on_infeasible="clip")
    assert allocator.allocate([0, 1], 16).tolist() == [4, 4]
    assert allocator.metrics["clipped"] == -8.0


def test_a_reward_of_0_95_is_a_success() -> None:
    """Published: a failure, as it is compared with 1.0."""
    history = PassRateHistory(prior_strength=0.0)
    history.update(["a"], [0.95, 0.2], [0, 0])
    assert history.pass_rates(["a"]).tolist() == [0.5]
    strict = PassRateHistory(threshold=1.0, prior_strength=0.0)
    strict.update(["a"], [0.95, 0.2], [0, 0])
    assert strict.pass_rates(["a"]).tolist() == [0.0]


def test_a_prompt_never_seen_has_the_global_rate() -> None:
    """Published: never solved, or the easiest of all."""
    history = PassRateHistory()
    history.update(["a", "b"], [1, 1, 1, 1, 0, 0, 0, 1], repeat_index([4, 4]))
    assert history.pass_rates(["new"]).tolist() == [0.625]
    history.update(["c"], [0.0] * 100, [0] * 100)
    rates = history.pass_rates(["new", "c"])
    assert 0.0 < rates[1] < 0.01 < rates[0] == pytest.approx(1.25 / 3)


def test_a_restart_does_not_measure_anew(tmp_path: Any) -> None:
    """Published: after a resume every prompt is unknown."""
    allocator, resumed = CapabilityAllocator(high=32), CapabilityAllocator(high=32)
    allocator.update([1, "1"], [1, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1])
    allocator.save(tmp_path / "state.json")
    resumed.load(tmp_path / "state.json")
    assert resumed.allocate([1, "1", 2], 40).tolist() == allocator.allocate([1, "1", 2], 40).tolist()
    assert json.loads(json.dumps(resumed.state_dict())) == allocator.state_dict()


def test_a_group_of_one_has_no_advantage() -> None:
    """Published: NaN, or its raw reward."""
    for scale in ("group", "none", "batch"):
        assert group_advantages([5.0, 1.0, 0.0], [0, 1, 1], scale=scale)[0] == 0.0
        assert group_advantages([5.0], [0], scale=scale).tolist() == [0.0]


def test_groups_are_by_id_not_by_position() -> None:
    """Published: means mixed across the groups."""
    rewards = [1, 2, 3, 4, 10, 12, 5, 6, 7]
    expected = [-1.5, -0.5, 0.5, 1.5, -1, 1, -1, 0, 1]
    rows = repeat_index([4, 2, 3])
    assert group_advantages(rewards, rows, scale="none").tolist() == expected
    order = np.random.default_rng(0).permutation(9)
    shuffled = group_advantages(np.array(rewards)[order], rows[order], scale="none")
    assert shuffled.tolist() == np.array(expected, dtype=float)[order].tolist()


def test_a_prompt_twice_in_a_step_is_pooled() -> None:
    """Published: an assertion, or the window aged twice."""
    history = PassRateHistory(window=2, prior_strength=0.0)
    history.update(["a"], [1, 1], [0, 0])
    history.update(["a", "a"], [0, 0, 0, 1], [0, 0, 1, 1])
    assert history.pass_rates(["a"]).tolist() == [3 / 6]
    allocator = CapabilityAllocator(high=32)
    allocator.update(["a", "a", "b"], [1, 0, 1, 0, 0, 0], [0, 0, 1, 1, 2, 2])
    assert allocator.allocate(["a", "a", "b"], 30).sum() == 30


def test_nothing_depends_on_the_position_of_a_prompt(solver: Any) -> None:
    """The released code serves prompts in the order of the batch."""
    p = [0.1, 0.35, 0.6, 0.85, 0.5]
    for value in (KNAPSACK, CAPABILITY):
        budgets = solver(p, 50, value=value)
        assert solver(p[::-1], 50, value=value).tolist() == budgets[::-1].tolist()


def test_the_published_heap_is_not_beaten() -> None:
    """Heap, threshold, DP and the sort of all gains: one answer, in the papers' own setting."""
    p = np.random.default_rng(5).beta(0.5, 0.8, 128)
    for value in (KNAPSACK, CAPABILITY):
        answers = {
            tuple(allocate(p, 2048, value=value, solver=solver, backend="numpy").tolist())
            for solver in ("heap", "threshold", "dp", "reference")
        }
        assert len(answers) == 1
