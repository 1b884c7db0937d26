"""Groups by id, repeated rows and pass-rate counts on a card. Nothing waits for it, nothing depends on its timing.

Rows are sorted once (stably, by torch); then a program owns a group, finds its run in the sorted rows by bisection, and
adds it up in float64 in a fixed order. No floating-point atomics: the same input gives the same bits on every run.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

from coba_core.kernels.triton_elementary import exp, log_beta
from coba_core.kernels.triton_gains import beside_its_tensors, bits, real
from coba_core.schedules import CapabilitySchedule

NAN = tl.constexpr(float("nan"))
INFINITY = tl.constexpr(float("inf"))

GROUP_BLOCK = 128  # rewards of a group that a program takes at once
SCALES = {"none": 0, "group": 1, "batch": 2}


# ---- device functions ------------------------------------------------------------------------------------------------


@triton.jit
def from_bits(x):
    """A float64 handed over as the integer of its bits."""
    return x.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def first_not_below(sorted_rows, size, key):
    """How many of the sorted rows are below the key."""
    low = size * 0
    high = size
    while low < high:
        middle = (low + high) // 2
        if tl.load(sorted_rows + middle) < key:
            low = middle + 1
        else:
            high = middle
    return low


@triton.jit
def success(reward, threshold, FRACTIONAL: tl.constexpr):
    """What a known reward counts as; a fraction is held within [0, 1]."""
    if FRACTIONAL:
        x = tl.where(reward > 0.0, reward, 0.0)
        return tl.where(x < 1.0, x, 1.0)
    else:
        return (reward >= threshold).to(tl.float64)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["size", "total"])
def repeat_kernel(ends, rows, size, total, BLOCK: tl.constexpr):
    """rows[r] = the first prompt i with ends[i] > r; ends int64 [M] are the running sums of the budgets."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    low = at * 0
    high = low + (size - 1)  # a total above the sum repeats the last prompt
    width = size - 1
    while width > 0:
        middle = (low + high) // 2
        beyond = tl.load(ends + middle) <= at
        open_ = low < high
        low = tl.where(open_ & beyond, middle + 1, low)
        high = tl.where(open_ & (beyond == 0), middle, high)
        width = width // 2
    tl.store(rows + at, low, mask=at < total)


