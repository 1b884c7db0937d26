"""Exact threshold allocation on a card: one launch of one program, or a fixed number of launches. Nothing on the host.

The cut θ* is sought between `up`, where at most `total` units have a larger gain, and `down`, where more have. Both are
places of float64 numbers in their order, so a bracket of neighbours ends the search. A step counts the units above
POINTS places inside the bracket at once: half of them cut it into equal parts (which bounds the number of steps), the
others lie close around a linear interpolation (which makes the steps few). A step also learns the gains next to each
place, and draws the bracket in to gains that exist: with few distinct gains it closes at once.

Then every unit with a gain above θ* is given, and those that equal it in the canonical order: prompts are filled to one
level, the rest by index.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,misc"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from coba_core.kernels import numpy_backend as reference
from coba_core.kernels.numpy_backend import Form
from coba_core.kernels.triton_elementary import number, ordinal
from coba_core.kernels.triton_gains import (
    beside_its_tensors,
    coefficients,
    form_parameters,
    log_gain,
    parameter,
    pass_rates_tensor,
)

EXPONENTIAL = tl.constexpr(reference.EXPONENTIAL)
FIRST_SUCCESS = tl.constexpr(reference.FIRST_SUCCESS)
MIXED_GROUP = tl.constexpr(reference.MIXED_GROUP)
LOWEST = tl.constexpr(-(2**63))
HIGHEST = tl.constexpr(2**63 - 1)
INFINITY = tl.constexpr(float("inf"))
BIGGEST = tl.constexpr(1e300)

BLOCK = 256  # prompts a tile
POINTS = 8  # places a step
WARPS = 8
ONE_PROGRAM = 65_536  # prompts, at most, of the single launch
PROGRAMS = 1024  # at most, of the others; the last step scans their counts in one tile

# A bracket holds 2^64 places at most. A step leaves a quarter and 4 of them, at most: 35 steps leave two neighbours.
STEPS = 37
# Slots of a step's bracket, and of its counts: POINTS sums, POINTS next gains, POINTS last gains.
UP, SUM_UP, DOWN, SUM_DOWN, BASE, TAKEN = (tl.constexpr(i) for i in range(6))
BRACKET = tl.constexpr(8)


# ---- counting --------------------------------------------------------------------------------------------------------


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


@triton.jit
def level_step(level, top):
    """How far apart the levels of a step lie, so that POINTS of them reach from above `level` to `top`."""
    return (top - level + POINTS_ - 1) // POINTS_


POINTS_ = tl.constexpr(POINTS)


# ---- one program -----------------------------------------------------------------------------------------------------


@triton.jit(
    do_not_specialize=["p_exponent", "q_exponent", "log_scale", "rate", "size", "low", "high", "total", "digits"]
)
def threshold_kernel(
    p_pointer,
    p_exponent,
    q_exponent,
    log_scale,
    rate,
    p_step,
    q_step,
    scale_step,
    rate_step,
    budgets,
    scratch,
    steps_out,
    size,
    low,
    high,
    total,
    digits,
    SATURATION: tl.constexpr,
    DEVICE: tl.constexpr,
    STEEP: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """budgets int64 [M] of one allocation; scratch float64 [3, M]."""
    size = size.to(tl.int64)
    total = total.to(tl.int64)
    least = low.to(tl.float64)
    most = high.to(tl.float64)
    lane = tl.arange(0, BLOCK)

    largest = tl.full([BLOCK], -INFINITY, tl.float64)
    smallest = tl.full([BLOCK], INFINITY, tl.float64)
    finite = tl.full([BLOCK], INFINITY, tl.float64)
    for start in range(0, size, BLOCK):
        at = start + lane
        mask = at < size
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
    tl.debug_barrier()
    up = ordinal(tl.max(largest, 0))
    down = ordinal(tl.min(smallest, 0)) - 1
    base = tl.min(finite, 0)
    sum_up = size * low
    sum_down = size * high

    steps = tl.full([], 0, tl.int32)
    while is_open(up, sum_up, down, total):
        steps += 1
        place = places(up, sum_up, down, sum_down, base, total, POINTS)
        theta = number(place)[:, None]
        units = tl.zeros([POINTS, BLOCK], tl.float64)
        after = tl.full([POINTS, BLOCK], -INFINITY, tl.float64)
        before = tl.full([POINTS, BLOCK], INFINITY, tl.float64)
        for start in range(0, size, BLOCK):
            at = start + lane
            mask = at < size
            a = tl.load(scratch + at, mask=mask, other=-INFINITY)[None, :]
            k = tl.load(scratch + size + at, mask=mask, other=0.0)[None, :]
            d = k
            if SATURATION == MIXED_GROUP:
                d = tl.load(scratch + 2 * size + at, mask=mask, other=0.0)[None, :]
            x, following, latest = budget_above(theta, a, k, d, least, most, digits, SATURATION)
            inside = mask[None, :]
            units += tl.where(inside, x, 0.0)
            after = tl.where(inside & (x < most) & (following > after), following, after)
            before = tl.where(inside & (x > least) & (latest < before), latest, before)
        up, sum_up, down, sum_down = narrow(
            up,
            sum_up,
            down,
            sum_down,
            total,
            place,
            tl.sum(units, 1).to(tl.int64),
            ordinal(tl.max(after, 1)),
            ordinal(tl.min(before, 1)),
        )
    tl.store(steps_out, steps)

    theta = number(up)
    for start in range(0, size, BLOCK):
        at = start + lane
        mask = at < size
        a = tl.load(scratch + at, mask=mask, other=-INFINITY)
        k = tl.load(scratch + size + at, mask=mask, other=0.0)
        d = k
        if SATURATION == MIXED_GROUP:
            d = tl.load(scratch + 2 * size + at, mask=mask, other=0.0)
        fewest = lift(theta, a, k, d, least, most, digits, SATURATION, True)
        tl.store(budgets + at, fewest.to(tl.int64), mask=mask)
        if sum_up != total:
            ceiling = lift(theta, a, k, d, least, most, digits, SATURATION, False)
            tl.store(scratch + 2 * size + at, ceiling, mask=mask)

    if sum_up != total:
        tl.debug_barrier()
        level = low.to(tl.int64)
        top = high.to(tl.int64)
        spare = total - sum_up
        while level < top:  # the largest level that the total still pays for
            step = level_step(level, top)
            trial = level + (tl.arange(0, POINTS) + 1) * step
            trial = tl.where(trial < top, trial, top)
            units = tl.zeros([POINTS, BLOCK], tl.int64)
            for start in range(0, size, BLOCK):
                at = start + lane
                mask = at < size
                fewest = tl.load(budgets + at, mask=mask, other=0)[None, :]
                ceiling = tl.load(scratch + 2 * size + at, mask=mask, other=0.0).to(tl.int64)[None, :]
                x = tl.where(trial[:, None] < ceiling, trial[:, None], ceiling)
                units += tl.where(x > fewest, x, fewest)
            filled = tl.sum(units, 1)
            spare = tl.min(tl.where(filled <= total, total - filled, spare), 0)
            level = tl.max(tl.where(filled <= total, trial, level), 0)
            top = tl.min(tl.where(filled <= total, top, trial - 1), 0)
        for start in range(0, size, BLOCK):
            at = start + lane
            mask = at < size
            fewest = tl.load(budgets + at, mask=mask, other=0)
            ceiling = tl.load(scratch + 2 * size + at, mask=mask, other=0.0).to(tl.int64)
            x = tl.where(level < ceiling, level, ceiling)
            x = tl.where(x > fewest, x, fewest)
            waiting = (mask & (x == level) & (x < ceiling)).to(tl.int64)
            turn = tl.cumsum(waiting, 0)
            x += tl.where(turn <= spare, waiting, 0)
            spare -= tl.sum(waiting, 0)
            tl.store(budgets + at, x, mask=mask)


# ---- many programs ---------------------------------------------------------------------------------------------------


@triton.jit
def bracket_at(state, step):
    slot = state + step * BRACKET
    return (
        tl.load(slot + UP),
        tl.load(slot + SUM_UP),
        tl.load(slot + DOWN),
        tl.load(slot + SUM_DOWN),
        tl.load(slot + BASE).to(tl.float64, bitcast=True),
        tl.load(slot + TAKEN),
    )


@triton.jit
def bracket_after(state, counts, step, total, POINTS: tl.constexpr):
    """The bracket that every program finds at the start of `step` > 0: the one before, narrowed by its counts."""
    up, sum_up, down, sum_down, base, taken = bracket_at(state, step - 1)
    if is_open(up, sum_up, down, total):
        place = places(up, sum_up, down, sum_down, base, total, POINTS)
        slot = counts + (step - 1) * 3 * POINTS + tl.arange(0, POINTS)
        up, sum_up, down, sum_down = narrow(
            up,
            sum_up,
            down,
            sum_down,
            total,
            place,
            tl.load(slot),
            tl.load(slot + POINTS),
            tl.load(slot + 2 * POINTS),
        )
        taken += 1
    return up, sum_up, down, sum_down, base, taken


@triton.jit
def store_bracket(state, step, up, sum_up, down, sum_down, base, taken):
    slot = state + step * BRACKET
    tl.store(slot + UP, up)
    tl.store(slot + SUM_UP, sum_up)
    tl.store(slot + DOWN, down)
    tl.store(slot + SUM_DOWN, sum_down)
    tl.store(slot + BASE, base.to(tl.int64, bitcast=True))
    tl.store(slot + TAKEN, taken)


@triton.jit(do_not_specialize=["level_size"])
def reset_kernel(counts, levels, level_size, STEPS: tl.constexpr, POINTS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts before anything is counted: [STEPS, 3, POINTS] and, of the levels, [level_size]."""
    at = tl.arange(0, BLOCK)
    kind = (at // POINTS) % 3
    start = tl.where(kind == 0, 0, tl.where(kind == 1, LOWEST, HIGHEST))
    tl.store(counts + at, start, mask=at < STEPS * 3 * POINTS)
    tl.store(levels + at, start * 0, mask=at < level_size)


@triton.jit(do_not_specialize=["p_exponent", "q_exponent", "log_scale", "rate", "size", "low", "high", "chunk"])
def prepare_kernel(
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
    counts,
    size,
    low,
    high,
    chunk,
    SATURATION: tl.constexpr,
    DEVICE: tl.constexpr,
    STEEP: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Coefficients into scratch; the largest and the smallest gains, as places, into the counts of step 0."""
    size = size.to(tl.int64)
    least = low.to(tl.float64)
    most = high.to(tl.float64)
    largest = tl.full([BLOCK], -INFINITY, tl.float64)
    smallest = tl.full([BLOCK], INFINITY, tl.float64)
    finite = tl.full([BLOCK], INFINITY, tl.float64)
    begin = tl.program_id(0).to(tl.int64) * chunk
    for start in range(0, chunk, BLOCK):
        at = begin + start + tl.arange(0, BLOCK)
        mask = at < size
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
    tl.atomic_max(counts + POINTS, ordinal(tl.max(largest, 0)))
    tl.atomic_min(counts + 2 * POINTS, ordinal(tl.min(smallest, 0)))
    tl.atomic_min(counts + 2 * POINTS + 1, ordinal(tl.min(finite, 0)))


@triton.jit(do_not_specialize=["size", "low", "high", "total", "digits", "chunk", "step"])
def step_kernel(
    scratch,
    state,
    counts,
    size,
    low,
    high,
    total,
    digits,
    chunk,
    step,
    SATURATION: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
):
    """Step number `step` >= 1: finds the bracket, stores it, and counts at its places. Nothing to do: returns."""
    size = size.to(tl.int64)
    total = total.to(tl.int64)
    least = low.to(tl.float64)
    most = high.to(tl.float64)
    if FIRST:
        up = tl.load(counts + POINTS)
        down = tl.load(counts + 2 * POINTS) - 1
        base = number(tl.load(counts + 2 * POINTS + 1))
        sum_up = size * low
        sum_down = size * high
        taken = size * 0
    else:
        up, sum_up, down, sum_down, base, taken = bracket_after(state, counts, step, total, POINTS)
    if tl.program_id(0) == 0:
        store_bracket(state, step, up, sum_up, down, sum_down, base, taken)
    if is_open(up, sum_up, down, total):
        theta = number(places(up, sum_up, down, sum_down, base, total, POINTS))[:, None]
        units = tl.zeros([POINTS, BLOCK], tl.float64)
        after = tl.full([POINTS, BLOCK], -INFINITY, tl.float64)
        before = tl.full([POINTS, BLOCK], INFINITY, tl.float64)
        begin = tl.program_id(0).to(tl.int64) * chunk
        for start in range(0, chunk, BLOCK):
            at = begin + start + tl.arange(0, BLOCK)
            mask = at < size
            a = tl.load(scratch + at, mask=mask, other=-INFINITY)[None, :]
            k = tl.load(scratch + size + at, mask=mask, other=0.0)[None, :]
            d = k
            if SATURATION == MIXED_GROUP:
                d = tl.load(scratch + 2 * size + at, mask=mask, other=0.0)[None, :]
            x, following, latest = budget_above(theta, a, k, d, least, most, digits, SATURATION)
            inside = mask[None, :]
            units += tl.where(inside, x, 0.0)
            after = tl.where(inside & (x < most) & (following > after), following, after)
            before = tl.where(inside & (x > least) & (latest < before), latest, before)
        slot = counts + step * 3 * POINTS + tl.arange(0, POINTS)
        tl.atomic_add(slot, tl.sum(units, 1).to(tl.int64))
        tl.atomic_max(slot + POINTS, ordinal(tl.max(after, 1)))
        tl.atomic_min(slot + 2 * POINTS, ordinal(tl.min(before, 1)))


@triton.jit(do_not_specialize=["size", "low", "high", "total", "digits", "chunk", "step"])
def settle_kernel(
    scratch,
    state,
    counts,
    budgets,
    steps_out,
    size,
    low,
    high,
    total,
    digits,
    chunk,
    step,
    SATURATION: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Budgets with every unit above the cut; with ties, the budgets with those too, into scratch."""
    size = size.to(tl.int64)
    total = total.to(tl.int64)
    least = low.to(tl.float64)
    most = high.to(tl.float64)
    up, sum_up, down, sum_down, base, taken = bracket_after(state, counts, step, total, POINTS)
    if tl.program_id(0) == 0:
        store_bracket(state, step, up, sum_up, down, sum_down, base, taken)
        tl.store(steps_out, taken.to(tl.int32))
    theta = number(up)
    begin = tl.program_id(0).to(tl.int64) * chunk
    for start in range(0, chunk, BLOCK):
        at = begin + start + tl.arange(0, BLOCK)
        mask = at < size
        a = tl.load(scratch + at, mask=mask, other=-INFINITY)
        k = tl.load(scratch + size + at, mask=mask, other=0.0)
        d = k
        if SATURATION == MIXED_GROUP:
            d = tl.load(scratch + 2 * size + at, mask=mask, other=0.0)
        fewest = lift(theta, a, k, d, least, most, digits, SATURATION, True)
        tl.store(budgets + at, fewest.to(tl.int64), mask=mask)
        if sum_up != total:
            ceiling = lift(theta, a, k, d, least, most, digits, SATURATION, False)
            tl.store(scratch + 2 * size + at, ceiling, mask=mask)


@triton.jit
def level_after(state, levels, step, rounds, low, high, total, POINTS: tl.constexpr):
    """(level, top, units over) after the first `rounds` rounds of the search for the level."""
    level = low.to(tl.int64)
    top = high.to(tl.int64)
    spare = total - tl.load(state + step * BRACKET + SUM_UP)
    for i in range(0, rounds):
        trial = level + (tl.arange(0, POINTS) + 1) * level_step(level, top)
        trial = tl.where(trial < top, trial, top)
        filled = tl.load(levels + i * POINTS + tl.arange(0, POINTS))
        paid = tl.where(level < top, total, LOWEST)  # a finished search stays as it is
        pays = filled <= paid
        spare = tl.min(tl.where(pays, total - filled, spare), 0)
        to_level = tl.max(tl.where(pays, trial, level), 0)
        top = tl.min(tl.where((filled <= total) | (trial <= level), top, trial - 1), 0)
        level = to_level
    return level, top, spare


@triton.jit(do_not_specialize=["size", "low", "high", "total", "chunk", "step", "done"])
def level_kernel(
    scratch,
    state,
    levels,
    budgets,
    size,
    low,
    high,
    total,
    chunk,
    step,
    done,
    POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Units when prompts are filled to each of POINTS levels, added to levels[done]."""
    size = size.to(tl.int64)
    total = total.to(tl.int64)
    if tl.load(state + step * BRACKET + SUM_UP) != total:
        level, top, _ = level_after(state, levels, step, done, low, high, total, POINTS)
        if level < top:
            trial = level + (tl.arange(0, POINTS) + 1) * level_step(level, top)
            trial = tl.where(trial < top, trial, top)
            units = tl.zeros([POINTS, BLOCK], tl.int64)
            begin = tl.program_id(0).to(tl.int64) * chunk
            for start in range(0, chunk, BLOCK):
                at = begin + start + tl.arange(0, BLOCK)
                mask = at < size
                fewest = tl.load(budgets + at, mask=mask, other=0)[None, :]
                ceiling = tl.load(scratch + 2 * size + at, mask=mask, other=0.0).to(tl.int64)[None, :]
                x = tl.where(trial[:, None] < ceiling, trial[:, None], ceiling)
                units += tl.where(x > fewest, x, fewest)
            tl.atomic_add(levels + done * POINTS + tl.arange(0, POINTS), tl.sum(units, 1))


@triton.jit(do_not_specialize=["size", "low", "high", "total", "chunk", "step", "rounds"])
def waiting_kernel(
    scratch,
    state,
    levels,
    budgets,
    waiting_out,
    size,
    low,
    high,
    total,
    chunk,
    step,
    rounds,
    POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many prompts of each program's chunk stand at the level and could take one unit more, [programs]."""
    size = size.to(tl.int64)
    total = total.to(tl.int64)
    if tl.load(state + step * BRACKET + SUM_UP) != total:
        level, _, _ = level_after(state, levels, step, rounds, low, high, total, POINTS)
        count = tl.zeros([BLOCK], tl.int64)
        begin = tl.program_id(0).to(tl.int64) * chunk
        for start in range(0, chunk, BLOCK):
            at = begin + start + tl.arange(0, BLOCK)
            mask = at < size
            fewest = tl.load(budgets + at, mask=mask, other=0)
            ceiling = tl.load(scratch + 2 * size + at, mask=mask, other=0.0).to(tl.int64)
            count += (mask & (fewest <= level) & (level < ceiling)).to(tl.int64)
        tl.store(waiting_out + tl.program_id(0), tl.sum(count, 0))


@triton.jit(do_not_specialize=["size", "low", "high", "total", "chunk", "step", "rounds"])
def share_kernel(
    scratch,
    state,
    levels,
    budgets,
    waiting_in,
    size,
    low,
    high,
    total,
    chunk,
    step,
    rounds,
    PROGRAMS: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fills to the level, and gives what is left to the first prompts that wait there."""
    size = size.to(tl.int64)
    total = total.to(tl.int64)
    if tl.load(state + step * BRACKET + SUM_UP) != total:
        level, _, spare = level_after(state, levels, step, rounds, low, high, total, POINTS)
        program = tl.arange(0, PROGRAMS)
        spare -= tl.sum(tl.load(waiting_in + program, mask=program < tl.program_id(0), other=0), 0)
        begin = tl.program_id(0).to(tl.int64) * chunk
        for start in range(0, chunk, BLOCK):
            at = begin + start + tl.arange(0, BLOCK)
            mask = at < size
            fewest = tl.load(budgets + at, mask=mask, other=0)
            ceiling = tl.load(scratch + 2 * size + at, mask=mask, other=0.0).to(tl.int64)
            x = tl.where(level < ceiling, level, ceiling)
            x = tl.where(x > fewest, x, fewest)
            waiting = (mask & (x == level) & (x < ceiling)).to(tl.int64)
            turn = tl.cumsum(waiting, 0)
            x += tl.where(turn <= spare, waiting, 0)
            spare -= tl.sum(waiting, 0)
            tl.store(budgets + at, x, mask=mask)


# ---- calls -----------------------------------------------------------------------------------------------------------


def tile(saturation: int) -> int:
    """Prompts a tile: fewer where a gain takes an exponential and a logarithm, so that nothing spills."""
    return BLOCK // 2 if saturation == reference.MIXED_GROUP else BLOCK


def level_rounds(low: int, high: int) -> int:
    """Rounds that find a level in [low, high], each leaving 1/POINTS of what the one before left."""
    rounds, width = 0, high - low
    while width > 0:
        rounds, width = rounds + 1, -(-width // POINTS) - 1
    return rounds


@beside_its_tensors
def threshold(
    p: torch.Tensor,
    source: Form,
    low: int,
    high: int,
    total: int,
    threads: int = 1,
    *,
    launches: str = "auto",
    steps_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The allocation, int64 [M] on the card of p: equal to numpy_backend.threshold bit for bit.

    p: float32 or float64 [M] in [0, 1] (float32 is widened, exactly; what lies outside gains nothing, as finding it
    would wait for the card). source: a Form, its numbers on the host or on the card. M low <= total <= M high is the
    caller's to check. launches: "one" (a single program), "many" (a fixed number of launches) or "auto" ("one" up to
    ONE_PROGRAM prompts). steps_out: int32 [1], takes the number of steps that the search needed. Captures in a CUDA
    graph.
    """
    if not isinstance(source, Form):
        raise ValueError("the Triton backend allocates by forms, not by tables or functions")
    if launches not in ("auto", "one", "many"):
        raise ValueError(f"launches is {launches!r}, not 'auto', 'one' or 'many'")
    p = pass_rates_tensor(p)
    size = p.numel()
    budgets = torch.empty(size, dtype=torch.int64, device=p.device)
    if not size:
        return budgets
    given = form_parameters(source, p)
    scratch = torch.empty(3 * size, dtype=torch.float64, device=p.device)
    if steps_out is None:
        steps_out = torch.empty(1, dtype=torch.int32, device=p.device)
    form: dict[str, Any] = {"SATURATION": source.saturation, "DEVICE": given.device, "STEEP": given.steep}
    block = tile(source.saturation)
    search: dict[str, Any] = {"POINTS": POINTS, "BLOCK": block, "num_warps": WARPS, "enable_fp_fusion": False}
    digits = (high - low).bit_length()
    if launches == "one" or (launches == "auto" and size <= ONE_PROGRAM):
        threshold_kernel[(1,)](
            p, *given.values, *given.steps, budgets, scratch, steps_out, size, low, high, total, digits,
            **form, **search,
        )  # fmt: skip
        return budgets

    blocks = triton.cdiv(size, block)
    chunk = triton.cdiv(blocks, PROGRAMS) * block
    grid = (triton.cdiv(size, chunk),)
    rounds = level_rounds(low, high)
    brackets = (STEPS + 1) * int(BRACKET.value)
    step_counts, level_counts = STEPS * 3 * POINTS, max(rounds, 1) * POINTS
    state = torch.empty(
        brackets + step_counts + level_counts + PROGRAMS, dtype=torch.int64, device=p.device
    )
    state, counts, levels, waiting = state.split([brackets, step_counts, level_counts, PROGRAMS])
    reset_kernel[(1,)](
        counts, levels, level_counts, STEPS=STEPS, POINTS=POINTS,
        BLOCK=triton.next_power_of_2(max(step_counts, level_counts)),
    )  # fmt: skip
    prepare_kernel[grid](
        p, *given.values, *given.steps, scratch, counts, size, low, high, chunk, **form, **search
    )
    lines: dict[str, Any] = {"SATURATION": source.saturation, **search}
    for step in range(1, STEPS):
        step_kernel[grid](
            scratch, state, counts, size, low, high, total, digits, chunk, step, FIRST=step == 1, **lines
        )
    settle_kernel[grid](
        scratch, state, counts, budgets, steps_out, size, low, high, total, digits, chunk, STEPS, **lines
    )
    for round_ in range(rounds):
        level_kernel[grid](
            scratch, state, levels, budgets, size, low, high, total, chunk, STEPS, round_, **search
        )
    waiting_kernel[grid](
        scratch, state, levels, budgets, waiting, size, low, high, total, chunk, STEPS, rounds, **search
    )
    share_kernel[grid](
        scratch, state, levels, budgets, waiting, size, low, high, total, chunk, STEPS,
        rounds, PROGRAMS=PROGRAMS, **search,
    )  # fmt: skip
    return budgets
