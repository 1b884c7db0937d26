"""Every solver of every backend gives the reference's allocation, and that allocation is what it should be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coba_core import (
    BetaPreference,
    CapabilityValue,
    Exponential,
    FirstSuccess,
    GainTable,
    InverseVariance,
    KnapsackValue,
    MixedGroup,
    PowerPreference,
    Value,
    allocate,
)

EDGES = [0.0, 1.0, 0.5, 0.25, 0.75, 5e-324, 2.0**-1022, 1e-300, 1e-16, 2.0**-53, 1.0 - 2.0**-53, 1.0 - 2.0**-52]
RATES = st.one_of(st.sampled_from(EDGES), st.integers(0, 8).map(lambda s: s / 8), st.floats(0.0, 1.0))
SHAPES = st.one_of(st.sampled_from([1e-3, 0.5, 1.0, 2.0, 7.26, 1e4]), st.floats(1e-3, 1e4))
EXPONENTS = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 1e4]), st.floats(0.0, 1e4))
TAUS = st.one_of(st.sampled_from([1e-6, 0.01, 5.0, 1e9]), st.floats(1e-6, 1e9))
PREFERENCES = st.one_of(st.builds(BetaPreference, SHAPES, SHAPES), st.builds(PowerPreference, EXPONENTS, EXPONENTS))
SATURATIONS = st.one_of(
    st.builds(Exponential, TAUS), st.sampled_from([MixedGroup(), FirstSuccess(), InverseVariance()])
)


def reference(pass_rates: Any, total: int, **options: Any) -> np.ndarray:
    return allocate(pass_rates, total, solver="reference", backend="numpy", **options)


def assert_all_equal(
    solvers: list[Any], pass_rates: Any, total: int, expected: np.ndarray | None = None, **options: Any
) -> np.ndarray:
    """Every one of `solvers` gives the reference's budgets."""
    expected = reference(pass_rates, total, **options) if expected is None else expected
    assert expected.sum() == total
    for solver in solvers:
        found = solver(pass_rates, total, **options)
        assert found.dtype == np.int64
        assert found.tolist() == expected.tolist(), str(solver)
    return expected


@st.composite
def instances(draw: st.DrawFn) -> tuple[list[float], int, dict[str, Any]]:
    """Pass rates, a feasible total, and the other arguments."""
    rates = draw(st.lists(RATES, min_size=1, max_size=24))
    value = draw(PREFERENCES) * draw(SATURATIONS)
    low = draw(st.integers(value.concave_from, value.concave_from + 2))
    high = low + draw(st.sampled_from([0, 1, 2, 7, 40]))
    total = draw(st.integers(low * len(rates), high * len(rates)))
    return rates, total, {"low": low, "high": high, "value": value}


@given(instances())
@settings(max_examples=8 * settings().max_examples)
def test_adversarial_floats(exact_solvers: list[Any], instance: tuple[list[float], int, dict[str, Any]]) -> None:
    rates, total, options = instance
    assert_all_equal([s for s in exact_solvers if s.implementation.backend != "numpy"], rates, total, **options)


@given(instances())
@settings(max_examples=settings().max_examples // 2)
def test_adversarial_floats_in_numpy(
    exact_solvers: list[Any], instance: tuple[list[float], int, dict[str, Any]]
) -> None:
    rates, total, options = instance
    assert_all_equal([s for s in exact_solvers if s.implementation.backend == "numpy"], rates, total, **options)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[list[float]], int, int, int]:
    """Falling tables in which nearly every gain occurs many times."""
    prompts, width = draw(st.integers(1, 16)), draw(st.integers(1, 12))
    cells = draw(
        st.lists(
            st.lists(st.sampled_from([0.0, 5e-324, 1e-300, 1.0, 1.5, 2.0, 1e300]), min_size=width, max_size=width),
            min_size=prompts,
            max_size=prompts,
        )
    )
    low = draw(st.integers(0, width))
    high = draw(st.integers(low, width))
    return [sorted(row, reverse=True) for row in cells], low, high, draw(st.integers(prompts * low, prompts * high))


