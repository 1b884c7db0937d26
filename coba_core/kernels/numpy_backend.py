"""The reference: every kernel in plain NumPy, slow, obvious, and what the compiled ones must equal bit for bit.

Everything is decided on log gains. A prompt with pass rate p (q = 1-p) and a :class:`Form` has

    log gain(B) = e_p ln p + e_q ln q - c + shape(B),      B = 0, 1, 2, ... rollouts already given

    EXPONENTIAL       shape = ln((1-e^-k)/k) - k B          k = p q rate        (2602.03048 eq. 8, rate = 1/tau)
    FIRST_SUCCESS     shape = B ln q
    MIXED_GROUP       shape = (B-1) ln M + ln(1 + (m/M)^(B-1))   M = max(p, q), m = min(p, q)   (2509.25849)
    INVERSE_VARIANCE  shape = -ln(B (B+1))

The logarithm and the exponential are written out (csrc/elementary.h has the same operations in the same order), so
that every backend and every instruction set rounds alike and ties fall alike.
"""

from __future__ import annotations

import heapq
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

EXPONENTIAL, FIRST_SUCCESS, MIXED_GROUP, INVERSE_VARIANCE = range(4)


class Form(NamedTuple):
    """What the kernels need to know of a value: see the module's formula. Each number is a scalar or float64 [M]."""

    saturation: int
    p_exponent: float | Floats
    q_exponent: float | Floats
    log_scale: float | Floats
    rate: float | Floats


Gains = Form | Floats
"""What a solver maximises: a :class:`Form`, or a table [M, W] whose column B is the gain of rollout number B+1."""

LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")  # short enough that k * LN2_HIGH is exact
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
LOG2_E = float.fromhex("0x1.71547652b82fep+0")
ROUND = 6755399441055744.0  # 1.5 * 2**52: adding and taking it away rounds to an integer
MANTISSA = np.int64(0x000FFFFFFFFFFFFF)
ONE = np.int64(0x3FF0000000000000)
ROOT_HALF = np.int64(0x3FE6A09E667F3BCD)
L1, L2, L3, L4, L5, L6, L7 = (
    0.666666666666667,
    0.39999999999899444,
    0.2857142862600327,
    0.22222211130259878,
    0.18182889455674947,
    0.15331710618210773,
    0.14616585424888623,
)
EXP = (
    0.5000000000000001,
    0.16666666666666669,
    0.04166666666662413,
    0.008333333333330062,
    0.0013888888917213717,
    0.00019841269863053618,
    2.4801521295954376e-05,
    2.7557268459997064e-06,
    2.7620088445409746e-07,
    2.510038549551032e-08,
)
SERIES = (1 / 24, -1 / 2880, 1 / 181440, -1 / 9676800, 1 / 479001600, -691 / 15692092416000)


def log_sum(x: Floats, tail: Floats | float = 0.0) -> Floats:
    """ln(x + tail) for x > 0, to about one ulp; a tail other than 0 asks for x in [1/2, 2] and |tail| <= ulp(x)."""
    small = x < 2.0**-1022
    bits = np.ascontiguousarray(np.where(small, x * 2.0**54, x)).view(np.int64) + (ONE - ROOT_HALF)
    k = (bits >> 52).astype(np.float64) - 1023.0
    f = (((bits & MANTISSA) + ROOT_HALF).view(np.float64) - 1.0) + tail * ((np.int64(2046) - (bits >> 52)) << 52).view(
        np.float64
    )
    k = np.where(small, k - 54.0, k)
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    r = z * (L1 + w * (L3 + w * (L5 + w * L7))) + w * (L2 + w * (L4 + w * L6))
    half = 0.5 * f * f
    return (((s * (half + r) + k * LN2_LOW) - half) + f) + k * LN2_HIGH


