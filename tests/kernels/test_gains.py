"""Log gains against 300-bit arithmetic over all of (0, 1), and what happens at its ends."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf

from coba_core import (
    BetaPreference,
    Exponential,
    FirstSuccess,
    InverseVariance,
    MixedGroup,
    PowerPreference,
)
from coba_core.kernels.numpy_backend import EXPONENTIAL, FIRST_SUCCESS, INVERSE_VARIANCE, MIXED_GROUP, Form

EPSILON = 2.0**-52
BUDGETS = [1, 2, 3, 17, 450, 10_000]
EXPONENTS = [(1.0, 1.0, 0.0), (7.26, 3.74, -4.6), (1000.0, 1000.0, -1388.0), (1e-3, 1000.0, 6.9), (1.0, 3.5, 0.0)]


def rates() -> np.ndarray:
    """All of (0, 1): both ends, the middle, and between."""
    random = np.random.default_rng(8)
    return np.concatenate(
        [
            [5e-324, 2.0**-1022, 1e-300, 1e-100, 1e-30, 2.0**-54, 2.0**-53, 1.0 - 2.0**-53, 1.0 - 2.0**-52],
            [0.25, 0.5, 0.75, 0.2928932188134524, 0.7071067811865476, 0.5 + 4e-9, 0.31024187555895566],
            random.uniform(0.0, 1.0, 24),
            np.exp2(random.uniform(-1074, 0, 8)),
            1.0 - np.exp2(random.uniform(-53, 0, 8)),
        ]
    )


def exact(form: Form, p: float, budget: int) -> tuple[Any, Any]:
    """The log gain of a form, and the largest of the terms it is the sum of."""
    x, y = mpf(p), 1 - mpf(p)
    _, e_p, e_q, scale, rate = form
    terms = [e_p * mp.log(x), e_q * mp.log(y), -mpf(scale)]
    if form.saturation == EXPONENTIAL:
        k = x * y * mpf(rate)
        terms += [mp.log(-mp.expm1(-k) / k), -k * budget]
    elif form.saturation == FIRST_SUCCESS:
        terms += [budget * mp.log(y)]
    elif form.saturation == MIXED_GROUP:
        big, small = max(x, y), min(x, y)
        terms += [(budget - 1) * mp.log(big), mp.log(1 + (small / big) ** (budget - 1))]
    else:
        terms += [-mp.log(mpf(budget) * (budget + 1))]
    return sum(terms), max(abs(term) for term in terms)


@pytest.mark.parametrize(
    "saturation, rates_of_decay",
    [
        (EXPONENTIAL, [100.0, 1.0, 0.2, 1e-6]),  # 1/τ
        (FIRST_SUCCESS, [1.0]),
        (MIXED_GROUP, [1.0]),
        (INVERSE_VARIANCE, [1.0]),
    ],
)
def test_log_gains_are_within_four_epsilon_of_the_largest_term(
    implementation: Any, saturation: int, rates_of_decay: list[float]
) -> None:
    p = rates()
    worst = 0.0
    with mp.workprec(300), implementation.module() as module:
        for rate in rates_of_decay:
            for e_p, e_q, scale in EXPONENTS:
                form = Form(saturation, e_p, e_q, scale, rate)
                for budget in BUDGETS:
                    found = module.log_gains(p, form, np.full(len(p), budget))
                    for x, y in zip(p.tolist(), found.tolist(), strict=True):
                        truth, largest = exact(form, x, budget)
                        worst = max(worst, float(abs(mpf(y) - truth) / (largest * EPSILON)))
    assert worst <= 4.0


def test_the_share_of_the_exponential_at_its_seam(implementation: Any) -> None:
    """ln((1-e^-k)/k) by the series up to k = ½ and by the closed form above: both sides of the seam, and far out."""
    k = np.concatenate([0.5 + 0.25 * np.linspace(-1, 1, 41), [0.5, np.nextafter(0.5, 1), 5.0, 50.0, 1e3, 1e6, 1e-8]])
    with mp.workprec(300), implementation.module() as module:
        for slope in k.tolist():
            form = Form(EXPONENTIAL, 0.0, 0.0, 0.0, 4.0 * slope)  # k = p q rate at p = ½
            found = float(module.log_gains(np.array([0.5]), form, np.array([0]))[0])
            truth = mp.log(-mp.expm1(-mpf(slope)) / mpf(slope))
            assert abs(mpf(found) - truth) <= 4.0 * EPSILON * max(abs(truth), abs(mp.log(slope)) if slope > 0.5 else 0)


def test_no_cancellation_where_the_difference_of_values_is_zero(implementation: Any) -> None:
    """B = 450, k = 1/12: V(B+1) - V(B) in float64 is 0, the truth is 4.1e-18."""
    k = 1.0 / 12.0
    form = Form(EXPONENTIAL, 0.0, 0.0, -math.log(k), 4.0 * k)  # at p = ½ nothing is left but e^-kB (1 - e^-k)
    with implementation.module() as module:
        found = float(module.gains(np.array([0.5]), form, np.array([450]))[0])
    assert (1.0 - math.exp(-451 * k)) - (1.0 - math.exp(-450 * k)) == 0.0
    assert found == pytest.approx(math.exp(-450 * k) * -math.expm1(-k), rel=1e-13)
    assert f"{found:.1e}" == "4.1e-18"


SATURATIONS = [Exponential(5.0), Exponential(1e-6), Exponential(1e9), MixedGroup(), FirstSuccess(), InverseVariance()]
PREFERENCES = [
    BetaPreference(7.26, 3.74),
    BetaPreference(1e-3, 1e-3),
    BetaPreference(1e4, 1e-3),
    BetaPreference(2.0, 0.5),
    BetaPreference(1e4, 1e4),
    PowerPreference(0, 0),
    PowerPreference(1, 2),
]


@pytest.mark.parametrize("saturation", SATURATIONS, ids=repr)
@pytest.mark.parametrize("preference", PREFERENCES, ids=repr)
def test_edges(implementation: Any, preference: Any, saturation: Any) -> None:
    """p = 0 and p = 1 gain nothing, save the first rollout of FirstSuccess at p = 1; nothing is ever NaN or rises."""
    form = (preference * saturation).form
    p = np.array([0.0, 1.0, 5e-324, 2.0**-1022, 1e-300, 2.0**-53, 0.5, 1.0 - 2.0**-53])
    first = saturation.concave_from
    with implementation.module() as module:
        table = module.log_gain_table(p, form, first, 60)
        far = np.stack([module.log_gains(p, form, np.full(len(p), b)) for b in (59, 1_000, 10**6, 10**9)], axis=1)
    assert not np.isnan(table).any() and not np.isnan(far).any()
    assert (table[0] == -np.inf).all() and (far[:2] == -np.inf).all()
    solved = table[1, 1:] if isinstance(saturation, FirstSuccess) else table[1]
    assert (solved == -np.inf).all()
    assert (table[2:, 0] < np.inf).all()
    whole = np.concatenate([table, far], axis=1)
    assert (whole[:, 1:] <= whole[:, :-1]).all()


def test_first_success_of_a_solved_prompt(implementation: Any) -> None:
    """At p = 1 the first rollout succeeds for certain: gain w(1), then nothing."""
    with implementation.module() as module:
        form = (PowerPreference(3, 0) * FirstSuccess()).form
        assert module.gains(np.array([1.0, 1.0]), form, np.array([0, 1])).tolist() == [1.0, 0.0]
        form = (PowerPreference(3, 1) * FirstSuccess()).form  # w(1) = 0
        assert module.gains(np.array([1.0, 1.0]), form, np.array([0, 1])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("saturation", SATURATIONS, ids=repr)
def test_gains_never_rise(implementation: Any, saturation: Any) -> None:
    """Rounding included: the solvers depend on it."""
    p = np.concatenate([rates(), 0.5 + np.arange(-20, 21) * 2.0**-53, np.random.default_rng(9).uniform(0, 1, 300)])
    form = (BetaPreference(6.5, 4.5) * saturation).form
    with implementation.module() as module:
        table = module.log_gain_table(p, form, saturation.concave_from, 700)
    assert (table[:, 1:] <= table[:, :-1]).all()