@given(tables())
def test_tables_with_ties(exact_solvers: list[Any], problem: tuple[list[list[float]], int, int, int]) -> None:
    rows, low, high, total = problem
    assert_all_equal(
        exact_solvers, np.full(len(rows), 0.5), total, low=low, high=high, value=GainTable(rows)
    )


VALUES = [
    CapabilityValue(7.26, 3.74),
    CapabilityValue(2.54, 8.46, 0.3),
    KnapsackValue(),
    PowerPreference(0, 2) * FirstSuccess(),
    PowerPreference(0, 0) * InverseVariance(),
    BetaPreference(3.0, 5.0) * MixedGroup(),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
@pytest.mark.parametrize("prompts", [1, 2, 63, 127, 128, 129, 300, 1000])
def test_random_instances(exact_solvers: list[Any], prompts: int, value: Value) -> None:
    random = np.random.default_rng(prompts)
    for high in (3, 130):
        continuous = random.beta(0.6, 0.9, prompts)
        rolled = random.binomial(8, continuous) / 8.0
        for p in (continuous, rolled):
            total = int(random.integers(prompts, prompts * high + 1))
            assert_all_equal(exact_solvers, p, total, low=1, high=high, value=value)


@pytest.mark.parametrize("low", [0, 1, 2])
@pytest.mark.parametrize("width", [0, 1, 2, 31])
def test_every_total(exact_solvers: list[Any], low: int, width: int) -> None:
    """From all at `low` to all at `high`, with solved and unsolved prompts that share what nobody gains from."""
    p = [0.0, 0.5, 1.0, 0.25, 0.0, 0.5]
    value = CapabilityValue(7.26, 3.74)
    before = None
    for total in range(low * 6, (low + width) * 6 + 1):
        budgets = assert_all_equal(exact_solvers, p, total, low=low, high=low + width, value=value)
        if before is not None:
            assert (budgets - before).tolist().count(1) == 1 and (budgets >= before).all()
        before = budgets


@pytest.mark.parametrize("prompts", [5, 3000, 40_000])
@pytest.mark.parametrize("rates", [[0.5], [0.0], [1.0], [0.25, 0.75], [0.0, 1.0], [0.125, 0.5, 0.0, 1.0]], ids=repr)
def test_exact_ties_by_the_thousand(exact_solvers: list[Any], prompts: int, rates: list[float]) -> None:
    """p and 1-p tie under a symmetric preference, equal p always."""
    p = np.resize(rates, prompts)
    value = BetaPreference(4.0, 4.0) * Exponential(5.0)
    for total in (prompts * 2 + 1, prompts * 3 - 1, prompts * 7 + prompts // 3, prompts * 15 + prompts // 2):
        if total > prompts * 16:
            continue
        few = [s for s in exact_solvers if prompts < 10_000 or s.implementation.backend != "numpy"]
        budgets = assert_all_equal(few, p, total, high=16, value=value)
        for rate in set(rates):
            group = budgets[p == rate]
            assert group.max() - group.min() <= 1
            assert (np.diff(group) <= 0).all()  # the lower index first


@pytest.mark.parametrize("value", [*VALUES, BetaPreference(4.0, 4.0) * Exponential(1e9)], ids=repr)
@pytest.mark.parametrize("distinct", [1, 17, 199, 200, 201])
def test_few_distinct_pass_rates(compiled: Any, distinct: int, value: Value) -> None:
    """The compiled threshold groups up to 200 equal pass rates, and gives what the heap does prompt by prompt."""
    random = np.random.default_rng(distinct)
    for prompts in (64, 403, 2000):
        p = random.choice(np.append(random.uniform(0, 1, distinct), [0.0, 1.0, 5e-324, 1.0 - 2.0**-53]), prompts)
        for high in (3, 130):
            total = int(random.integers(prompts, prompts * high + 1))
            with compiled.module():
                options: dict[str, Any] = {"low": 1, "high": high, "value": value, "backend": compiled.backend}
                expected = allocate(p, total, solver="heap", **options)
                assert np.array_equal(allocate(p, total, solver="threshold", **options), expected)


@pytest.mark.parametrize("tau", [1e9, 1e16, 1e300])
def test_plateaus(exact_solvers: list[Any], tau: float) -> None:
    """k so small that neighbouring gains round to the same number: budgets level out, prompt by prompt."""
    random = np.random.default_rng(11)
    for p in (np.full(200, 0.3), random.uniform(0, 1, 200), random.binomial(4, 0.5, 200) / 4.0):
        for total in (401, 3000, 7777):
            assert_all_equal(exact_solvers, p, total, high=40, value=CapabilityValue(3.0, 3.0, tau))


def test_parameters_one_a_prompt(exact_solvers: list[Any]) -> None:
    random = np.random.default_rng(12)
    p = random.uniform(0, 1, 301)
    alpha, beta, tau = random.uniform(0.5, 10, (3, 301))
    for preference in (BetaPreference(alpha, beta), BetaPreference(alpha, 2.0), PowerPreference(alpha, beta)):
        for saturation in (Exponential(tau), Exponential(5.0), MixedGroup(), FirstSuccess(), InverseVariance()):
            assert_all_equal(exact_solvers, p, 4000, value=preference * saturation)


# ---- dynamic programming: it adds gains up, and must still come to the same units ----------------------------------


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_dp_gives_the_same_units(dp_solvers: list[Any], value: Value) -> None:
    random = np.random.default_rng(13)
    for prompts, high in ((1, 40), (2, 30), (7, 20), (40, 12), (64, 33)):
        for p in (random.beta(0.6, 0.9, prompts), random.binomial(8, 0.4, prompts) / 8.0, np.full(prompts, 0.5)):
            total = int(random.integers(prompts, prompts * high + 1))
            assert_all_equal(dp_solvers, p, total, low=1, high=high, value=value)


@given(tables())
@settings(max_examples=60)
def test_dp_on_tables(dp_solvers: list[Any], problem: tuple[list[list[float]], int, int, int]) -> None:
    rows, low, high, total = problem
    plain = [[min(x, 2.0) if x >= 1.0 else 0.0 for x in row] for row in rows]
    assert_all_equal(dp_solvers, np.full(len(rows), 0.5), total, low=low, high=high, value=GainTable(plain))


def test_auto_is_the_dp_at_the_published_size(dp_solvers: list[Any]) -> None:
    """M = 512, total 8192, [2, 128]: the papers' setting, by the call that a trainer makes."""
    p = np.random.default_rng(14).binomial(16, np.random.default_rng(15).beta(0.5, 0.7, 512)) / 16.0
    budgets = allocate(p, 8192)
    fast = [solver for solver in dp_solvers if solver.implementation.backend != "numpy"]
    assert_all_equal(fast, p, 8192, expected=budgets)
    assert budgets.tolist() == reference(p, 8192).tolist()


# ---- properties ---------------------------------------------------------------------------------------------------

SIZES = [(1, 2, 9), (37, 0, 64), (512, 2, 128), (2000, 2, 128), (2000, 1, 600)]


def total_of(random: np.random.Generator, prompts: int, low: int, high: int) -> int:
    return int(random.integers(prompts * low, min(prompts * high, 1_000_000) + 1))


@pytest.mark.parametrize("value", [VALUES[0], VALUES[3], None], ids=repr)
@pytest.mark.parametrize("prompts, low, high", SIZES)
def test_sum_bounds_and_no_exchange(large_solver: Any, prompts: int, low: int, high: int, value: Value | None) -> None:
    random = np.random.default_rng(prompts + high)
    p = random.beta(0.6, 0.9, prompts)
    total = total_of(random, prompts, low, high)
    budgets = large_solver(p, total, low=low, high=high, value=value)
    assert budgets.sum() == total
    assert budgets.min() >= low and budgets.max() <= high
    judge = VALUES[0] if value is None else value
    if value is None:
        return
    last = judge.log_gains(p, np.maximum(budgets - 1, 0))[budgets > low]
    following = judge.log_gains(p, budgets)[budgets < high]
    if len(last) and len(following):
        assert last.min() >= following.max()


@pytest.mark.parametrize("value", [VALUES[0], VALUES[2]], ids=repr)
@pytest.mark.parametrize("prompts, high", [(2, 60), (100, 64), (2000, 128)])
def test_swapping_two_prompts_swaps_their_budgets(large_solver: Any, prompts: int, high: int, value: Value) -> None:
    random = np.random.default_rng(prompts)
    p = random.uniform(0.01, 0.99, prompts)
    total = prompts * 9 + 1
    budgets = large_solver(p, total, high=high, value=value)
    for _ in range(5):
        order = np.arange(prompts)
        i, j = random.integers(0, prompts, 2)
        order[[i, j]] = order[[j, i]]
        assert large_solver(p[order], total, high=high, value=value).tolist() == budgets[order].tolist()
    order = random.permutation(prompts)
    assert large_solver(p[order], total, high=high, value=value).tolist() == budgets[order].tolist()


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_equal_prompts_differ_by_at_most_one(large_solver: Any, value: Value) -> None:
    random = np.random.default_rng(16)
    p = random.permutation(np.repeat(random.uniform(0, 1, 20), 50))
    budgets = large_solver(p, 20_011, value=value)
    for rate in np.unique(p):
        group = budgets[p == rate]
        assert group.max() - group.min() <= 1


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_more_total_never_lowers_a_budget(large_solver: Any, value: Value) -> None:
    random = np.random.default_rng(17)
    p = random.binomial(16, random.uniform(0, 1, 400)) / 16.0
    before = np.full(400, 1)
    for total in [*range(400, 420), 1000, 1001, 5000, 20_000, 50_000, 51_199, 51_200]:
        budgets = large_solver(p, total, low=1, high=128, value=value)
        assert (budgets >= before).all()
        before = budgets


@pytest.mark.parametrize("value", [VALUES[0], VALUES[2], VALUES[3]], ids=repr)
@pytest.mark.parametrize("prompts", [32_769, 50_001])
def test_batches_of_tens_of_thousands(compiled: Any, prompts: int, value: Value) -> None:
    """Beyond what the compiled threshold keeps in the cache; its threads change nothing."""
    random = np.random.default_rng(prompts)
    for p in (random.beta(0.6, 0.9, prompts), random.binomial(8, 0.5, prompts) / 8.0):
        if value is VALUES[3]:
            p = np.minimum(p, 0.999)
        for total in (prompts * 2 + 7, prompts * 7 + 3):
            with compiled.module():
                expected = allocate(p, total, value=value, solver="heap", backend=compiled.backend)
                for threads in (1, 3):
                    found = allocate(
                        p, total, value=value, solver="threshold", backend=compiled.backend, threads=threads
                    )
                    assert np.array_equal(found, expected)


def test_a_million_units(large_solver: Any) -> None:
    """M = 2,000 with a budget of 10⁶: threshold and heap agree with the vectorised cut of the sorted gains."""
    p = np.random.default_rng(18).uniform(0, 1, 2000)
    value = CapabilityValue(6.0, 5.0, 60.0)
    budgets = large_solver(p, 1_000_000, low=2, high=900, value=value)
    table = value.log_gain_table(p, 2, 900)
    cut = np.partition(table.ravel(), table.size - (1_000_000 - 4000))[table.size - (1_000_000 - 4000)]
    assert ((table > cut).sum(axis=1) + 2 <= budgets).all()
    assert (budgets <= (table >= cut).sum(axis=1) + 2).all()
    assert budgets.sum() == 1_000_000