def exp(x: Floats) -> Floats:
    """e^x to about one ulp, 0 below -745.2 and inf above 709.8."""
    y = np.minimum(np.maximum(x, -746.0), 710.0)
    n = (y * LOG2_E + ROUND) - ROUND
    high, low = y - n * LN2_HIGH, n * LN2_LOW
    r = high - low
    lost = (high - r) - low
    q = np.full_like(r, EXP[9])
    for c in EXP[8::-1]:
        q = q * r + c
    half = ((n * 0.5 + ROUND) - ROUND).astype(np.int64)  # 2^n in two factors: the result may be subnormal
    rest = n.astype(np.int64) - half
    with np.errstate(over="ignore", under="ignore"):
        scaled = (1.0 + (r + ((r * r) * q + lost))) * ((half + 1023) << 52).view(np.float64)
        return scaled * ((rest + 1023) << 52).view(np.float64)


def coefficients(p: Floats, form: Form) -> tuple[Floats, Floats, Floats]:
    """(a, k, d), each [M]: the part of the log gain that does not depend on B, its slope, and ln M - ln m."""
    q = 1.0 - p
    lost = (1.0 - q) - p  # q + lost is 1 - p without rounding
    with np.errstate(all="ignore"):
        log_p, log_q = log_sum(p), log_sum(q, lost)
        a = (form.p_exponent * log_p + form.q_exponent * log_q) - form.log_scale
        d = np.zeros_like(p)
        edge = (p == 0.0) | (p == 1.0)
        if form.saturation == EXPONENTIAL:
            k = (p * q) * form.rate
            kk = k * k
            t = -0.5 * k + kk * (
                SERIES[0]
                + kk * (SERIES[1] + kk * (SERIES[2] + kk * (SERIES[3] + kk * (SERIES[4] + kk * SERIES[5]))))
            )
            decay = exp(-k)
            rest = 1.0 - decay
            a = a + np.where(k > 0.5, log_sum(rest, (1.0 - rest) - decay) - log_sum(k), t)
        elif form.saturation == FIRST_SUCCESS:
            k = np.where(p == 1.0, np.inf, -log_q)
            pull = np.sign(form.q_exponent)  # the weight at p = 1: 1/e^c, or none, or without end
            solved = np.where(pull == 0.0, np.negative(form.log_scale), np.where(pull > 0.0, -np.inf, np.inf))
            a = np.where(p == 1.0, solved, a)
            edge = p == 0.0
        elif form.saturation == MIXED_GROUP:
            log_big, log_small = np.maximum(log_p, log_q), np.minimum(log_p, log_q)
            k, d = -log_big, log_big - log_small
        else:
            k = np.zeros_like(p)
    return np.where(edge, -np.inf, a), np.where(edge, 0.0, k), np.where(edge, 0.0, d)


def log_gain(saturation: int, a: Floats, k: Floats, d: Floats, budget: Floats) -> Floats:
    """The log gain of one more rollout at float64 budgets that broadcast against a, k, d."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        if saturation == EXPONENTIAL:
            return a - k * budget
        if saturation == FIRST_SUCCESS:
            return np.where(budget == 0.0, a, np.where(k < np.inf, a - k * budget, -np.inf))
        if saturation == MIXED_GROUP:
            share = exp(-(d * (budget - 1.0)))
            total = 1.0 + share
            return (a - k * (budget - 1.0)) + log_sum(total, share - (total - 1.0))
        return a - log_sum(budget * (budget + 1.0))


def first_invalid(p: Floats) -> int:
    """Index of the first pass rate that is NaN or outside [0, 1]; -1 if there is none."""
    wrong = ~((p >= 0.0) & (p <= 1.0))
    return int(wrong.argmax()) if wrong.any() else -1


def log_gains(p: Floats, form: Form, budgets: Ints) -> Floats:
    """Log gain of one more rollout for each prompt, [M]."""
    return log_gain(form.saturation, *coefficients(p, form), budgets.astype(np.float64))


def gains(p: Floats, form: Form, budgets: Ints) -> Floats:
    """Gain of one more rollout for each prompt, [M]: V(B+1) - V(B) without the cancellation."""
    return exp(log_gains(p, form, budgets))


def log_gain_table(p: Floats, form: Form, low: int, high: int) -> Floats:
    """Log gains at budgets low .. high-1, [M, high-low]."""
    a, k, d = (x[:, None] for x in coefficients(p, form))
    return log_gain(form.saturation, a, k, d, np.arange(low, high, dtype=np.float64)[None, :])


def _table(p: Floats, source: Any, low: int, high: int) -> Floats:
    """What to order units by, [M, high-low]: log gains of a form, gains of a table or of a user's function."""
    if isinstance(source, Form):
        return log_gain_table(p, source, low, high)
    table: Floats = source[:, low:high] if isinstance(source, np.ndarray) else source.table(p, low, high)
    return table


