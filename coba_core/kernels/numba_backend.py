"""The kernels in Numba: numpy_backend.py's functions, with the structure of csrc/ and the same rounding.

Nothing is compiled with reassociation except where a sum only steers the search.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from coba_core.kernels.numpy_backend import (
    EXP,
    EXPONENTIAL,
    FIRST_SUCCESS,
    L1,
    L2,
    L3,
    L4,
    L5,
    L6,
    L7,
    LN2_HIGH,
    LN2_LOW,
    LOG2_E,
    MIXED_GROUP,
    ROUND,
    SERIES,
    Floats,
    Form,
    Gains,
    Ints,
    settle_ties,
)
from coba_core.values import CustomValue

E0, E1, E2, E3, E4, E5, E6, E7, E8, E9 = EXP
S0, S1, S2, S3, S4, S5 = SERIES
ONE_LESS_ROOT_HALF = 0x3FF0000000000000 - 0x3FE6A09E667F3BCD
ROOT_HALF = 0x3FE6A09E667F3BCD
MANTISSA = 0x000FFFFFFFFFFFFF
TWO_52 = 0x4330000000000000
ONE = 0x3FF0000000000000

_njit = numba.njit(cache=True, nogil=True, error_model="numpy")


@intrinsic
def _bits(typing_context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(64))

    return types.int64(types.float64), generate


@intrinsic
def _number(typing_context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@_njit
def _log_of(f: float, k: float) -> float:
    s = f / (2.0 + f)
    z = s * s
    w = z * z
    r = z * (L1 + w * (L3 + w * (L5 + w * L7))) + w * (L2 + w * (L4 + w * L6))
    half = 0.5 * f * f
    return (((s * (half + r) + k * LN2_LOW) - half) + f) + k * LN2_HIGH


@_njit
def _logarithm(x: float) -> float:
    small = x < 2.2250738585072014e-308
    bits = _bits(x * 18014398509481984.0 if small else x) + ONE_LESS_ROOT_HALF
    k = _number((bits >> 52) | TWO_52) - (4503599627371573.0 if small else 4503599627371519.0)
    return _log_of(_number((bits & MANTISSA) + ROOT_HALF) - 1.0, k)


@_njit
def _log_sum(x: float, tail: float) -> float:
    bits = _bits(x) + ONE_LESS_ROOT_HALF
    exponent = bits >> 52
    f = (_number((bits & MANTISSA) + ROOT_HALF) - 1.0) + tail * _number((2046 - exponent) << 52)
    return _log_of(f, _number(exponent | TWO_52) - 4503599627371519.0)


@_njit
def _exp(x: float) -> float:
    y = x if x > -746.0 else -746.0
    y = y if y < 710.0 else 710.0
    n = (y * LOG2_E + ROUND) - ROUND
    high = y - n * LN2_HIGH
    low = n * LN2_LOW
    r = high - low
    lost = (high - r) - low
    q = ((((((((E9 * r + E8) * r + E7) * r + E6) * r + E5) * r + E4) * r + E3) * r + E2) * r + E1) * r + E0
    half = (n * 0.5 + ROUND) - ROUND
    scaled = (1.0 + (r + ((r * r) * q + lost))) * _number((_bits(half + ROUND) << 52) + ONE)
    return scaled * _number((_bits((n - half) + ROUND) << 52) + ONE)


@_njit
def _log_share(k: float) -> float:
    decay = _exp(-k)
    rest = 1.0 - decay
    return _log_sum(rest, (1.0 - rest) - decay) - _logarithm(k)


@cache
def _coefficients_of(saturation: int) -> Any:
    """numpy_backend.coefficients of one form, so that its loop vectorises."""

    def run(
        p: Floats,
        p_exponents: Floats,
        q_exponents: Floats,
        log_scales: Floats,
        rates: Floats,
        a: Floats,
        k: Floats,
        d: Floats,
    ) -> None:
        steepest = 0.0
        for i in range(len(p)):
            x = p[i]
            q = 1.0 - x
            log_p, log_q = _logarithm(x), _log_sum(q, (1.0 - q) - x)
            q_exponent, scale = q_exponents[i % len(q_exponents)], log_scales[i % len(log_scales)]
            intercept = (p_exponents[i % len(p_exponents)] * log_p + q_exponent * log_q) - scale
            slope, gap, edge = 0.0, 0.0, (x == 0.0) | (x == 1.0)
            if saturation == EXPONENTIAL:
                slope = (x * q) * rates[i % len(rates)]
                kk = slope * slope
                intercept += -0.5 * slope + kk * (S0 + kk * (S1 + kk * (S2 + kk * (S3 + kk * (S4 + kk * S5)))))
                steepest = slope if slope > steepest else steepest
            elif saturation == FIRST_SUCCESS:
                solved = -scale if q_exponent == 0.0 else (-np.inf if q_exponent > 0.0 else np.inf)
                slope = np.inf if x == 1.0 else -log_q
                intercept = solved if x == 1.0 else intercept
                edge = x == 0.0
            elif saturation == MIXED_GROUP:
                big = log_p if log_p > log_q else log_q
                slope = -big
                gap = big - (log_q if log_p > log_q else log_p)
            a[i] = -np.inf if edge else intercept
            k[i] = 0.0 if edge else slope
            d[i] = 0.0 if edge else gap
        if steepest > 0.5:
            for i in range(len(p)):
                if k[i] > 0.5:
                    q = 1.0 - p[i]
                    log_p, log_q = _logarithm(p[i]), _log_sum(q, (1.0 - q) - p[i])
                    weight = p_exponents[i % len(p_exponents)] * log_p + q_exponents[i % len(q_exponents)] * log_q
                    a[i] = (weight - log_scales[i % len(log_scales)]) + _log_share(k[i])

    return _njit(run)


@_njit
def _log_gain(saturation: int, a: float, k: float, d: float, budget: float) -> float:
    if saturation == EXPONENTIAL:
        return a - k * budget
    if saturation == FIRST_SUCCESS:
        if budget == 0.0:
            return a
        return a - k * budget if k < np.inf else -np.inf
    if saturation == MIXED_GROUP:
        share = _exp(-(d * (budget - 1.0)))
        total = 1.0 + share
        return (a - k * (budget - 1.0)) + _log_sum(total, share - (total - 1.0))
    return a - _logarithm(budget * (budget + 1.0))


@_njit
def _log_gains(saturation: int, a: Floats, k: Floats, d: Floats, budgets: Ints, exponentiate: bool) -> Floats:
    out = np.empty(len(a))
    for i in range(len(a)):
        out[i] = _log_gain(saturation, a[i], k[i], d[i], float(budgets[i]))
    if exponentiate:
        for i in range(len(a)):
            out[i] = _exp(out[i])
    return out


@_njit
def _log_gain_table(saturation: int, a: Floats, k: Floats, d: Floats, low: int, high: int) -> Floats:
    out = np.empty((len(a), high - low))
    for i in range(len(a)):
        for j in range(high - low):
            out[i, j] = _log_gain(saturation, a[i], k[i], d[i], float(low + j))
    return out


# The gain of one more unit of prompt i, as a solver asks for it: of a form, a table, or a user's function.


@_njit
def _form_gain(parts: Any, i: int, budget: int) -> float:
    return _log_gain(parts[0], parts[1][i], parts[2][i], parts[3][i], float(budget))


@_njit
def _table_gain(parts: Any, i: int, budget: int) -> float:
    return parts[0][i, budget]


@cache
def _custom_gain(gain: Callable[[float, int], float]) -> Any:
    @numba.njit(nogil=True)
    def custom(parts: Any, i: int, budget: int) -> float:
        return gain(parts[0][i], budget) * parts[1][i]

    return custom


@cache
def _heap_of(gain: Any) -> Any:
    """2602.03048 Algorithm 1, with `gain` inlined."""

    def sift(gains: Floats, budgets: Ints, prompts: Ints, size: int, at: int) -> None:
        g, b, i = gains[at], budgets[at], prompts[at]
        while 2 * at + 1 < size:
            child = 2 * at + 1
            right = child + 1
            if right < size and (
                gains[right] > gains[child]
                or (
                    gains[right] == gains[child]
                    and (
                        budgets[right] < budgets[child]
                        or (budgets[right] == budgets[child] and prompts[right] < prompts[child])
                    )
                )
            ):
                child = right
            if g > gains[child] or (
                g == gains[child] and (b < budgets[child] or (b == budgets[child] and i < prompts[child]))
            ):
                break
            gains[at], budgets[at], prompts[at] = gains[child], budgets[child], prompts[child]
            at = child
        gains[at], budgets[at], prompts[at] = g, b, i

    sift = _njit(sift)

    def run(parts: Any, count: int, low: int, high: int, total: int) -> Ints:
        result = np.full(count, low)
        size = count if low < high else 0
        gains, budgets, prompts = np.empty(size), np.full(size, low), np.arange(size)
        for i in range(size):
            gains[i] = gain(parts, i, low)
        for i in range(size // 2 - 1, -1, -1):
            sift(gains, budgets, prompts, size, i)
        for _ in range(total - low * count):
            i = prompts[0]
            budgets[0] += 1
            result[i] = budgets[0]
            if budgets[0] < high:
                gains[0] = gain(parts, i, budgets[0])
            else:
                size -= 1
                gains[0], budgets[0], prompts[0] = gains[size], budgets[size], prompts[size]
            if size:
                sift(gains, budgets, prompts, size, 0)
        return result

    return numba.njit(run, nogil=True, cache=gain in (_form_gain, _table_gain))


@_njit
def _ordinal(x: float) -> int:
    bits = _bits(x)
    return bits if bits >= 0 else -(bits & 0x7FFFFFFFFFFFFFFF) - 1


@_njit
def _at_ordinal(place: int) -> float:
    return _number(place if place >= 0 else (-(place + 1)) | (-0x7FFFFFFFFFFFFFFF - 1))


@_njit
def _share_ties(budgets: Ints, most: Ints, spare: int) -> None:
    """csrc/units.h share_ties."""
    lowest, highest = 2147483647, 0
    for i in range(len(budgets)):
        if most[i] > budgets[i]:
            lowest, highest = min(lowest, budgets[i]), max(highest, most[i])
    while lowest < highest:
        level = lowest + (highest - lowest + 1) // 2
        cost = 0
        for i in range(len(budgets)):
            cost += max(min(level, most[i]) - budgets[i], 0)
        if cost <= spare:
            lowest = level
        else:
            highest = level - 1
    for i in range(len(budgets)):
        to = min(lowest, most[i])
        if to > budgets[i]:
            spare -= to - budgets[i]
            budgets[i] = to
    for i in range(len(budgets)):
        if spare > 0 and budgets[i] == lowest and most[i] > lowest:
            budgets[i] += 1
            spare -= 1


@_njit
def _give_best(gains: Floats, at: Ints, prompts: Ints, spare: int, budgets: Ints) -> None:
    """Gives the first `spare` of these units, listed by prompt, in the canonical order."""
    order = np.argsort(-gains, kind="mergesort")  # stable: units of equal gain stay in the order of their prompts
    first = 0
    while first < spare:
        last = first + 1
        while last < len(order) and gains[order[last]] == gains[order[first]]:
            last += 1
        run = order[first:last]
        run = run[np.argsort(at[run], kind="mergesort")]
        for j in range(min(last, spare) - first):
            budgets[prompts[run[j]]] += 1
        first = last


@cache
def _bisection_of(gain: Any) -> Any:
    """csrc/threshold.h threshold_bisection, with `gain` inlined."""

    def run(parts: Any, count: int, low: int, high: int, total: int) -> Ints:
        budgets, most, trial = np.full(count, low), np.full(count, high), np.empty(count, np.int64)
        if total == low * count:
            return budgets
        if total == high * count:
            return most
        largest, smallest = -np.inf, np.inf
        for i in range(count):
            largest = max(largest, gain(parts, i, low))
            smallest = min(smallest, gain(parts, i, high - 1))
        up, down = _ordinal(largest), _ordinal(smallest + 0.0) - 1
        sum_up, sum_down = low * count, high * count
        few = 64 + count // 64
        step = 0
        while down < up - 1 and sum_down - sum_up > few:
            place = (up >> 1) + (down >> 1) + (up & down & 1)
            if step % 2 == 0:
                a, b = _at_ordinal(up), _at_ordinal(down)
                guess = a + (b - a) * ((total - sum_up) / (sum_down - sum_up))
                if guess == guess and down < _ordinal(guess) < up:
                    place = _ordinal(guess)
            step += 1
            theta = _at_ordinal(place)
            units = 0
            for i in range(count):
                fewest, at_most = budgets[i], most[i]
                while fewest < at_most:
                    middle = (fewest + at_most) >> 1
                    if gain(parts, i, middle) > theta:
                        fewest = middle + 1
                    else:
                        at_most = middle
                trial[i] = fewest
                units += fewest
            if units <= total:
                budgets[:] = trial
                up, sum_up = place, units
            else:
                most[:] = trial
                down, sum_down = place, units
        if down == up - 1:
            _share_ties(budgets, most, total - sum_up)
            return budgets
        near = sum_down - sum_up
        near_gain, near_budget, near_prompt = np.empty(near), np.empty(near, np.int64), np.empty(near, np.int64)
        at = 0
        for i in range(count):
            for b in range(budgets[i], most[i]):
                near_gain[at], near_budget[at], near_prompt[at] = gain(parts, i, b), b, i
                at += 1
        _give_best(near_gain, near_budget, near_prompt, total - sum_up, budgets)
        return budgets

    return numba.njit(run, nogil=True, cache=gain in (_form_gain, _table_gain))


@cache
def _newton_of(saturation: int) -> Any:
    """csrc/newton.h of one form: (a, k, d, low, high, total, budgets) -> False if the bisection has to do it."""

    @_njit
    def root(a: float, k: float, d: float, inverse: float, theta: float) -> tuple[float, float]:
        if saturation == MIXED_GROUP:
            b = (a - theta) * inverse + 1.0
            b = b if b > 1.0 else 1.0
            share = 0.0
            for _ in range(2):
                share = _exp(-(d * (b - 1.0)))
                total = 1.0 + share
                b = ((a + _log_sum(total, share - (total - 1.0))) - theta) * inverse + 1.0
                b = b if b > 1.0 else 1.0
            return b, 1.0 / (k + d * share / (1.0 + share))
        if saturation in (EXPONENTIAL, FIRST_SUCCESS):
            return (a - theta) * inverse, inverse
        b = np.sqrt(_exp(a - theta) + 0.25)
        return b - 0.5, 0.5 * b

    # Sums that only steer the search may be added up in any order; nothing that is compared is.
    @numba.njit(cache=True, nogil=True, fastmath={"reassoc"}, error_model="numpy")
    def count_units(
        a: Floats, k: Floats, d: Floats, inverse: Floats, low: float, high: float, theta: float
    ) -> tuple[int, float]:
        units, slope = 0.0, 0.0
        for i in range(len(a)):
            x, step = root(a[i], k[i], d[i], inverse[i], theta)
            x = x + 0.5
            x = x if x > low else low
            x = x if x < high else high
            units += np.floor(x + 0.5)
            slope += step if (x > low) & (x < high) else 0.0
        return int(units), slope

    @_njit
    def settle(
        a: Floats,
        k: Floats,
        d: Floats,
        inverse: Floats,
        low: int,
        high: int,
        theta: float,
        budgets: Ints,
        gains: Floats,
    ) -> tuple[int, float]:
        least, most = float(low), float(high)
        units, wrong = 0, 0
        for i in range(len(a)):
            x, _ = root(a[i], k[i], d[i], inverse[i], theta)
            x = x + 0.5
            x = x if x > least else least
            x = x if x < most else most
            x = (x + ROUND) - ROUND
            now = _log_gain(saturation, a[i], k[i], d[i], x)
            then = _log_gain(saturation, a[i], k[i], d[i], x - 1.0)
            wrong += ((now > theta) & (x < most)) | ((then <= theta) & (x > least))
            gains[i] = now if x < most else -np.inf
            budgets[i] = int(x)
        if wrong:
            for i in range(len(a)):
                b = budgets[i]
                more = b < high and _log_gain(saturation, a[i], k[i], d[i], float(b)) > theta
                fewer = b > low and _log_gain(saturation, a[i], k[i], d[i], b - 1.0) <= theta
                if more or fewer:
                    fewest, at_most = low, high
                    while fewest < at_most:
                        middle = (fewest + at_most) >> 1
                        if _log_gain(saturation, a[i], k[i], d[i], float(middle)) > theta:
                            fewest = middle + 1
                        else:
                            at_most = middle
                    budgets[i] = fewest
                    gains[i] = _log_gain(saturation, a[i], k[i], d[i], float(fewest)) if fewest < high else -np.inf
        largest = -np.inf
        for i in range(len(a)):
            units += budgets[i]
            largest = gains[i] if gains[i] > largest else largest
        return units, largest

    @_njit
    def newton(
        a: Floats, k: Floats, d: Floats, inverse: Floats, low: float, high: float, target: float
    ) -> float:
        theta, up, down, reach = -4.0, np.inf, -np.inf, 2.0
        enough = 0.5 + 0.002 * len(a)
        for _ in range(24):
            units, slope = count_units(a, k, d, inverse, low, high, theta)
            excess = units - target
            if -enough <= excess <= enough:
                break
            if excess > 0.0:
                down = theta
            else:
                up = theta
            to = theta + excess / slope if slope > 0.0 else (np.inf if excess > 0.0 else -np.inf)
            if not down < to < up:
                if up < np.inf and down > -np.inf:
                    to = 0.5 * (up + down)
                else:
                    to = theta + reach if excess > 0.0 else theta - reach
                reach *= 4.0
            if to == theta:
                break
            theta = to
        return theta

    def run(a: Floats, k: Floats, d: Floats, low: int, high: int, total: int, budgets: Ints) -> bool:
        count = len(a)
        inverse, gains = np.empty(count), np.empty(count)
        edges = 0
        for i in range(count):
            inverse[i] = min(1.0 / k[i], 1e300)
            edges += a[i] == -np.inf
        if total >= (count - edges) * high + edges * low:
            return False
        room = 2.0 + 0.5 * np.sqrt(count)
        few = 64 + int(8.0 * room)
        sampled = min(count, 64) if count < 512 else min(count // 8, 4096)
        at = np.arange(sampled) * count // sampled
        theta = newton(a[at], k[at], d[at], inverse[at], float(low), float(high), total * (sampled / count))
        units, slope = count_units(a, k, d, inverse, float(low), float(high), theta)
        up, down = np.inf, -np.inf
        near_gain, near_budget, near_prompt = np.empty(few), np.empty(few, np.int64), np.empty(few, np.int64)
        for step in range(24):
            to = theta + (units - total + room) / slope if slope > 0.0 else np.nan
            if not down < to < up:
                if up < np.inf and down > -np.inf:
                    to = 0.5 * (up + down)
                elif to != to:
                    to = theta + 1.0 if units > total else theta - 1.0
            theta = to
            units, largest = 0, -np.inf
            for first in range(0, count, 256):  # a wrong estimate costs its block a second look
                block = slice(first, first + 256)
                part, best = settle(
                    a[block], k[block], d[block], inverse[block], low, high, theta, budgets[block], gains[block]
                )
                units += part
                largest = max(largest, best)
            if units > total:
                down = max(down, theta)
                continue
            up = min(up, theta)
            spare = total - units
            if spare == 0:
                return True
            if spare <= few // 2:
                near = 0
                margin = spare + room
                while near < spare:
                    edge = theta - margin / slope if slope > 0.0 and margin < 8.0 * few else largest
                    near = 0
                    for i in range(count):
                        if gains[i] < edge:
                            continue
                        b = budgets[i]
                        gain = gains[i]
                        while gain >= edge and b < high and near <= few:
                            if near < few:
                                near_gain[near], near_budget[near], near_prompt[near] = gain, b, i
                            near += 1
                            b += 1
                            gain = _log_gain(saturation, a[i], k[i], d[i], float(b))
                    margin *= 2.0
                    if edge == largest:
                        break
                if spare <= near <= few:
                    _give_best(near_gain[:near], near_budget[:near], near_prompt[:near], spare, budgets)
                    return True
            if step == 0 and spare > few // 2:
                continue
            most = budgets.copy()
            ties = 0
            for i in range(count):
                gain = gains[i]
                while gain == largest and most[i] < high:
                    most[i] += 1
                    gain = _log_gain(saturation, a[i], k[i], d[i], float(most[i]))
                ties += most[i] - budgets[i]
            if ties >= spare:
                _share_ties(budgets, most, spare)
                return True
            theta = largest
            up = theta
            units += ties
        return False

    return _njit(run)


@_njit
def _dp(values: Floats, width: int, spare: int, choice: Any) -> None:
    """Fills choice[i, r]: the units that prompt i takes of r in the best split of r among prompts 0 .. i. O(M R W)."""
    best = np.full(spare + 1, -np.inf)
    best[0] = 0.0
    following = np.empty(spare + 1)
    for i in range(values.shape[0]):
        for r in range(spare + 1):
            top, taken = best[r], 0
            for units in range(1, min(width, r) + 1):
                trial = best[r - units] + values[i, units]
                if trial > top:
                    top, taken = trial, units
            following[r] = top
            choice[i, r] = taken
        best, following = following, best


def _parameters(form: Form) -> list[Floats]:
    return [np.array((x,)) if isinstance(x, float) else np.ascontiguousarray(x, dtype=np.float64) for x in form[1:]]


def _parts(p: Floats, form: Form) -> tuple[int, Floats, Floats, Floats]:
    a, k, d = np.empty(len(p)), np.empty(len(p)), np.empty(len(p))
    _coefficients_of(form.saturation)(p, *_parameters(form), a, k, d)
    return form.saturation, a, k, d


def _gain_and_parts(p: Floats, source: Gains | CustomValue) -> tuple[Any, Any]:
    if isinstance(source, Form):
        return _form_gain, _parts(p, source)
    if isinstance(source, CustomValue):
        factors = np.ones(len(p)) if source.factors is None else source.factors
        return _custom_gain(source.gain), (p, factors)
    return _table_gain, (source,)


def first_invalid(p: Floats) -> int:
    """Index of the first pass rate that is NaN or outside [0, 1]; -1 if there is none."""
    return int(_first_invalid(p))


@_njit
def _first_invalid(p: Floats) -> int:
    for i in range(len(p)):
        if not (p[i] >= 0.0 and p[i] <= 1.0):
            return i
    return -1


def log_gains(p: Floats, form: Form, budgets: Ints) -> Floats:
    """Log gain of one more rollout for each prompt, [M]."""
    return _log_gains(*_parts(p, form), budgets, False)


def gains(p: Floats, form: Form, budgets: Ints) -> Floats:
    """Gain of one more rollout for each prompt, [M]."""
    return _log_gains(*_parts(p, form), budgets, True)


def log_gain_table(p: Floats, form: Form, low: int, high: int) -> Floats:
    """Log gains at budgets low .. high-1, [M, high-low]."""
    return _log_gain_table(*_parts(p, form), low, high)


def heap(p: Floats, source: Gains | CustomValue, low: int, high: int, total: int) -> Ints:
    """2602.03048 Algorithm 1: the largest gain next, from a heap, [M]. O(M + R log M)."""
    gain, parts = _gain_and_parts(p, source)
    return _heap_of(gain)(parts, len(p), low, high, total)


def threshold(
    p: Floats, source: Gains | CustomValue, low: int, high: int, total: int, threads: int = 1
) -> Ints:
    """Every unit above the cut, then ties in the canonical order, [M]. `threads` is taken and not used."""
    gain, parts = _gain_and_parts(p, source)
    if isinstance(source, Form) and low * len(p) < total < high * len(p):
        budgets = np.empty(len(p), dtype=np.int64)
        solved = source.saturation == FIRST_SUCCESS and bool(np.any(p == 1.0))
        if not solved and _newton_of(source.saturation)(*parts[1:], low, high, total, budgets):
            return budgets
    return _bisection_of(gain)(parts, len(p), low, high, total)


def dp(p: Floats, source: Gains | CustomValue, low: int, high: int, total: int) -> Ints:
    """Multiple-choice knapsack by dynamic programming, the papers' baseline, [M]: see numpy_backend.dp. O(M R W)."""
    if isinstance(source, Form):
        table = log_gain_table(p, source, low, high)
        steps = _exp_table(table)
    else:
        table = source.table(p, low, high) if isinstance(source, CustomValue) else source[:, low:high]
        steps = table
    values = np.concatenate([np.zeros((len(p), 1)), np.cumsum(steps, axis=1)], axis=1)
    width, spare = high - low, total - low * len(p)
    choice = np.empty((len(p), spare + 1), dtype=np.min_scalar_type(width))
    _dp(values, width, spare, choice)
    budgets = np.empty(len(p), dtype=np.int64)
    for i in range(len(p) - 1, -1, -1):
        taken = int(choice[i, spare])
        budgets[i] = low + taken
        spare -= taken
    logs = isinstance(source, Form)
    return settle_ties(table, budgets, low, high, float(values.max(initial=0.0)) * len(p), logs)


@_njit
def _exp_table(x: Floats) -> Floats:
    out = np.empty_like(x)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = _exp(x[i, j])
    return out