@triton.jit(do_not_specialize=["size", "eps"])
def advantages_kernel(
    rewards, sorted_rows, order, batch_spread, out, size, eps, SCALE: tl.constexpr, BLOCK: tl.constexpr
):
    """Advantages of the group whose run begins at this program's place in the sorted rows; else nothing."""
    begin = tl.program_id(0).to(tl.int64)
    key = tl.load(sorted_rows + begin)
    before = tl.load(sorted_rows + begin - 1, mask=begin > 0, other=-1)
    if (begin == 0) | (before != key):
        end = first_not_below(sorted_rows, size.to(tl.int64), key + 1)
        largest = tl.full([BLOCK], -INFINITY, tl.float64)
        known_count = tl.zeros([BLOCK], tl.float64)
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = at < end
            reward = tl.load(rewards + tl.load(order + at, mask=mask, other=0), mask=mask, other=NAN).to(tl.float64)
            known_count += (reward == reward).to(tl.float64)
            largest = tl.where(reward > largest, reward, largest)
        count = tl.sum(known_count, 0)
        count = tl.where(count > 1.0, count, 1.0)
        shift = tl.max(largest, 0)  # a reward of the group: equal rewards centre to exact zeros
        shift = tl.where(shift > -INFINITY, shift, 0.0)
        partial = tl.zeros([BLOCK], tl.float64)
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = at < end
            reward = tl.load(rewards + tl.load(order + at, mask=mask, other=0), mask=mask, other=NAN).to(tl.float64)
            partial += tl.where(reward == reward, reward - shift, 0.0)
        mean = tl.sum(partial, 0) / count
        spread = count * 0.0 + 1.0
        if SCALE == 1:
            squares = tl.zeros([BLOCK], tl.float64)
            for start in range(begin, end, BLOCK):
                at = start + tl.arange(0, BLOCK)
                mask = at < end
                reward = tl.load(rewards + tl.load(order + at, mask=mask, other=0), mask=mask, other=NAN).to(tl.float64)
                centred = tl.where(reward == reward, (reward - shift) - mean, 0.0)
                squares += centred * centred
            spread = tl.sqrt(tl.sum(squares, 0) / tl.where(count > 1.0, count - 1.0, 1.0)) + from_bits(eps)
            spread = tl.where(spread > 0.0, spread, 1.0)
        elif SCALE == 2:
            spread = tl.load(batch_spread)
        for start in range(begin, end, BLOCK):
            at = start + tl.arange(0, BLOCK)
            mask = at < end
            place = tl.load(order + at, mask=mask, other=0)
            reward = tl.load(rewards + place, mask=mask, other=NAN).to(tl.float64)
            centred = tl.where(reward == reward, (reward - shift) - mean, 0.0)
            tl.store(out + place, (centred / spread).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size"])
def statistics_kernel(rewards, sorted_rows, order, counts, means, deviations, size, BLOCK: tl.constexpr):
    """Count, mean and standard deviation (ddof 1) of the known rewards of this program's group."""
    group = tl.program_id(0).to(tl.int64)
    begin = first_not_below(sorted_rows, size.to(tl.int64), group)
    end = first_not_below(sorted_rows, size.to(tl.int64), group + 1)
    largest = tl.full([BLOCK], -INFINITY, tl.float64)
    known_count = tl.zeros([BLOCK], tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        reward = tl.load(rewards + tl.load(order + at, mask=mask, other=0), mask=mask, other=NAN).to(tl.float64)
        known_count += (reward == reward).to(tl.float64)
        largest = tl.where(reward > largest, reward, largest)
    count = tl.sum(known_count, 0)
    shift = tl.max(largest, 0)
    shift = tl.where(shift > -INFINITY, shift, 0.0)
    partial = tl.zeros([BLOCK], tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        reward = tl.load(rewards + tl.load(order + at, mask=mask, other=0), mask=mask, other=NAN).to(tl.float64)
        partial += tl.where(reward == reward, reward - shift, 0.0)
    mean = tl.sum(partial, 0) / tl.where(count > 1.0, count, 1.0)
    squares = tl.zeros([BLOCK], tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        reward = tl.load(rewards + tl.load(order + at, mask=mask, other=0), mask=mask, other=NAN).to(tl.float64)
        centred = tl.where(reward == reward, (reward - shift) - mean, 0.0)
        squares += centred * centred
    tl.store(counts + group, count.to(tl.int64))
    tl.store(means + group, tl.where(count > 0.0, shift + mean, NAN))
    tl.store(deviations + group, tl.sqrt(tl.sum(squares, 0) / tl.where(count > 1.0, count - 1.0, 1.0)))


@triton.jit(do_not_specialize=["size", "threshold"])
def successes_kernel(
    rewards, sorted_rows, order, successes, counts, size, threshold, FRACTIONAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Successes and rollouts of the prompt at this program's position, NaN rewards left out."""
    position = tl.program_id(0).to(tl.int64)
    begin = first_not_below(sorted_rows, size.to(tl.int64), position)
    end = first_not_below(sorted_rows, size.to(tl.int64), position + 1)
    won = tl.zeros([BLOCK], tl.float64)
    tried = tl.zeros([BLOCK], tl.int64)
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        mask = at < end
        reward = tl.load(rewards + tl.load(order + at, mask=mask, other=0), mask=mask, other=NAN).to(tl.float64)
        known = reward == reward
        won += tl.where(known, success(reward, from_bits(threshold), FRACTIONAL), 0.0)
        tried += known.to(tl.int64)
    tl.store(successes + position, tl.sum(won, 0))
    tl.store(counts + position, tl.sum(tried, 0))


@triton.jit
def window_sum(table, key, WINDOW: tl.constexpr):
    """Σ of a row of a table [.., WINDOW], from the left."""
    total = tl.load(table + key * WINDOW)
    for i in tl.static_range(1, WINDOW):
        total += tl.load(table + key * WINDOW + i)
    return total


@triton.jit(do_not_specialize=["prompts", "size"])
def history_update_kernel(
    sorted_keys,
    order,
    successes,
    counts,
    kept_successes,
    kept_counts,
    visits,
    change,
    first_visit,
    prompts,
    size,
    WINDOW: tl.constexpr,
):
    """One visit of the prompt whose run of equal keys begins at this program's place; its counts are pooled.

    change, first_visit: float64 and int64 [M], what the visit adds to the sum of raw rates and to the prompts seen.
    Keys outside [0, size) are left out.
    """
    begin = tl.program_id(0).to(tl.int64)
    key = tl.load(sorted_keys + begin)
    before = tl.load(sorted_keys + begin - 1, mask=begin > 0, other=-1)
    gained = tl.full([], 0.0, tl.float64)
    new = begin * 0
    if ((begin == 0) | (before != key)) & (key >= 0) & (key < size):
        end = first_not_below(sorted_keys, prompts.to(tl.int64), key + 1)
        won = gained
        tried = new
        for at in range(begin, end):
            position = tl.load(order + at)
            won += tl.load(successes + position)
            tried += tl.load(counts + position)
        if tried > 0:
            visit = tl.load(visits + key)
            old_won = window_sum(kept_successes, key, WINDOW)
            old_tried = window_sum(kept_counts, key, WINDOW)
            slot = key * WINDOW + visit % WINDOW
            leaving_won = tl.load(kept_successes + slot)
            leaving_tried = tl.load(kept_counts + slot)
            tl.store(kept_successes + slot, won)
            tl.store(kept_counts + slot, tried)
            tl.store(visits + key, visit + 1)
            old = tl.where(old_tried > 0, old_won / tl.where(old_tried > 0, old_tried, 1).to(tl.float64), 0.0)
            now = ((old_won - leaving_won) + won) / ((old_tried - leaving_tried) + tried).to(tl.float64)
            gained = now - old
            new = (visit == 0).to(tl.int64)
    tl.store(change + begin, gained)
    tl.store(first_visit + begin, new)


@triton.jit(do_not_specialize=["prompts", "size", "strength"])
def history_rates_kernel(
    keys,
    kept_successes,
    kept_counts,
    rate_sum,
    seen,
    estimates,
    raw,
    prompts,
    size,
    strength,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """[M] (s + m S)/(n + m), and s/n (NaN for a prompt never seen)."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < prompts
    key = tl.load(keys + at, mask=mask, other=-1)
    inside = (key >= 0) & (key < size)
    won = tl.zeros([BLOCK], tl.float64)
    tried = tl.zeros([BLOCK], tl.int64)
    for i in tl.static_range(WINDOW):
        won += tl.load(kept_successes + key * WINDOW + i, mask=inside, other=0.0)
        tried += tl.load(kept_counts + key * WINDOW + i, mask=inside, other=0)
    known = tl.load(seen)
    mean = tl.load(rate_sum) / tl.where(known > 0, known, 1).to(tl.float64)
    mean = tl.where(mean > 0.0, mean, 0.0)
    mean = tl.where(mean < 1.0, mean, 1.0)
    mean = tl.where(known > 0, mean, 0.5)
    m = from_bits(strength)
    n = tl.where(tried > 0, tried, 1).to(tl.float64)
    tl.store(estimates + at, tl.where(tried > 0, (won + m * mean) / (n + m), mean), mask=mask)
    tl.store(raw + at, tl.where(tried > 0, won / n, NAN), mask=mask)


@triton.jit(do_not_specialize=["prompts"])
def failure_rate_kernel(successes, counts, failures, updates, prompts, WINDOW: tl.constexpr, BLOCK: tl.constexpr):
    """failures[updates % WINDOW] = 1 - the mean pass rate of the prompts with rollouts; none had any: nothing."""
    rates = tl.zeros([BLOCK], tl.float64)
    visited = tl.zeros([BLOCK], tl.float64)
    for start in range(0, prompts, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tried = tl.load(counts + at, mask=at < prompts, other=0)
        won = tl.load(successes + at, mask=at < prompts, other=0.0)
        some = tried > 0
        rates += tl.where(some, won / tl.where(some, tried, 1).to(tl.float64), 0.0)
        visited += some.to(tl.float64)
    n = tl.sum(visited, 0)
    if n > 0.0:
        failure = 1.0 - tl.sum(rates, 0) / n
        failure = tl.where(failure > 0.0, failure, 0.0)
        failure = tl.where(failure < 1.0, failure, 1.0)
        done = tl.load(updates)
        tl.store(failures + done % WINDOW, failure)
        tl.store(updates, done + 1)


@triton.jit(
    do_not_specialize=["kappa", "lam", "gamma", "alpha_min", "alpha_max", "log_scale", "rate", "q_shift"]
)
def capability_kernel(
    failures,
    updates,
    numbers,
    kappa,
    lam,
    gamma,
    alpha_min,
    alpha_max,
    log_scale,
    rate,
    q_shift,
    EXPLORE: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """numbers float64 [8]: the form's four (all 0 while no failure rate is known), α, β, the mean failure rate, known.

    F̃ = F̄ if F̄ > ½, else σ(γ(F̄ - ½)); α = clip(α_min + λ F̃, α_min, α_max); β = κ - α (2602.03048 eqs. 5-7).
    """
    done = tl.load(updates)
    at = tl.arange(0, BLOCK)
    kept = tl.where(done < WINDOW, done, WINDOW)
    count = tl.where(kept > 0, kept, 1).to(tl.float64)
    mean = tl.sum(tl.load(failures + at, mask=at < kept, other=0.0), 0) / count
    shaped = 1.0 / (1.0 + exp(-(from_bits(gamma) * (mean - 0.5))))
    shaped = tl.where(mean > 0.5, mean, shaped)
    alpha = from_bits(alpha_min) + from_bits(lam) * shaped
    alpha = tl.where(alpha > from_bits(alpha_min), alpha, from_bits(alpha_min))
    alpha = tl.where(alpha < from_bits(alpha_max), alpha, from_bits(alpha_max))
    beta = from_bits(kappa) - alpha
    if EXPLORE:
        first = beta
        second = alpha
    else:
        first = alpha
        second = beta
    known = done > 0
    tl.store(numbers, tl.where(known, (first - 1.0) + 1.0, 0.0))
    tl.store(numbers + 1, tl.where(known, (second - 1.0) + from_bits(q_shift), 0.0))
    tl.store(numbers + 2, tl.where(known, log_beta(first, second) + from_bits(log_scale), 0.0))
    tl.store(numbers + 3, tl.where(known, from_bits(rate), 0.0))
    tl.store(numbers + 4, first)
    tl.store(numbers + 5, second)
    tl.store(numbers + 6, mean)
    tl.store(numbers + 7, known.to(tl.float64))


# ---- calls -----------------------------------------------------------------------------------------------------------


@beside_its_tensors
def repeat_index(budgets: torch.Tensor, total: int) -> torch.Tensor:
    """[0]*B₀ + [1]*B₁ + ..., int64 [total]. total must be the sum of the budgets; it is not checked."""
    ends = torch.cumsum(budgets.to(torch.int64), 0).contiguous()
    rows = torch.empty(total, dtype=torch.int64, device=budgets.device)
    if total and budgets.numel():
        repeat_kernel[(triton.cdiv(total, 1024),)](ends, rows, budgets.numel(), total, BLOCK=1024)
    return rows


@beside_its_tensors
def group_advantages(rewards: torch.Tensor, rows: torch.Tensor, scale: str, eps: float) -> torch.Tensor:
    """Advantages by group id, [R], in the rewards' floating dtype: see :func:`coba_core.group_advantages`."""
    dtype = rewards.dtype if rewards.dtype.is_floating_point else torch.float32
    reward = real(rewards)
    wide = torch.empty_like(reward)
    if not reward.numel():
        return wide.to(dtype)
    sorted_rows, order = torch.sort(rows, stable=True)
    spread = reward
    if scale == "batch":
        known = ~torch.isnan(reward)
        n = known.sum().double()
        value = torch.where(known, reward.double(), 0.0)
        mean = value.sum() / n.clamp(min=1.0)
        square = torch.where(known, value - mean, 0.0).square().sum() / (n - 1.0).clamp(min=1.0)
        spread = square.sqrt() + eps
        spread = torch.where(spread > 0.0, spread, 1.0)
    advantages_kernel[(reward.numel(),)](
        reward, sorted_rows, order, spread, wide, reward.numel(), bits(eps),
        SCALE=SCALES[scale], BLOCK=GROUP_BLOCK, num_warps=1,
    )  # fmt: skip
    return wide.to(dtype)


@beside_its_tensors
def group_statistics(
    rewards: torch.Tensor, rows: torch.Tensor, groups: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(count int64, mean float64, std float64 with ddof 1) of each group 0 .. groups-1, [groups], NaN rewards left out.

    A group with no known reward has mean NaN; one of one, std 0.
    """
    counts = torch.empty(groups, dtype=torch.int64, device=rewards.device)
    means, deviations = (torch.empty(groups, dtype=torch.float64, device=rewards.device) for _ in range(2))
    sorted_rows, order = torch.sort(rows, stable=True)
    if groups:
        statistics_kernel[(groups,)](
            real(rewards), sorted_rows, order, counts, means, deviations, rewards.numel(),
            BLOCK=GROUP_BLOCK, num_warps=1,
        )  # fmt: skip
    return counts, means, deviations


@beside_its_tensors
def success_counts(
    rewards: torch.Tensor, rows: torch.Tensor, prompts: int, threshold: float, fractional: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(successes float64, rollouts int64), [prompts]: of the rewards [R] whose row is each position."""
    successes = torch.empty(prompts, dtype=torch.float64, device=rewards.device)
    counts = torch.empty(prompts, dtype=torch.int64, device=rewards.device)
    sorted_rows, order = torch.sort(rows, stable=True)
    if prompts:
        successes_kernel[(prompts,)](
            real(rewards), sorted_rows, order, successes, counts, rewards.numel(), bits(threshold),
            FRACTIONAL=fractional, BLOCK=GROUP_BLOCK, num_warps=1,
        )  # fmt: skip
    return successes, counts


@beside_its_tensors
def history_update(
    keys: torch.Tensor,
    successes: torch.Tensor,
    counts: torch.Tensor,
    kept_successes: torch.Tensor,
    kept_counts: torch.Tensor,
    visits: torch.Tensor,
    rate_sum: torch.Tensor,
    seen: torch.Tensor,
) -> None:
    """One visit of each prompt with counts above 0, in place; equal keys [M] are pooled.

    kept_successes float64, kept_counts int64 [size, window], visits int64 [size]: the windows; rate_sum float64 [1],
    seen int64 [1]: Σ of the raw rates, and how many prompts have one.
    """
    prompts = keys.numel()
    if not prompts:
        return
    sorted_keys, order = torch.sort(keys, stable=True)
    change = torch.empty(prompts, dtype=torch.float64, device=keys.device)
    first_visit = torch.empty(prompts, dtype=torch.int64, device=keys.device)
    history_update_kernel[(prompts,)](
        sorted_keys, order, successes, counts, kept_successes, kept_counts, visits, change, first_visit,
        prompts, visits.numel(), WINDOW=kept_counts.shape[1], num_warps=1,
    )  # fmt: skip
    rate_sum += change.sum()
    seen += first_visit.sum()


@beside_its_tensors
def history_rates(
    keys: torch.Tensor,
    kept_successes: torch.Tensor,
    kept_counts: torch.Tensor,
    rate_sum: torch.Tensor,
    seen: torch.Tensor,
    strength: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(estimated, raw) pass rates of the keys, float64 [M] each; raw is NaN for a prompt never seen."""
    estimates, raw = (torch.empty(keys.numel(), dtype=torch.float64, device=keys.device) for _ in range(2))
    if keys.numel():
        history_rates_kernel[(triton.cdiv(keys.numel(), 256),)](
            keys, kept_successes, kept_counts, rate_sum, seen, estimates, raw, keys.numel(), kept_counts.shape[0],
            bits(strength), WINDOW=kept_counts.shape[1], BLOCK=256,
        )  # fmt: skip
    return estimates, raw


@beside_its_tensors
def observe_failure_rate(
    successes: torch.Tensor, counts: torch.Tensor, failures: torch.Tensor, updates: torch.Tensor
) -> None:
    """Puts 1 - the mean pass rate of a step into the ring `failures` float64 [window]; updates int64 [1] counts."""
    failure_rate_kernel[(1,)](
        successes, counts, failures, updates, counts.numel(), WINDOW=failures.numel(), BLOCK=1024
    )


@beside_its_tensors
def capability_numbers(
    failures: torch.Tensor,
    updates: torch.Tensor,
    schedule: CapabilitySchedule,
    log_scale: float,
    rate: float,
    q_shift: float,
) -> torch.Tensor:
    """The form of the schedule's Beta preference times a saturation, from failure rates on the card, float64 [8].

    The four numbers of the form (with log_scale added, q_shift added to β - 1), then α, β, the mean failure rate and
    whether one is known; the form's are 0 while none is, so that all prompts gain alike.
    """
    numbers = torch.empty(8, dtype=torch.float64, device=failures.device)
    given = (schedule.kappa, schedule.lam, schedule.gamma, schedule.alpha_min, schedule.alpha_max)
    capability_kernel[(1,)](
        failures, updates, numbers, *(bits(x) for x in (*given, log_scale, rate, q_shift)),
        EXPLORE=schedule.direction == "explore_first", WINDOW=failures.numel(),
        BLOCK=triton.next_power_of_2(failures.numel()), num_warps=1,
    )  # fmt: skip
    return numbers
