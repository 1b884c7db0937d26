"""Every preference times every saturation against high precision; tables, custom gains, and what is refused."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf

from coba_core import (
    BetaPreference,
    CapabilityValue,
    CustomValue,
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
from coba_core.values import log_beta

RATES = [1e-12, 0.01, 0.125, 0.3, 0.5, 0.7, 0.96, 1.0 - 1e-12]

PREFERENCES: list[tuple[Any, Any]] = [
    (BetaPreference(7.26, 3.74), lambda p: p ** mpf("6.26") * (1 - p) ** mpf("2.74") / mp.beta("7.26", "3.74")),
    (BetaPreference(0.5, 20), lambda p: p ** mpf("-0.5") * (1 - p) ** 19 / mp.beta(0.5, 20)),
    (BetaPreference(1, 1), lambda p: mpf(1)),
    (PowerPreference(1, 2), lambda p: p * (1 - p) ** 2),
    (PowerPreference(0, 2.5), lambda p: (1 - p) ** mpf(2.5)),
    (PowerPreference(), lambda p: mpf(1)),
]
SATURATIONS: list[tuple[Any, Any]] = [
    (Exponential(), lambda b, p: 1 - mp.exp(-p * (1 - p) / 5 * b)),
    (Exponential(0.125), lambda b, p: 1 - mp.exp(-p * (1 - p) * 8 * b)),
    (MixedGroup(), lambda b, p: 1 - p**b - (1 - p) ** b),
    (FirstSuccess(), lambda b, p: 1 - (1 - p) ** b),
    (InverseVariance(), lambda b, p: -p * (1 - p) / b),
]
COMBINATIONS = [
    pytest.param(a, w, b, s, id=f"{type(a).__name__}{i}-{type(b).__name__}{j}")
    for i, (a, w) in enumerate(PREFERENCES)
    for j, (b, s) in enumerate(SATURATIONS)
]


@pytest.fixture(autouse=True)
def precision() -> Any:
    with mp.workprec(2500):
        yield


def assert_close(found: Any, truth: list[Any], relative: float) -> None:
    for x, t in zip(np.asarray(found).tolist(), truth, strict=True):
        assert abs(mpf(x) - t) <= relative * abs(t) + 2.0**-1022, (x, float(t))  # what is less underflows


@pytest.mark.parametrize("preference, w, saturation, s", COMBINATIONS)
def test_gains_and_values(preference: Any, w: Any, saturation: Any, s: Any) -> None:
    value = preference * saturation
    assert isinstance(value, Value)
    for b in (1, 2, 7, 30):
        budgets = [b] * len(RATES)
        gain = [w(mpf(p)) * (s(b + 1, mpf(p)) - s(b, mpf(p))) for p in RATES]
        assert_close(value.gains(RATES, budgets), gain, 1e-12)
        logs = value.log_gains(RATES, budgets)
        assert logs.tolist() == pytest.approx([float(mp.log(x)) for x in gain], rel=4 * 2.0**-52, abs=1e-13)
        levels = [w(mpf(p)) * s(b, mpf(p)) for p in RATES]
        assert_close(value.values(RATES, budgets), levels, 1e-12)
        assert value.total(RATES, budgets) == pytest.approx(float(sum(levels)), rel=1e-12)


@pytest.mark.parametrize("preference, w, saturation, s", COMBINATIONS)
def test_the_table_holds_the_gains(preference: Any, w: Any, saturation: Any, s: Any) -> None:
    value = preference * saturation
    table = value.log_gain_table(RATES, 1, 9)
    assert table.shape == (len(RATES), 8)
    for column, b in enumerate(range(1, 9)):
        assert table[:, column].tolist() == value.log_gains(RATES, [b] * len(RATES)).tolist()
    assert value.log_gain_table(RATES, 3, 3).shape == (len(RATES), 0)


@pytest.mark.parametrize("preference, w, saturation, s", COMBINATIONS)
def test_the_first_rollout(preference: Any, w: Any, saturation: Any, s: Any) -> None:
    """Where the gains fall from B = 0 on, the first rollout counts like any other."""
    value = preference * saturation
    if value.concave_from == 0:
        gain = [w(mpf(p)) * (s(1, mpf(p)) - s(0, mpf(p))) for p in RATES]
        assert_close(value.gains(RATES, [0] * len(RATES)), gain, 1e-12)
        assert value.total(RATES, [0] * len(RATES)) == 0.0


def test_concave_bounds_are_where_the_gains_begin_to_fall() -> None:
    for saturation, s in SATURATIONS:
        first = saturation.concave_from
        for p in RATES:
            levels = [s(b, mpf(p)) for b in range(first, first + 20)]
            gains = [y - x for x, y in pairwise(levels)]
            assert all(y < x for x, y in pairwise(gains))
        if isinstance(saturation, MixedGroup):
            assert s(1, mpf(0.5)) == 0 and s(2, mpf(0.5)) == 0.5 and s(0, mpf(0.5)) == -1


@pytest.mark.parametrize("preference, w, saturation, s", COMBINATIONS)
def test_solved_and_unsolved_prompts_are_worth_nothing(preference: Any, w: Any, saturation: Any, s: Any) -> None:
    value = preference * saturation
    assert value.gains([0.0, 1.0], [1, 1]).tolist() == [0.0, 0.0]
    if not isinstance(saturation, FirstSuccess):
        assert value.values([0.0, 1.0], [3, 3]).tolist() == [0.0, 0.0]


def test_first_success_of_a_solved_prompt_is_its_first_rollout() -> None:
    value = PowerPreference(0, 0) * FirstSuccess()
    assert value.gains([1.0, 1.0], [0, 1]).tolist() == [1.0, 0.0]
    assert value.values([1.0, 1.0, 0.0], [0, 5, 5]).tolist() == [0.0, 1.0, 0.0]
    assert allocate([1.0, 0.5], 4, low=0, value=value).tolist() == [1, 3]


def test_a_weight_beyond_the_floats_times_a_level_within() -> None:
    """p^-0.999 overflows at the smallest p, the value does not."""
    found = CapabilityValue(1e-3, 1.0).total([5e-324], [10])
    p = mpf(5e-324)
    truth = p ** mpf(mpf(1e-3) - 1) * -mp.expm1(-p * (1 - p) * 2) / mp.beta(mpf(1e-3), 1)
    assert found == pytest.approx(float(truth), rel=1e-11)


def test_named_values_are_the_papers() -> None:
    """2602.03048 eq. 9 and 2509.25849, by their own formulas."""
    p, b = np.array([0.2, 0.6]), np.array([3, 9])
    for i in range(2):
        x, n = mpf(p[i]), int(b[i])
        coba = x ** mpf(6) * (1 - x) ** 3 / mp.beta(7, 4) * (1 - mp.exp(-x * (1 - x) * n / 5))
        assert CapabilityValue(7, 4).values(p, b)[i] == pytest.approx(float(coba), rel=1e-14)
        knapsack = x * (1 - x) ** 2 * (1 - x**n - (1 - x) ** n)
        assert KnapsackValue().values(p, b)[i] == pytest.approx(float(knapsack), rel=1e-14)


def test_parameters_one_a_prompt() -> None:
    alpha, beta, tau = np.array([1.0, 3.0, 9.0]), np.array([2.0, 8.0, 2.0]), np.array([1.0, 5.0, 25.0])
    p, b = [0.2, 0.5, 0.9], [2, 3, 4]
    value = CapabilityValue(alpha, beta, tau)
    for name in ("log_gains", "gains", "values"):
        whole = getattr(value, name)(p, b)
        for i in range(3):
            single = CapabilityValue(float(alpha[i]), float(beta[i]), float(tau[i]))
            assert whole[i] == pytest.approx(getattr(single, name)(p[i : i + 1], b[i : i + 1])[0], rel=1e-13)
    mixed = PowerPreference(alpha, 2.0) * Exponential(tau)
    assert mixed.gains(p, b).shape == (3,)


def test_reweighting() -> None:
    p, b = [0.2, 0.5], [2, 3]
    factors = np.array([0.5, 4.0])
    for value in (CapabilityValue(7, 4), KnapsackValue(), GainTable([[4.0, 3.0, 2.0, 1.0]] * 2)):
        once, twice = value.reweighted(factors), value.reweighted(factors).reweighted(factors)
        assert once.gains(p, b).tolist() == pytest.approx((value.gains(p, b) * factors).tolist(), rel=1e-14)
        assert twice.gains(p, b).tolist() == pytest.approx((value.gains(p, b) * factors**2).tolist(), rel=1e-14)
    value = CapabilityValue(7, 4).reweighted(factors)
    assert value.total(p, b) == pytest.approx(float(np.dot(CapabilityValue(7, 4).values(p, b), factors)), rel=1e-14)


# ---- log-beta ------------------------------------------------------------------------------------------------------


def test_log_beta() -> None:
    random = np.random.default_rng(21)
    pairs = [
        *np.exp(random.uniform(-7, 9.3, (1500, 2))).tolist(),
        *random.uniform(0.01, 25, (1500, 2)).tolist(),
        *[(a, 11.0 - a) for a in np.linspace(0.5, 10.5, 201).tolist()],
        *[(float(a), float(b)) for a in (1, 2, 3, 9, 10, 11, 19, 20, 21) for b in (1, 2, 9, 10, 19, 20, 21, 1000)],
    ]
    for a, b in pairs:
        mp.prec = 200
        truth = mp.loggamma(mpf(a)) + mp.loggamma(mpf(b)) - mp.loggamma(mpf(a) + mpf(b))
        assert abs(log_beta(a, b) - truth) <= 32 * 2.0**-52 * max(1, abs(truth)), (a, b)
        assert log_beta(a, b) == log_beta(b, a)
    assert log_beta(1.0, 1.0) == 0.0


def test_log_beta_of_the_extremes() -> None:
    for a, b in [(1e-300, 1e-300), (1e-300, 5.0), (1e-3, 1e4), (1e8, 1e-8), (1e-290, 19.0)]:
        with mp.workprec(1200):
            truth = mp.loggamma(mpf(a)) + mp.loggamma(mpf(b)) - mp.loggamma(mpf(a) + mpf(b))
            assert log_beta(a, b) == pytest.approx(float(truth), rel=1e-14)
    assert log_beta(1e300, 1e300) == pytest.approx(-2e300 * math.log(2.0), rel=1e-14)


def test_log_beta_of_arrays() -> None:
    a, b = np.array([0.5, 7.26, 30.0]), np.array([2.0, 3.74, 1e-3])
    assert np.asarray(log_beta(a, b)).tolist() == [log_beta(float(x), float(y)) for x, y in zip(a, b, strict=True)]
    assert np.asarray(log_beta(a, 2.0)).tolist() == [log_beta(float(x), 2.0) for x in a]


# ---- tables and custom gains ---------------------------------------------------------------------------------------


def test_gain_table() -> None:
    value = GainTable([[3, 2, 1], [5, 0, 0]])
    assert value.gains([0.1, 0.2], [0, 1]).tolist() == [3.0, 0.0]
    assert value.log_gains([0.1, 0.2], [2, 0]).tolist() == [0.0, math.log(5.0)]
    assert value.log_gains([0.1, 0.2], [0, 1])[1] == -np.inf
    assert value.log_gain_table([0.1, 0.2], 0, 2).tolist() == [[math.log(3), math.log(2)], [math.log(5), -np.inf]]
    assert value.concave_from == 0
    assert allocate([0.1, 0.2], 3, low=0, high=3, value=value).tolist() == [2, 1]


def test_gain_table_keeps_no_hold_of_the_input() -> None:
    given = np.array([[2.0, 1.0]])
    value = GainTable(given)
    given[:] = 7.0
    assert value.table.tolist() == [[2.0, 1.0]]


@pytest.mark.parametrize(
    "gains, message",
    [
        ([1.0, 2.0], "gains is a table [prompts, rollouts], not an array of shape (2,)"),
        ([[1.0, 0.5], [np.nan, 0.5]], "gains[1, 0] is nan, not a finite gain of at least 0"),
        ([[np.inf, 0.5]], "gains[0, 0] is inf, not a finite gain of at least 0"),
        ([[1.0, 0.5, -0.25]], "gains[0, 2] is -0.25, not a finite gain of at least 0"),
        ([[1.0, 0.5], [0.25, 0.5]], "gains[1, 1] is 0.5, more than the gain before it"),
    ],
)
def test_gain_tables_refused(gains: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        GainTable(gains)


def test_gain_table_ends() -> None:
    value = GainTable([[2.0, 1.0], [2.0, 1.0]])
    with pytest.raises(ValueError, match=r"^budgets\[1\] is 2: the table ends at 2 rollouts"):
        value.gains([0.5, 0.5], [0, 2])
    with pytest.raises(ValueError, match=r"^budgets has shape \(1,\)"):
        value.gains([0.5], [0])


def test_custom_value() -> None:
    numba = pytest.importorskip("numba")

    @numba.njit
    def gain(p: float, budget: int) -> float:
        return p * (1.0 - p) / (budget * (budget + 1.0))

    value = CustomValue(gain, low=1)
    like = PowerPreference(0, 0) * InverseVariance()
    p, b = [0.3, 0.5, 1.0], [1, 4, 2]
    assert value.gains(p, b).tolist() == pytest.approx(like.gains(p, b).tolist(), rel=1e-14)
    assert value.log_gains(p, b)[2] == -np.inf
    assert value.log_gain_table(p, 1, 4).shape == (3, 3)
    factors = np.array([2.0, 3.0, 1.0])
    assert value.reweighted(factors).gains(p, b).tolist() == (value.gains(p, b) * factors).tolist()
    twice = value.reweighted(factors).reweighted(factors)
    assert twice.gains(p, b).tolist() == pytest.approx((value.gains(p, b) * factors**2).tolist(), rel=1e-14)
    assert value.table(np.array(p), 2, 2).shape == (3, 0)
    assert CustomValue(gain, low=0).concave_from == 0
    with pytest.raises(ValueError, match=r"^low is 0, below 1, from where the gains of this value fall"):
        allocate(p, 12, low=0, value=value)
    with pytest.raises(ValueError, match=r"^low is -1, not at least 0"):
        CustomValue(gain, low=-1)


def test_custom_value_must_be_compiled() -> None:
    with pytest.raises(ValueError, match=r"^gain is .* not a function compiled by numba\.njit"):
        CustomValue(lambda p, b: p)


# ---- what is refused -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0.0, -1.0, np.nan, np.inf])
def test_parameters_outside(wrong: float) -> None:
    for name, make in (
        ("alpha", lambda x: BetaPreference(x, 1.0)),
        ("beta", lambda x: BetaPreference(1.0, x)),
        ("tau", lambda x: Exponential(x)),
        ("alpha", lambda x: CapabilityValue(x, 1.0)),
    ):
        with pytest.raises(ValueError, match=f"^{name} is {wrong}, not a finite number above 0"):
            make(wrong)
        with pytest.raises(ValueError, match=rf"^{name}\[2\] is {wrong}, not a finite number above 0"):
            make(np.array([1.0, 2.0, wrong, wrong]))


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("wrong", [-0.5, np.nan, np.inf])
def test_powers_outside(name: str, wrong: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is {wrong}, not a finite number"):
        PowerPreference(**{name: wrong})


def test_other_parameters_refused() -> None:
    with pytest.raises(ValueError, match=r"^tau is 1e-301, too small"):
        Exponential(1e-301)
    with pytest.raises(ValueError, match=r"^alpha is a number or one number a prompt, not an array of shape \(1, 2\)"):
        BetaPreference(np.ones((1, 2)), 1.0)
    with pytest.raises(ValueError, match=r"^alpha has 2 and beta has 3 numbers"):
        BetaPreference(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match=r"^a has 2 and b has 3 numbers"):
        PowerPreference(np.ones(2), np.ones(3))
    with pytest.raises(ValueError, match=r"^preference has 2 and tau has 3 numbers"):
        (BetaPreference(1.0, np.ones(2)) * Exponential(np.ones(3))).gains([0.5, 0.5], [1, 1])


@pytest.mark.parametrize("method", ["log_gains", "gains", "values", "total"])
def test_rates_and_budgets_refused(method: str) -> None:
    value = getattr(CapabilityValue(np.array([2.0, 3.0]), 4.0), method)
    for rates, budgets, message in (
        ([0.5, np.nan], [2, 2], "pass_rates[1] is nan, not in [0, 1]"),
        ([-0.5, 2.0], [2, 2], "pass_rates[0] is -0.5, not in [0, 1]"),
        ([[0.5, 0.5]], [2, 2], "pass_rates has shape (1, 2), not [prompts]"),
        ([0.5], [2], "the value has parameters for 2 prompts, pass_rates 1"),
        ([0.5, 0.5], [2], "budgets has shape (1,)"),
        ([0.5, 0.5], [2.5, 2.0], "budgets has shape (2,) and dtype float64, not 2 integers"),
        ([0.5, 0.5], [2, -1], "budgets[1] is -1, which must not be negative"),
        ([0.5, 0.5], [0, -1], "budgets[1] is -1, which must not be negative"),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
            value(rates, budgets)
