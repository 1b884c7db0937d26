"""The written-out logarithm and exponential: about one ulp from the truth, and the same bits in every backend."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from mpmath import mp, mpf

from coba_core.kernels import numpy_backend
from coba_core.kernels.numpy_backend import EXPONENTIAL, FIRST_SUCCESS, INVERSE_VARIANCE, MIXED_GROUP, Form

SMALLEST = 2.0**-1074
NORMAL = 2.0**-1022


@pytest.fixture(autouse=True)
def precision() -> Any:
    with mp.workprec(200):
        yield


def worst_ulps(found: np.ndarray, exact: list[Any]) -> float:
    """The largest distance, in units in the last place of the exact number."""
    return max(float(abs(mpf(y) - e) / mpf(math.ulp(float(e)))) for y, e in zip(found.tolist(), exact, strict=True))


def near_one(steps: int) -> np.ndarray:
    """The floating-point numbers next to 1, on both sides."""
    return np.concatenate([1.0 - 2.0**-53 * np.arange(1, steps), 1.0 + 2.0**-52 * np.arange(1, steps)])


def whole_range(random: np.random.Generator) -> np.ndarray:
    """Positive numbers of every kind."""
    return np.concatenate(
        [
            SMALLEST * np.arange(1, 50),
            SMALLEST * random.integers(1, 2**52, 1000),
            [NORMAL, np.nextafter(NORMAL, 0.0), np.nextafter(NORMAL, 1.0), 1.0],
            2.0 ** np.arange(-1074, 1023),
            near_one(1000),
            math.sqrt(0.5) * (1.0 + 2.0**-52 * np.arange(-50, 50)),  # where the exponent changes
            np.exp2(random.uniform(-1074, 1023, 4000)),
            random.uniform(0.0, 2.0, 4000),
        ]
    )


def test_log_is_within_one_ulp() -> None:
    x = whole_range(np.random.default_rng(1))
    with np.errstate(over="ignore"):
        found = numpy_backend.log_sum(x)
    assert worst_ulps(found, [mp.log(mpf(v)) for v in x.tolist()]) <= 1.0


def test_log_of_one_minus_p_is_within_one_ulp() -> None:
    random = np.random.default_rng(2)
    p = np.concatenate([np.exp2(random.uniform(-120, 0, 4000)), random.uniform(0.0, 1.0, 4000), near_one(1000)[:999]])
    q = 1.0 - p
    found = numpy_backend.log_sum(q, (1.0 - q) - p)
    assert worst_ulps(found, [mp.log(1 - mpf(v)) for v in p.tolist()]) <= 1.0


def test_log_of_one_plus_x_is_within_one_ulp() -> None:
    random = np.random.default_rng(3)
    x = np.concatenate([np.exp2(random.uniform(-120, 0, 4000)), random.uniform(0.0, 1.0, 4000), [1.0]])
    total = 1.0 + x
    found = numpy_backend.log_sum(total, x - (total - 1.0))
    assert worst_ulps(found, [mp.log(1 + mpf(v)) for v in x.tolist()]) <= 1.0


def test_log_with_any_tail_is_within_one_and_a_half_ulp() -> None:
    random = np.random.default_rng(4)
    x = np.concatenate([random.uniform(0.5, 2.0, 6000), near_one(1000), [0.5, 1.0, 2.0]])
    tail = np.spacing(x) * random.choice([-1.0, -0.5, 0.5, 1.0, 0.3, -0.1], len(x)) * random.uniform(0, 1, len(x))
    found = numpy_backend.log_sum(x, tail)
    assert worst_ulps(found, [mp.log(mpf(v) + mpf(t)) for v, t in zip(x.tolist(), tail.tolist(), strict=True)]) <= 1.5


def test_exp_is_within_one_ulp_and_a_twentieth() -> None:
    random = np.random.default_rng(5)
    x = np.concatenate(
        [
            random.uniform(-745.2, 709.78, 5000),
            random.uniform(-745.2, -708.0, 2000),  # subnormal results
            random.uniform(-1.0, 1.0, 5000),
            -np.exp2(random.uniform(-1074, 0, 1000)),
            np.exp2(random.uniform(-1074, 0, 1000)),
            math.log(2.0) * (np.arange(-1074, 1024) + 0.5),  # where the power of two changes
            [0.0, -0.0, -745.13, 709.78],
        ]
    )
    assert worst_ulps(numpy_backend.exp(x), [mp.exp(mpf(v)) for v in x.tolist()]) <= 1.0


def test_exp_beyond_the_range() -> None:
    found = numpy_backend.exp(np.array([-745.2, -746.0, -1e300, -np.inf, 709.8, 1e300, np.inf]))
    assert found.tolist() == [0.0, 0.0, 0.0, 0.0, math.inf, math.inf, math.inf]


# ---- the same bits in every backend -------------------------------------------------------------------------------


def pass_rates(random: np.random.Generator) -> np.ndarray:
    """More than one block of the compiled kernels, and no whole number of vectors."""
    return np.concatenate(
        [
            [0.0, 1.0, 0.5, SMALLEST, NORMAL, 1e-300, 2.0**-53, 2.0**-54, 1.0 - 2.0**-53, 0.7071067811865476],
            1.0 - 2.0**-53 * np.arange(1, 40),
            np.exp2(random.uniform(-1074, 0, 200)),
            1.0 - np.exp2(random.uniform(-53, 0, 200)),
            random.uniform(0.0, 1.0, 334),
        ]
    )


def forms(size: int, random: np.random.Generator) -> list[Form]:
    """Every saturation with ordinary, extreme and per-prompt parameters."""
    scalar = [
        (7.26, 3.74, 0.3, 0.2),
        (1e-3, 1e-3, -6.0, 1e6),
        (1e4, 1e4, -13864.0, 1e-9),
        (1.0, 0.0, 0.0, 1.0),
        (2.0, -0.5, 0.1, 3.0),
        (1.0, 1.0, 0.0, 1e298),
    ]
    per_prompt = (
        random.uniform(0.001, 1000, size),
        random.uniform(0.001, 1000, size),
        random.normal(0, 100, size),
        np.exp(random.uniform(-14, 14, size)),
    )
    mixed = [(per_prompt[0], 3.0, 0.0, 0.2), (2.0, 3.0, per_prompt[2], 0.2), (2.0, 3.0, 0.0, per_prompt[3])]
    parameters = [*scalar, per_prompt, *mixed]
    return [
        Form(saturation, *chosen)
        for saturation in (EXPONENTIAL, FIRST_SUCCESS, MIXED_GROUP, INVERSE_VARIANCE)
        for chosen in parameters
    ]


def assert_same_bits(found: np.ndarray, expected: np.ndarray) -> None:
    assert found.shape == expected.shape
    nan = np.isnan(found) & np.isnan(expected)  # their sign and payload are nobody's business
    wrong = (found.view(np.int64) != expected.view(np.int64)) & ~nan
    assert not wrong.any(), (np.argwhere(wrong)[0], found[wrong][0].hex(), expected[wrong][0].hex())


@pytest.mark.parametrize("size", [1, 63, 783])
def test_log_gains_and_gains_have_the_same_bits(compiled: Any, size: int) -> None:
    random = np.random.default_rng(6)
    p = random.permutation(pass_rates(random))[:size]
    for form in forms(size, random):
        for most in (1, 5, 200, 10**6, 10**9):
            budgets = random.integers(1, most + 1, size)
            with compiled.module() as module:
                logs, plain = module.log_gains(p, form, budgets), module.gains(p, form, budgets)
            assert_same_bits(logs, numpy_backend.log_gains(p, form, budgets))
            assert_same_bits(plain, numpy_backend.gains(p, form, budgets))


@pytest.mark.parametrize("low, high", [(0, 1), (1, 1), (0, 9), (2, 128), (100_000, 100_033)])
def test_log_gain_tables_have_the_same_bits(compiled: Any, low: int, high: int) -> None:
    random = np.random.default_rng(7)
    p = pass_rates(random)
    for form in forms(len(p), random):
        if low == 0 and form.saturation in (MIXED_GROUP, INVERSE_VARIANCE):
            continue
        with compiled.module() as module:
            table = module.log_gain_table(p, form, low, high)
        assert_same_bits(table, numpy_backend.log_gain_table(p, form, low, high))


def test_every_instruction_set_is_tested(implementation: Any) -> None:
    """`implementation` forces what it says, and puts back what was there."""
    with implementation.module() as module:
        if implementation.target is None:
            return
        before = module.target
        assert before == implementation.target
        module.use("baseline")
    with implementation.module() as module:
        assert module.target == implementation.target
