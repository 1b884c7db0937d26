"""Exact threshold allocation on a card: one launch of one program, or a fixed number of launches. Nothing on the host.

Up to ONE_PROGRAM prompts one program does everything. Above, the parts of triton_cut.py are launches of up to PROGRAMS
programs, a consecutive share of the prompts each, and the search's state lies in memory: a program finds the bracket by
narrowing the one before with its counts, which costs no launch of its own, and returns if it is closed. After STEPS
steps one program goes on by itself, so that the number of launches is fixed and small, and the end certain.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from coba_core.kernels import numpy_backend as reference
from coba_core.kernels.numpy_backend import Form
from coba_core.kernels.triton_cut import (
    count_rows,
    is_open,
    level_rows,
    narrow,
    narrow_level,
    places,
    prepare_rows,
    settle_rows,
    share_rows,
    trial_levels,
    waiting_rows,
)
from coba_core.kernels.triton_elementary import number, ordinal
from coba_core.kernels.triton_gains import beside_its_tensors, form_parameters, pass_rates_tensor

LOWEST = tl.constexpr(-(2**63))
HIGHEST = tl.constexpr(2**63 - 1)

BLOCK = 256  # prompts a tile
POINTS = 8  # places a step
WARPS = 8
ONE_PROGRAM = 65_536  # prompts, at most, of the single launch
PROGRAMS = 1024  # at most, of the others; the last launch scans their counts in one tile
STEPS = 12  # launches of the search; random pass rates need 3 to 5

# What a bracket holds in memory. Counts of a step: POINTS sums, POINTS next gains, POINTS last gains.
UP, SUM_UP, DOWN, SUM_DOWN, BASE, TAKEN = (tl.constexpr(i) for i in range(6))
BRACKET = tl.constexpr(8)


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
    begin = size * 0
    largest, smallest, base = prepare_rows(
        p_pointer, p_exponent, q_exponent, log_scale, rate, p_step, q_step, scale_step, rate_step,
        scratch, size, begin, size, least, most, SATURATION, DEVICE, STEEP, BLOCK,
    )  # fmt: skip
    tl.debug_barrier()
    up = ordinal(largest)
    down = ordinal(smallest) - 1
    sum_up = size * low
    sum_down = size * high
    steps = tl.full([], 0, tl.int32)
    while is_open(up, sum_up, down, total):
        steps += 1
        place = places(up, sum_up, down, sum_down, base, total, POINTS)
        units, after, before = count_rows(
            place, scratch, size, begin, size, least, most, digits, SATURATION, POINTS, BLOCK
        )
        up, sum_up, down, sum_down = narrow(up, sum_up, down, sum_down, total, place, units, after, before)
    tl.store(steps_out, steps)
    ties = sum_up != total
    settle_rows(up, ties, scratch, budgets, size, begin, size, least, most, digits, SATURATION, BLOCK)
    if ties:
        tl.debug_barrier()
        level = low.to(tl.int64)
        top = high.to(tl.int64)
        spare = total - sum_up
        while level < top:
            trial = trial_levels(level, top, POINTS)
            filled = level_rows(trial, scratch, budgets, size, begin, size, POINTS, BLOCK)
            level, top, spare = narrow_level(level, top, spare, total, trial, filled)
        share_rows(level, spare, scratch, budgets, size, begin, size, BLOCK)


# ---- many programs ---------------------------------------------------------------------------------------------------


@triton.jit
def own_rows(size, chunk):
    """(begin, end) of the prompts of this program."""
    begin = tl.program_id(0).to(tl.int64) * chunk
    end = begin + chunk
    return begin, tl.where(end < size, end, size)


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
def store_bracket(state, step, up, sum_up, down, sum_down, base, taken):
    slot = state + step * BRACKET
    tl.store(slot + UP, up)
    tl.store(slot + SUM_UP, sum_up)
    tl.store(slot + DOWN, down)
    tl.store(slot + SUM_DOWN, sum_down)
    tl.store(slot + BASE, base.to(tl.int64, bitcast=True))
    tl.store(slot + TAKEN, taken)


@triton.jit
def bracket_after(state, counts, step, total, POINTS: tl.constexpr):
    """The bracket that every program finds at the start of `step` > 1: the one before, narrowed by its counts."""
    up, sum_up, down, sum_down, base, taken = bracket_at(state, step - 1)
    if is_open(up, sum_up, down, total):
        place = places(up, sum_up, down, sum_down, base, total, POINTS)
        slot = counts + (step - 1) * 3 * POINTS + tl.arange(0, POINTS)
        units, after, before = tl.load(slot), tl.load(slot + POINTS), tl.load(slot + 2 * POINTS)
        up, sum_up, down, sum_down = narrow(up, sum_up, down, sum_down, total, place, units, after, before)
        taken += 1
    return up, sum_up, down, sum_down, base, taken


@triton.jit(do_not_specialize=["level_size"])
def reset_kernel(counts, levels, level_size, STEPS: tl.constexpr, POINTS: tl.constexpr, BLOCK: tl.constexpr):
    """Counts before anything is counted: [STEPS + 1, 3, POINTS] and, of the levels, [level_size]."""
    at = tl.arange(0, BLOCK)
    kind = (at // POINTS) % 3
    start = tl.where(kind == 0, 0, tl.where(kind == 1, LOWEST, HIGHEST))
    tl.store(counts + at, start, mask=at < (STEPS + 1) * 3 * POINTS)
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
    begin, end = own_rows(size, chunk)
    largest, smallest, finite = prepare_rows(
        p_pointer, p_exponent, q_exponent, log_scale, rate, p_step, q_step, scale_step, rate_step,
        scratch, size, begin, end, low.to(tl.float64), high.to(tl.float64), SATURATION, DEVICE, STEEP, BLOCK,
    )  # fmt: skip
    tl.atomic_max(counts + POINTS, ordinal(largest))
    tl.atomic_min(counts + 2 * POINTS, ordinal(smallest))
    tl.atomic_min(counts + 2 * POINTS + 1, ordinal(finite))


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
    """Step number `step`, from 1: finds the bracket, stores it, and counts at its places. Closed: returns."""
    size = size.to(tl.int64)
    total = total.to(tl.int64)
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
        place = places(up, sum_up, down, sum_down, base, total, POINTS)
        begin, end = own_rows(size, chunk)
        units, after, before = count_rows(
            place, scratch, size, begin, end, low.to(tl.float64), high.to(tl.float64), digits, SATURATION, POINTS, BLOCK
        )
        slot = counts + step * 3 * POINTS + tl.arange(0, POINTS)
        tl.atomic_add(slot, units)
        tl.atomic_max(slot + POINTS, after)
        tl.atomic_min(slot + 2 * POINTS, before)


@triton.jit(do_not_specialize=["size", "low", "high", "total", "digits", "step"])
def close_kernel(
    scratch,
    state,
    counts,
    steps_out,
    size,
    low,
    high,
    total,
    digits,
    step,
    SATURATION: tl.constexpr,
    POINTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: stores the bracket at `step`, after closing it if it is still open."""
    size = size.to(tl.int64)
    total = total.to(tl.int64)
    up, sum_up, down, sum_down, base, taken = bracket_after(state, counts, step, total, POINTS)
    while is_open(up, sum_up, down, total):
        taken += 1
        place = places(up, sum_up, down, sum_down, base, total, POINTS)
        units, after, before = count_rows(
            place, scratch, size, size * 0, size, low.to(tl.float64), high.to(tl.float64), digits,
            SATURATION, POINTS, BLOCK,
        )  # fmt: skip
        up, sum_up, down, sum_down = narrow(up, sum_up, down, sum_down, total, place, units, after, before)
    store_bracket(state, step, up, sum_up, down, sum_down, base, taken)
    tl.store(steps_out, taken.to(tl.int32))


