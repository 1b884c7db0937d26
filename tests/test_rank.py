"""The difficulty-rank rule and the allocator around it."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coba_core.allocate import BudgetError
from coba_core.allocators import even_budgets
from coba_core.rank import RankAllocator, doubled_ranks, rank_budgets

VECTORS = json.loads((Path(__file__).parent / "vectors" / "rank_allocations.json").read_text())
pytestmark = pytest.mark.filterwarnings("ignore::coba_core.BudgetWarning")


@pytest.mark.parametrize("kind", [str, Fraction, float])
@pytest.mark.parametrize("case", VECTORS, ids=[case["name"] for case in VECTORS])
def test_vectors(case: dict, kind: type) -> None:
    rank = [kind(Fraction(k)) for k in case["rank"]]
    found = rank_budgets(rank, case["total_budget"], case["low"], case["high"])
    assert found.dtype == np.int64
    assert found.tolist() == case["budgets"]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int, int, int]:
    """Ranks over a data set of some size, as numerators of halves, and a feasible total."""
    size = draw(st.integers(1, 200))
    rank = draw(st.lists(st.integers(0, 2 * size - 2), min_size=1, max_size=24))
    low = draw(st.integers(0, 8))
    high = draw(st.integers(low, low + 24))
    total = draw(st.integers(len(rank) * low, len(rank) * high))
    return rank, size, total, low, high


@given(problems())
def test_sum_bounds_order_and_ties(problem: tuple[list[int], int, int, int, int]) -> None:
    rank, _, total, low, high = problem
    budgets = rank_budgets(rank, total, low, high)
    assert budgets.sum() == total
    assert budgets.min() >= low and budgets.max() <= high
    for i in range(len(rank)):
        for j in range(len(rank)):
            if rank[i] > rank[j]:
                assert budgets[i] >= budgets[j]
            elif rank[i] == rank[j] and i < j:
                assert budgets[i] - budgets[j] in (0, 1)


@given(problems())
def test_nobody_gets_less_than_the_exact_proportional_share(problem: tuple[list[int], int, int, int, int]) -> None:
    rank, _, total, low, high = problem
    budgets = rank_budgets(rank, total, low, high)
    for k, budget in zip(rank, budgets.tolist(), strict=True):
        if sum(rank):
            assert budget >= min(high, low + int(Fraction((total - len(rank) * low) * k, sum(rank))))


@given(problems())
def test_floats_of_a_ratio_decide_as_the_ratio_does(problem: tuple[list[int], int, int, int, int]) -> None:
    rank, size, total, low, high = problem
    exact = rank_budgets(rank, total, low, high).tolist()
    assert rank_budgets([k / (2 * size) for k in rank], total, low, high).tolist() == exact
    assert rank_budgets(np.array(rank) / (2 * size), total, low, high).tolist() == exact
    assert rank_budgets(np.array(rank), total, low, high).tolist() == exact


def test_float_ratios_are_recovered_for_large_data_sets() -> None:
    rng = np.random.default_rng(0)
    for size in (3, 999_983, 2**24):
        numerators = rng.integers(0, 2 * size - 1, 200)
        exact = rank_budgets(numerators, 1600, 4, 12).tolist()
        assert rank_budgets(numerators / (2 * size), 1600, 4, 12).tolist() == exact


def test_the_floor_has_no_float_error() -> None:
    # 30 * 0.1 / (0.1 + 0.2 + 0.3) is 4.999... in float64; the share is 5
    assert rank_budgets([0.1, 0.2, 0.3], 30, 0, 30).tolist() == [5, 10, 15]
    assert rank_budgets([2**62, 2**62], 8, 0, 8).tolist() == [4, 4]


@given(problems(), st.randoms())
def test_swapping_prompts_swaps_budgets(problem: tuple[list[int], int, int, int, int], random) -> None:
    rank, _, total, low, high = problem
    rank = list(dict.fromkeys(rank))
    total = min(max(total, len(rank) * low), len(rank) * high)
    order = list(range(len(rank)))
    random.shuffle(order)
    budgets = rank_budgets(rank, total, low, high)
    assert rank_budgets([rank[i] for i in order], total, low, high).tolist() == budgets[order].tolist()


@pytest.mark.parametrize("rank", [[], np.empty(0)])
def test_no_prompts(rank) -> None:
    assert rank_budgets(rank, 0, 2, 8).tolist() == []
    with pytest.raises(BudgetError):
        rank_budgets(rank, 1, 2, 8)


@pytest.mark.parametrize("total", [7, 33])
def test_infeasible_total(total: int) -> None:
    with pytest.raises(BudgetError, match=f"total_budget is {total}.*from 8 to 32"):
        rank_budgets([0, 1, 2, 3], total, 2, 8)


@pytest.mark.parametrize(
    ("rank", "message"),
    [
        ([0, -1], r"rank\[1\] is -1"),
        ([float("nan"), 0], r"rank\[0\] is nan"),
        ([0, float("inf")], r"rank\[1\] is inf"),
        (["a", 0], r"rank\[0\] is 'a'"),
        ([0, None], r"rank\[1\] is None"),
    ],
)
def test_refuses_ranks(rank: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rank_budgets(rank, 8, 2, 8)


def test_refuses_bounds() -> None:
    for low, high in ((5, 4), (-1, 4)):
        with pytest.raises(ValueError, match=f"low is {low} and high is {high}"):
            rank_budgets([0, 1], 8, low, high)


def test_doubled_ranks_share_ties() -> None:
    assert doubled_ranks(np.array([0.0, 1.0, 0.5, 1.0])).tolist() == [6, 1, 4, 1]
    assert doubled_ranks(np.array([0.1 + 0.2, 0.3])).tolist() == [1, 1]
    assert doubled_ranks(np.empty(0)).tolist() == []


def visit(allocator: RankAllocator, keys: list, rates: list[float], each: int = 4) -> None:
    """Each prompt gets `each` rollouts, of which the share `rates` succeeds."""
    rows = np.repeat(np.arange(len(keys)), each)
    rewards = np.concatenate([np.arange(each) < round(rate * each) for rate in rates]).astype(float)
    allocator.update(keys, rewards, rows)


def test_the_papers_window_and_ranks_over_three_passes() -> None:
    allocator = RankAllocator(start=8, low=4, high=12, dataset_size=4)
    first, second = ["a", "b"], ["c", "d"]
    for e, (low, high) in enumerate([(8, 8), (6, 10), (4, 12), (4, 12)]):
        for keys, rates in ((first, [1.0, 0.5]), (second, [0.25, 0.0])):
            budgets = allocator.allocate(keys, 16)
            assert allocator.metrics["passes"] == e
            assert (allocator.metrics["window_low"], allocator.metrics["window_high"]) == (low, high)
            ranks = {"a": 0, "b": 2, "c": 4, "d": 6} if e else dict.fromkeys("abcd", 0)
            assert budgets.tolist() == rank_budgets([ranks[k] for k in keys], 16, low, high).tolist()
            visit(allocator, keys, rates)


def test_ranks_stay_through_a_pass() -> None:
    allocator = RankAllocator(dataset_size=2, low=0, high=8, step=8)
    visit(allocator, [1, 2], [1.0, 0.0])
    before = allocator.allocate([1, 2], 8).tolist()
    visit(allocator, [1], [0.0], each=100)
    assert allocator.allocate([1, 2], 8).tolist() == before == [0, 8]
    visit(allocator, [2], [1.0], each=100)
    assert allocator.allocate([1, 2], 8).tolist() == [8, 0]


def test_a_recurring_prompt_ends_the_pass_before_its_step() -> None:
    allocator = RankAllocator(low=0, high=8, step=8)
    visit(allocator, [1, 2], [1.0, 0.0])
    visit(allocator, [3], [0.5])
    assert allocator.allocate([4, 5], 8).tolist() == [4, 4]
    assert allocator.metrics["passes"] == 0
    assert allocator.allocate([2, 1], 8).tolist() == [8, 0]
    assert allocator.metrics["passes"] == 1
    assert allocator.allocate([2, 1], 8).tolist() == [8, 0]
    assert allocator.metrics["passes"] == 1, "asking twice is not a pass"
    visit(allocator, [2, 1], [0.0, 1.0])
    visit(allocator, [3], [0.5])
    visit(allocator, [3], [0.5])
    allocator.allocate([9], 8)
    assert allocator.metrics["passes"] == 2, "an update without allocate counts as well"


def test_what_goes_beyond_a_pass_counts_for_the_next() -> None:
    allocator = RankAllocator(dataset_size=5)
    for expected in (0, 1, 1, 2, 3):  # 3, 6, 9, 12, 15 visits
        visit(allocator, [0, 1, 2], [0.0, 0.5, 1.0])
        allocator.allocate([0, 1, 2], 24)
        assert allocator.metrics["passes"] == expected


def test_a_prompt_twice_in_a_step_is_one_visit_with_pooled_rewards() -> None:
    allocator = RankAllocator(dataset_size=2, low=0, high=12, step=12)
    allocator.update([1, 1, 2], rewards=[1, 1, 0, 0, 1, 0], rows=[0, 0, 1, 1, 2, 2])
    allocator.allocate([1, 2], 12)
    assert allocator.metrics["passes"] == 1
    assert allocator.allocate([1, 1, 2], 12).tolist() == [4, 4, 4], "both have mean ½"


def test_refresh_every_n_steps() -> None:
    allocator = RankAllocator(refresh_every=2, low=0, high=8, step=8)
    visit(allocator, [1, 2], [1.0, 0.0])
    assert allocator.allocate([1, 2], 8).tolist() == [4, 4]
    visit(allocator, [1, 2], [1.0, 0.0])
    assert allocator.allocate([1, 2], 8).tolist() == [0, 8]


def test_unknown_prompts_stand_at_the_middle_of_the_known() -> None:
    allocator = RankAllocator(dataset_size=5, low=0, high=100, step=100)
    visit(allocator, list("abcde"), [1.0, 0.75, 0.5, 0.25, 0.0])
    new, middle = allocator.allocate(["new", "c"], 20).tolist()
    assert new == middle == 10
    assert allocator.allocate(["a", "new", "e"], 30).tolist() == [0, 10, 20]
    assert allocator.metrics["share_ranked"] == pytest.approx(2 / 3)
    assert allocator.metrics["rank_mean"] == pytest.approx(0.4)


def test_mean_reward_decides_not_success() -> None:
    allocator = RankAllocator(dataset_size=2, low=0, high=8, step=8)
    allocator.update([1, 2], rewards=[0.3, 0.1], rows=[0, 1])  # both below the threshold of a success
    assert allocator.allocate([1, 2], 8).tolist() == [0, 8]


def test_nan_rewards_are_left_out_and_infinite_ones_refused() -> None:
    allocator = RankAllocator(dataset_size=2, low=0, high=8, step=8)
    allocator.update([1, 2], rewards=[1.0, np.nan, 0.5, np.nan], rows=[0, 0, 1, 1])
    assert allocator.allocate([1, 2], 8).tolist() == [0, 8]
    before = allocator.state_dict()
    with pytest.raises(ValueError, match=r"rewards\[1\] is inf"):
        allocator.update([1, 2], rewards=[1.0, np.inf], rows=[0, 1])
    assert allocator.state_dict() == before


def test_before_anything_is_known_budgets_are_even_whatever_the_total() -> None:
    allocator = RankAllocator()
    for total in (24, 25, 26, 200):
        assert allocator.allocate([1, 2, 3], total).tolist() == even_budgets(3, total).tolist()
    assert allocator.allocate([], 0).tolist() == []


def test_total_outside_the_window() -> None:
    with pytest.raises(BudgetError):
        RankAllocator(start=8, low=4, high=12).allocate([1, 2], 18)
    clipping = RankAllocator(start=8, low=4, high=12, on_infeasible="clip")
    assert clipping.allocate([1, 2], 18).tolist() == [8, 8]
    assert clipping.metrics["clipped"] == -2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"step": -1}, "step is -1"),
        ({"step": 1.5}, "step is 1.5, not an integer"),
        ({"start": "8"}, "start is '8', not an integer"),
        ({"dataset_size": 2.0}, "dataset_size is 2.0, not an integer"),
        ({"start": 1}, "start is 1"),
        ({"dataset_size": 0}, "dataset_size is 0"),
        ({"refresh_every": 0}, "refresh_every is 0"),
        ({"dataset_size": 3, "refresh_every": 3}, "give one of them"),
    ],
)
def test_refuses_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RankAllocator(**settings)


@pytest.mark.parametrize(
    "settings", [{}, {"dataset_size": 7}, {"refresh_every": 3}, {"start": 8, "low": 4, "high": 12}]
)
def test_resume_continues_as_if_never_stopped(settings: dict, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    whole, stopped = RankAllocator(**settings), RankAllocator(**settings)
    for step in range(12):
        keys = [f"p{i}" for i in rng.permutation(7)[:3]]
        rates = rng.integers(0, 5, 3) / 4
        assert whole.allocate(keys, 24).tolist() == stopped.allocate(keys, 24).tolist()
        assert whole.metrics == stopped.metrics
        visit(whole, keys, list(rates))
        visit(stopped, keys, list(rates))
        stopped.save(tmp_path / "state.json")
        stopped = RankAllocator(**settings)
        stopped.load(tmp_path / "state.json")
        assert stopped.state_dict() == whole.state_dict(), step


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"kind": "UniformAllocator"},
        {"keys": ["a"]},
        {"keys": ["a", "a"]},
        {"keys": ["a", 1.5]},
        {"reward_sums": [1.0, None]},
        {"reward_sums": "x"},
        {"reward_counts": [1, 0]},
        {"doubled_ranks": [0, -2]},
        {"doubled_ranks": [0, 99]},
        {"passes": -1},
        {"progress": 1.5},
        {"pass_keys": None},
        {"history": {}},
        {"extra": 1},
    ],
)
def test_a_wrong_state_changes_nothing(change: dict) -> None:
    source, allocator = RankAllocator(), RankAllocator()
    visit(source, ["a", "b"], [1.0, 0.0])
    visit(allocator, ["x", "y"], [0.0, 0.5])
    before = allocator.state_dict()
    with pytest.raises(ValueError):
        allocator.load_state_dict({**source.state_dict(), **change})
    assert allocator.state_dict() == before


def test_a_refused_total_does_not_end_the_pass() -> None:
    allocator = RankAllocator(low=1, high=12)
    allocator.update(["a", "b"], [1.0, 0.0], [0, 1])
    before = allocator.state_dict()
    with pytest.raises(BudgetError):
        allocator.allocate(["a"], 100)
    assert allocator.state_dict() == before
    allocator.allocate(["a", "b"], 8)
    assert allocator.state_dict()["passes"] == 1


def test_rewards_too_large_for_decimals_are_ranked() -> None:
    assert doubled_ranks(np.array([1e300, 0.5, 1e299])).tolist() == [0, 4, 2]