def reference(p: Floats, source: Gains, low: int, high: int, total: int) -> Ints:
    """All units in one table, one stable sort: the allocation, [M]. O(MW log MW) time, O(MW) memory."""
    table = _table(p, source, low, high)
    prompt, step = np.indices(table.shape).reshape(2, -1)
    order = np.lexsort((prompt, step, -table.ravel()))  # larger gain, then smaller budget, then lower index
    taken = prompt[order[: total - low * len(p)]]
    return low + np.bincount(taken, minlength=len(p)).astype(np.int64)


def heap(p: Floats, source: Gains, low: int, high: int, total: int) -> Ints:
    """2602.03048 Algorithm 1: the largest gain next, from a heap. O(M + R log M), R = total - M low."""
    table = -_table(p, source, low, high)
    budgets = np.full(len(p), low, dtype=np.int64)
    if high == low:
        return budgets
    queue = [(float(gain), low, i) for i, gain in enumerate(table[:, 0])]
    heapq.heapify(queue)
    for _ in range(total - low * len(p)):
        _, budget, i = queue[0]
        budgets[i] = budget + 1
        if budget + 1 < high:
            heapq.heapreplace(queue, (float(table[i, budget + 1 - low]), budget + 1, i))
        else:
            heapq.heappop(queue)
    return budgets


def threshold(p: Floats, source: Gains, low: int, high: int, total: int, threads: int = 1) -> Ints:
    """The cut θ* = the smallest gain taken, by bisection on the floating-point numbers; then the units that equal it.

    O(M) memory. Each halving narrows the counts between which a prompt's budget at the new θ must lie.
    """
    size = len(p)
    rows = np.arange(size)
    if isinstance(source, Form):
        form, parts = source, coefficients(p, source)

        def gain(budget: Ints) -> Floats:
            return log_gain(form.saturation, *parts, budget.astype(np.float64))
    else:
        table = _table(p, source, 0 if isinstance(source, np.ndarray) else low, high)
        first = 0 if isinstance(source, np.ndarray) else low

        def gain(budget: Ints) -> Floats:
            return table[rows, budget - first]

    def count(theta: float, fewest: Ints, most: Ints) -> Ints:
        """Budgets at which the next gain is no longer above theta, known to lie in [fewest, most]."""
        fewest, most = fewest.copy(), most.copy()
        while np.any(fewest < most):
            middle = (fewest + most) >> 1
            above = (fewest < most) & (gain(np.minimum(middle, high - 1)) > theta)
            fewest, most = np.where(above, middle + 1, fewest), np.where(above, most, np.maximum(middle, fewest))
        return fewest

    floor, ceiling = np.full(size, low, dtype=np.int64), np.full(size, high, dtype=np.int64)
    if total == low * size:
        return floor
    below, above = ceiling, floor  # budgets at a θ that gives at least, and at most, the total
    lowest, highest = _ordinal(-np.inf) - 1, _ordinal(np.inf)  # the first stands for a θ under every gain
    while highest - lowest > 1:
        middle = (lowest + highest) // 2
        trial = count(_number(middle), above, below)
        if trial.sum() <= total:
            highest, above = middle, trial
        else:
            lowest, below = middle, trial
    return _level(above, below, total)


