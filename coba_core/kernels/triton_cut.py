"""The parts of threshold allocation on a card: each works on the prompts begin .. end-1, for one program or for many.

The cut θ* is sought between `up`, where at most `total` units have a larger gain, and `down`, where more have. Both are
places of float64 numbers in their order, so a bracket of neighbours ends the search. A step counts the units above
POINTS places inside the bracket at once: half of them cut it into equal parts (which bounds the number of steps), the
others lie close around a linear interpolation (which makes the steps few). A step also learns the gains next to each
place, and draws the bracket in to gains that exist: with few distinct gains it closes at once.

Then every unit with a gain above θ* is given, and those that equal it in the canonical order: prompts are filled to one
level, the rest by index.

scratch, float64 [3, M]: the coefficients a and k, and d, in whose place the budgets with all units of θ* come last.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from coba_core.kernels import numpy_backend as reference
from coba_core.kernels.triton_elementary import number, ordinal
from coba_core.kernels.triton_gains import coefficients, log_gain, parameter

EXPONENTIAL = tl.constexpr(reference.EXPONENTIAL)
FIRST_SUCCESS = tl.constexpr(reference.FIRST_SUCCESS)
MIXED_GROUP = tl.constexpr(reference.MIXED_GROUP)
LOWEST = tl.constexpr(-(2**63))
INFINITY = tl.constexpr(float("inf"))
BIGGEST = tl.constexpr(1e300)


# ---- gains -----------------------------------------------------------------------------------------------------------


@triton.jit
def prepare_rows(
    p_pointer,
    p_exponent,
    q_exponent,
    log_scale,
    rate,
    p_step,
    q_step,
    scale_step,
    rate_step,
    scratch,
    size,
    begin,
    end,
    least,
    most,
    SATURATION: tl.constexpr,
    DEVICE: tl.constexpr,
    STEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Coefficients into scratch; the largest gain, the smallest, and the smallest that is finite, float64 each."""
    largest = tl.full([BLOCK], -INFINITY, tl.float64)
    smallest = tl.full([BLOCK], INFINITY, tl.float64)
    finite = tl.full([BLOCK], INFINITY, tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        p = tl.load(p_pointer + at, mask=mask, other=0.5).to(tl.float64)
        a, k, d = coefficients(
            p,
            parameter(p_exponent, p_step, at, mask, DEVICE),
            parameter(q_exponent, q_step, at, mask, DEVICE),
            parameter(log_scale, scale_step, at, mask, DEVICE),
            parameter(rate, rate_step, at, mask, DEVICE),
            SATURATION,
            STEEP,
        )
        tl.store(scratch + at, a, mask=mask)
        tl.store(scratch + size + at, k, mask=mask)
        if SATURATION == MIXED_GROUP:
            tl.store(scratch + 2 * size + at, d, mask=mask)
        first = log_gain(a, k, d, least, SATURATION)
        last = log_gain(a, k, d, most - 1.0, SATURATION)
        largest = tl.where(mask & (first > largest), first, largest)
        smallest = tl.where(mask & (last < smallest), last, smallest)
        finite = tl.where(mask & (last < finite) & (last > -INFINITY), last, finite)
    return tl.max(largest, 0), tl.min(smallest, 0), tl.min(finite, 0)


@triton.jit
def load_rows(scratch, at, mask, size, SATURATION: tl.constexpr):
    """(a, k, d) of the prompts at; one that is masked gains nothing."""
    a = tl.load(scratch + at, mask=mask, other=-INFINITY)
    k = tl.load(scratch + size + at, mask=mask, other=0.0)
    d = k
    if SATURATION == MIXED_GROUP:
        d = tl.load(scratch + 2 * size + at, mask=mask, other=0.0)
    return a, k, d


@triton.jit
def lift(theta, a, k, d, low, high, digits, SATURATION: tl.constexpr, STRICT: tl.constexpr):
    """The budget from which gains are no longer above θ (STRICT), or no longer at least θ.

    The `digits` binary digits of what it has above `low`, from the highest down.
    """
    x = tl.where(theta > a, low, low)  # broadcasts
    digit = (digits.to(tl.int64) + 1022 << 52).to(tl.float64, bitcast=True)
    for _ in range(0, digits):
        trial = x + digit
        digit = digit * 0.5
        gain = log_gain(a, k, d, trial - 1.0, SATURATION)
        if STRICT:
            more = gain > theta
        else:
            more = gain >= theta
        x = tl.where(more & (trial <= high), trial, x)
    return x


@triton.jit
def budget_above(theta, a, k, d, low, high, digits, SATURATION: tl.constexpr):
    """(budget, gain of the next unit, gain of the last one) at θ; float64, exact.

    A line gives its budget in closed form; if rounding has put one beside the truth, its tile is counted anew.
    """
    if (SATURATION == EXPONENTIAL) | (SATURATION == FIRST_SUCCESS):
        inverse = 1.0 / k
        inverse = tl.where(inverse < BIGGEST, inverse, BIGGEST)
        x = tl.ceil((a - theta) * inverse)
        x = tl.where(x > low, x, low)
        x = tl.where(x < high, x, high)
        after = log_gain(a, k, d, x, SATURATION)
        before = log_gain(a, k, d, x - 1.0, SATURATION)
        wrong = ((after > theta) & (x < high)) | ((before <= theta) & (x > low))
        if tl.max(tl.max(wrong.to(tl.int32), 1), 0) > 0:
            x = lift(theta, a, k, d, low, high, digits, SATURATION, True)
            after = log_gain(a, k, d, x, SATURATION)
            before = log_gain(a, k, d, x - 1.0, SATURATION)
    else:
        x = lift(theta, a, k, d, low, high, digits, SATURATION, True)
        after = log_gain(a, k, d, x, SATURATION)
        before = log_gain(a, k, d, x - 1.0, SATURATION)
    return x, after, before


@triton.jit
def count_rows(
    place,
    scratch,
    size,
    begin,
    end,
    least,
    most,
    digits,
    SATURATION: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """At each place the budgets in all, and the places of the largest gain not above it and the smallest above it."""
    theta = number(place)[:, None]
    units = tl.zeros([POINTS, BLOCK], tl.float64)
    after = tl.full([POINTS, BLOCK], -INFINITY, tl.float64)
    before = tl.full([POINTS, BLOCK], INFINITY, tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        a, k, d = load_rows(scratch, at, mask, size, SATURATION)
        x, following, latest = budget_above(
            theta, a[None, :], k[None, :], d[None, :], least, most, digits, SATURATION
        )
        inside = mask[None, :]
        units += tl.where(inside, x, 0.0)
        after = tl.where(inside & (x < most) & (following > after), following, after)
        before = tl.where(inside & (x > least) & (latest < before), latest, before)
    return tl.sum(units, 1).to(tl.int64), ordinal(tl.max(after, 1)), ordinal(tl.min(before, 1))


# ---- the bracket -----------------------------------------------------------------------------------------------------


@triton.jit
def is_open(up, sum_up, down, total):
    """Whether the cut is not yet known."""
    return (down + 1 < up) & (sum_up != total)


@triton.jit
def places(up, sum_up, down, sum_down, base, total, POINTS: tl.constexpr):
    """Places strictly inside an open bracket, int64 [POINTS]."""
    j = tl.arange(0, POINTS)
    parts: tl.constexpr = POINTS // 2
    width = (up // parts) - (down // parts)
    step = tl.where(width > 1, width, 1)
    cut = tl.where(j < parts - 1, j + 1, parts - 1).to(tl.int64)
    even = down + cut * step
    top = number(up)
    bottom = number(down)
    bottom = tl.where(bottom > base, bottom, base)
    reach = top - bottom
    share = (total - sum_up).to(tl.float64) / (sum_down - sum_up).to(tl.float64)
    m = j - (parts - 1) - POINTS // 4
    size = tl.where(m < 0, -m, m)
    scale = ((1023 - 3 * (POINTS // 4 + 1 - size)).to(tl.int64) << 52).to(tl.float64, bitcast=True)  # powers of 1/8
    scale = tl.where(m < 0, -scale, tl.where(m > 0, scale, 0.0))
    guess = (top - reach * share) + reach * scale
    near = ordinal(tl.where(guess == guess, guess, 0.0))
    place = tl.where((j >= parts - 1) & (guess > -INFINITY) & (guess < INFINITY), near, even)
    place = tl.where(place > down, place, down + 1)
    return tl.where(place < up, place, up - 1)


@triton.jit
def narrow(up, sum_up, down, sum_down, total, place, units, after, before):
    """The bracket after a step: places [POINTS], the units above each, and the gains next to each as places."""
    few = units <= total
    to_up = tl.min(tl.where(few, place, up), 0)
    to_sum_up = tl.max(tl.where(few, units, sum_up), 0)
    next_gain = tl.min(tl.where(few, after, up), 0)
    to_down = tl.max(tl.where(few, down, place), 0)
    to_sum_down = tl.min(tl.where(few, sum_down, units), 0)
    last_gain = tl.max(tl.where(few, down + 1, before), 0)
    # no gain lies between a place and the gain next to it
    to_up = tl.where(next_gain < to_up, next_gain, to_up)
    to_down = tl.where(last_gain - 1 > to_down, last_gain - 1, to_down)
    return to_up, to_sum_up, to_down, to_sum_down


# ---- budgets ---------------------------------------------------------------------------------------------------------


@triton.jit
def settle_rows(
    up, ties, scratch, budgets, size, begin, end, least, most, digits, SATURATION: tl.constexpr, BLOCK: tl.constexpr
):
    """Budgets with every unit above the cut; if there are ties, those with the units at the cut into scratch."""
    theta = number(up)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        a, k, d = load_rows(scratch, at, mask, size, SATURATION)
        fewest = lift(theta, a, k, d, least, most, digits, SATURATION, True)
        tl.store(budgets + at, fewest.to(tl.int64), mask=mask)
        if ties:
            ceiling = lift(theta, a, k, d, least, most, digits, SATURATION, False)
            tl.store(scratch + 2 * size + at, ceiling, mask=mask)


@triton.jit
def trial_levels(level, top, POINTS: tl.constexpr):
    """POINTS levels above `level`, the last of them `top`."""
    step = (top - level + POINTS - 1) // POINTS
    trial = level + (tl.arange(0, POINTS) + 1) * step
    return tl.where(trial < top, trial, top)


@triton.jit
def level_rows(trial, scratch, budgets, size, begin, end, POINTS: tl.constexpr, BLOCK: tl.constexpr):
    """The budgets in all when prompts are filled to each of the levels, int64 [POINTS]."""
    units = tl.zeros([POINTS, BLOCK], tl.int64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        fewest = tl.load(budgets + at, mask=mask, other=0)[None, :]
        ceiling = tl.load(scratch + 2 * size + at, mask=mask, other=0.0).to(tl.int64)[None, :]
        x = tl.where(trial[:, None] < ceiling, trial[:, None], ceiling)
        units += tl.where(x > fewest, x, fewest)
    return tl.sum(units, 1)


@triton.jit
def narrow_level(level, top, spare, total, trial, filled):
    """The largest level that the total pays for lies in [level, top]; spare, the units over at `level`."""
    pays = filled <= total
    return (
        tl.max(tl.where(pays, trial, level), 0),
        tl.min(tl.where(pays, top, trial - 1), 0),
        tl.min(tl.where(pays, total - filled, spare), 0),
    )


@triton.jit
def waiting_rows(level, scratch, budgets, size, begin, end, BLOCK: tl.constexpr):
    """How many prompts stand at the level and could take one unit more."""
    count = tl.zeros([BLOCK], tl.int64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        fewest = tl.load(budgets + at, mask=mask, other=0)
        ceiling = tl.load(scratch + 2 * size + at, mask=mask, other=0.0).to(tl.int64)
        count += (mask & (fewest <= level) & (level < ceiling)).to(tl.int64)
    return tl.sum(count, 0)


@triton.jit
def share_rows(level, spare, scratch, budgets, size, begin, end, BLOCK: tl.constexpr):
    """Fills to the level, and gives a unit more to the first `spare` prompts that wait there."""
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        fewest = tl.load(budgets + at, mask=mask, other=0)
        ceiling = tl.load(scratch + 2 * size + at, mask=mask, other=0.0).to(tl.int64)
        x = tl.where(level < ceiling, level, ceiling)
        x = tl.where(x > fewest, x, fewest)
        waiting = (mask & (x == level) & (x < ceiling)).to(tl.int64)
        turn = tl.cumsum(waiting, 0)
        x += tl.where(turn <= spare, waiting, 0)
        spare -= tl.sum(waiting, 0)
        tl.store(budgets + at, x, mask=mask)