@triton.jit(do_not_specialize=["size", "low", "high", "total", "digits", "chunk", "step"])
def settle_kernel(
    scratch,
    state,
    budgets,
    size,
    low,
    high,
    total,
    digits,
    chunk,
    step,
    SATURATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Budgets with every unit above the cut; if there are ties, those with the units at the cut into scratch."""
    size = size.to(tl.int64)
    ties = tl.load(state + step * BRACKET + SUM_UP) != total
    begin, end = own_rows(size, chunk)
    settle_rows(
        tl.load(state + step * BRACKET + UP), ties, scratch, budgets, size, begin, end,
        low.to(tl.float64), high.to(tl.float64), digits, SATURATION, BLOCK,
    )  # fmt: skip


@triton.jit
def level_after(state, levels, step, rounds, low, high, total, POINTS: tl.constexpr):
    """(level, top, units over) after the first `rounds` rounds of the search for the level."""
    level = low.to(tl.int64)
    top = high.to(tl.int64)
    spare = total - tl.load(state + step * BRACKET + SUM_UP)
    for i in range(0, rounds):
        if level < top:
            filled = tl.load(levels + i * POINTS + tl.arange(0, POINTS))
            level, top, spare = narrow_level(
                level, top, spare, total, trial_levels(level, top, POINTS), filled
            )
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
    """The budgets in all when prompts are filled to each of POINTS levels, added to levels[done]."""
    size = size.to(tl.int64)
    total = total.to(tl.int64)
    if tl.load(state + step * BRACKET + SUM_UP) != total:
        level, top, _ = level_after(state, levels, step, done, low, high, total, POINTS)
        if level < top:
            begin, end = own_rows(size, chunk)
            units = level_rows(
                trial_levels(level, top, POINTS), scratch, budgets, size, begin, end, POINTS, BLOCK
            )
            tl.atomic_add(levels + done * POINTS + tl.arange(0, POINTS), units)


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
    """How many prompts of each program stand at the level and could take one unit more, [programs]."""
    size = size.to(tl.int64)
    total = total.to(tl.int64)
    if tl.load(state + step * BRACKET + SUM_UP) != total:
        level, _, _ = level_after(state, levels, step, rounds, low, high, total, POINTS)
        begin, end = own_rows(size, chunk)
        tl.store(waiting_out + tl.program_id(0), waiting_rows(level, scratch, budgets, size, begin, end, BLOCK))


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
        begin, end = own_rows(size, chunk)
        share_rows(level, spare, scratch, budgets, size, begin, end, BLOCK)


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

    chunk = triton.cdiv(triton.cdiv(size, block), PROGRAMS) * block
    grid = (triton.cdiv(size, chunk),)
    rounds, last = level_rounds(low, high), STEPS + 1
    parts = [(last + 1) * int(BRACKET.value), last * 3 * POINTS, max(rounds, 1) * POINTS, PROGRAMS]
    state, counts, levels, waiting = torch.empty(sum(parts), dtype=torch.int64, device=p.device).split(parts)
    reset_kernel[(1,)](
        counts, levels, parts[2], STEPS=STEPS, POINTS=POINTS, BLOCK=triton.next_power_of_2(max(parts[1:3]))
    )
    prepare_kernel[grid](p, *given.values, *given.steps, scratch, counts, size, low, high, chunk, **form, **search)
    lines: dict[str, Any] = {"SATURATION": source.saturation, **search}
    for step in range(1, last):
        step_kernel[grid](
            scratch, state, counts, size, low, high, total, digits, chunk, step, FIRST=step == 1, **lines
        )
    close_kernel[(1,)](scratch, state, counts, steps_out, size, low, high, total, digits, last, **lines)
    del lines["POINTS"]
    settle_kernel[grid](scratch, state, budgets, size, low, high, total, digits, chunk, last, **lines)
    ends = (size, low, high, total, chunk, last)
    for done in range(rounds):
        level_kernel[grid](scratch, state, levels, budgets, *ends, done, **search)
    waiting_kernel[grid](scratch, state, levels, budgets, waiting, *ends, rounds, **search)
    share_kernel[grid](scratch, state, levels, budgets, waiting, *ends, rounds, PROGRAMS=PROGRAMS, **search)
    return budgets