def _level(fewest: Ints, most: Ints, total: int) -> Ints:
    """Shares units of equal gain: prompts between fewest and most are filled to one level, then by index."""
    lowest, highest = int(fewest.min()), int(most.max())
    while lowest < highest:  # the largest level that the total still pays for
        middle = (lowest + highest + 1) // 2
        if np.clip(middle, fewest, most).sum() <= total:
            lowest = middle
        else:
            highest = middle - 1
    budgets: Ints = np.clip(lowest, fewest, most).astype(np.int64)
    open_ = np.flatnonzero((budgets == lowest) & (budgets < most))
    budgets[open_[: total - int(budgets.sum())]] += 1
    return budgets


def _ordinal(x: float) -> int:
    """Position of x among the floating-point numbers, in their order (-0 and 0 apart)."""
    bits = int(np.float64(x).view(np.int64))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFFFFFFFFFF) - 1


def _number(ordinal: int) -> float:
    bits = ordinal if ordinal >= 0 else (-(ordinal + 1)) | -0x8000000000000000
    return float(np.int64(bits).view(np.float64))


def dp(p: Floats, source: Gains, low: int, high: int, total: int) -> Ints:
    """Multiple-choice knapsack by dynamic programming over (prompt, units spent): the papers' baseline. O(M R W).

    It adds gains up, so it cannot see a gain below 1e-16 of the sum; :func:`settle_ties` then puts what it could not
    tell apart into the canonical order.
    """
    table = _table(p, source, low, high)
    steps = exp(table) if isinstance(source, Form) else table
    values = np.concatenate([np.zeros((len(p), 1)), np.cumsum(steps, axis=1)], axis=1)
    spare, width = total - low * len(p), high - low
    best = np.full(spare + 1, -np.inf)
    best[0] = 0.0
    choice = np.zeros((len(p), spare + 1), dtype=np.min_scalar_type(width))
    for i in range(len(p)):
        nxt = best.copy()  # 0 units to prompt i
        for units in range(1, min(width, spare) + 1):
            trial = best[: spare + 1 - units] + values[i, units]
            better = trial > nxt[units:]
            nxt[units:][better] = trial[better]
            choice[i, units:][better] = units
        best = nxt
    budgets = np.empty(len(p), dtype=np.int64)
    for i in range(len(p) - 1, -1, -1):
        budgets[i] = low + int(choice[i, spare])
        spare -= int(choice[i, spare])
    logs = isinstance(source, Form)
    return settle_ties(table, budgets, low, high, float(values.max(initial=0.0)) * len(p), logs)


def settle_ties(table: Floats, budgets: Ints, low: int, high: int, scale: float, logs: bool) -> Ints:
    """Moves units between prompts whose gains a sum of size `scale` cannot tell apart, towards the canonical order."""
    budgets = budgets.copy()
    rows = np.arange(len(budgets))
    floor = np.finfo(np.float64).eps * scale
    for _ in range(budgets.size * (high - low) if high > low else 0):
        grow, shrink = budgets < high, budgets > low
        next_gain = np.where(grow, table[rows, np.minimum(budgets - low, high - low - 1)], -np.inf)
        last_gain = np.where(shrink, table[rows, np.maximum(budgets - low - 1, 0)], np.inf)
        if not grow.any() or not shrink.any():
            break
        candidates = np.flatnonzero(grow)
        i = candidates[np.lexsort((candidates, budgets[candidates], -next_gain[candidates]))[0]]
        candidates = np.flatnonzero(shrink)
        j = candidates[np.lexsort((-candidates, -budgets[candidates], last_gain[candidates]))[0]]
        better = (next_gain[i], -budgets[i], -i) > (last_gain[j], -(budgets[j] - 1), -j)
        step = np.exp(next_gain[i]) - np.exp(last_gain[j]) if logs else next_gain[i] - last_gain[j]
        alike = next_gain[i] == last_gain[j] or abs(step) <= floor
        if i == j or not better or not alike:
            break
        budgets[i] += 1
        budgets[j] -= 1
    return budgets
