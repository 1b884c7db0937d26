"""How much an allocation can win on given pass rates, before anything is spent on it.

A rollout of prompt i with pass rate pᵢ is right with variance σᵢ² = pᵢ(1-pᵢ). Where prompts weigh the same and their
gradients have like norms, the policy gradient estimated from Bᵢ rollouts of each has a variance in proportion to
Σ σᵢ²/Bᵢ. Even budgets give M Σσᵢ²/total; the least possible is Neyman's, Bᵢ ∝ σᵢ, with (Σσᵢ)²/total. Their ratio,
E[σ²]/(E[σ])², is the headroom: with it, even budgets spend that many times the rollouts for the same noise. It bounds
rules that lower noise and keep every prompt's weight; a rule that shifts weight between prompts changes what is
learned, which no variance tells.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from coba_core.allocate import allocate
from coba_core.allocators import even_budgets
from coba_core.kernels.numpy_backend import Floats, Ints, first_invalid
from coba_core.rank import doubled_ranks, rank_budgets
from coba_core.schedules import CapabilitySchedule
from coba_core.state import whole_number
from coba_core.values import (
    BetaPreference,
    CapabilityValue,
    FirstSuccess,
    InverseVariance,
    KnapsackValue,
    MixedGroup,
    PowerPreference,
    Value,
)

Baseline = Literal["known", "leave_one_out"]


def _rates(pass_rates: npt.ArrayLike) -> Floats:
    p = np.asarray(pass_rates, dtype=np.float64)
    if p.ndim != 1 or not p.size:
        raise ValueError(f"pass_rates has shape {p.shape}, not [prompts] with at least one prompt")
    if (i := first_invalid(p)) >= 0:
        raise ValueError(f"pass_rates[{i}] is {p[i]}, not in [0, 1]")
    if not np.any((p > 0.0) & (p < 1.0)):
        raise ValueError("pass_rates: every rate is 0 or 1, so that no rollout carries a gradient; take other prompts")
    return p


def headroom(pass_rates: npt.ArrayLike) -> float:
    """E[σ²]/(E[σ])², σᵢ² = pᵢ(1-pᵢ): the most by which budgets can lower the gradient's variance below even ones'.

    pass_rates: [M], in [0, 1]. At least 1, which is where all σ are the same; budgets are free of bounds and need not
    be whole. ValueError names the first rate that is none, and refuses rates that are all 0 or 1. Neyman's allocation
    (1934), of rollouts to prompts.

    Rates estimated from n rollouts each are more often 0 or 1 than the true ones, and the headroom comes out too high.

    >>> headroom([0.5, 0.5])
    1.0
    >>> headroom([0.0, 0.5, 1.0, 0.5])
    2.0
    """
    p = _rates(pass_rates)
    variance = p * (1.0 - p)
    return float(variance.mean() / np.sqrt(variance).mean() ** 2)


def gradient_variance(pass_rates: npt.ArrayLike, budgets: npt.ArrayLike, *, baseline: Baseline = "known") -> float:
    """(1/M²) Σ pᵢ(1-pᵢ)/Bᵢ: variance of the mean over prompts of the unbiased gradient estimates, in units of a
    prompt's squared score.

    pass_rates: [M], in [0, 1]; budgets: integers [M]. baseline: "known" is what a reward minus the true pass rate
    has; "leave_one_out" is a reward minus the mean of the others in its group, which costs Bᵢ/(Bᵢ-1) more. A prompt
    with p = 0 or 1 adds nothing, whatever its budget. ValueError where another prompt's budget is below 1 (2 with
    "leave_one_out"): its gradient has no unbiased estimate.

    >>> gradient_variance([0.5, 0.5], [4, 4])
    0.03125
    >>> gradient_variance([0.5, 1.0], [7, 1])
    0.008928571428571428
    """
    p, b = np.asarray(pass_rates, dtype=np.float64), np.asarray(budgets)
    if p.ndim != 1 or p.shape != b.shape or not p.size:
        raise ValueError(f"pass_rates has shape {p.shape} and budgets {b.shape}: one number a prompt is needed")
    if (i := first_invalid(p)) >= 0:
        raise ValueError(f"pass_rates[{i}] is {p[i]}, not in [0, 1]")
    if b.dtype.kind not in "iu":
        raise ValueError(f"budgets has dtype {b.dtype}, not an integer one")
    if baseline not in ("known", "leave_one_out"):
        raise ValueError(f"baseline is {baseline!r}, not 'known' or 'leave_one_out'")
    spent = baseline == "leave_one_out"  # a rollout's worth of the group goes into its baseline
    mixed = (p > 0.0) & (p < 1.0)
    if np.any(short := mixed & (b <= spent)):
        i = int(short.argmax())
        raise ValueError(f"budgets[{i}] is {b[i]}, not at least {1 + spent}, with pass rate {p[i]}")
    kept = p[mixed]
    return float(np.sum(kept * (1.0 - kept) / (b[mixed] - spent)) / p.size**2)


def rule_budgets(pass_rates: npt.ArrayLike, total: int, *, low: int = 2, high: int = 128) -> dict[str, Ints]:
    """What each rule gives these prompts of one step, int64 [M] by name; every sum is `total`.

    pass_rates: [M], in [0, 1], taken as known; the rules that follow the policy's capability take 1 - their mean as its
    failure rate. BudgetError if no budgets in [low, high] have that total; low is at least 1.

    "neyman" has the least Σσ²/B within the bounds; "rank" is E3's Algorithm 1 within them.

    >>> rule_budgets([0.05, 0.5, 0.95], 24, low=2, high=16)["neyman"]
    array([ 6, 13,  5])
    """
    p = _rates(pass_rates)
    if low < 1:
        raise ValueError(f"low is {low}, not at least 1: a prompt without a rollout has no unbiased gradient")
    failure = 1.0 - float(p.mean())
    exploit, explore = CapabilitySchedule(), CapabilitySchedule(direction="explore_first")
    values: dict[str, Value] = {
        "neyman": Value(PowerPreference(), InverseVariance()),
        "coba": CapabilityValue(*exploit.at(failure)),
        "coba_explore_first": CapabilityValue(*explore.at(failure)),
        "fixed_easy": CapabilityValue(10.5, 1.5),
        "fixed_hard": CapabilityValue(1.5, 10.5),
        "knapsack": KnapsackValue(),
        **{f"mixed_g{g}": Value(PowerPreference(0.0, float(g)), MixedGroup()) for g in range(4)},
        "beta_mixed": Value(BetaPreference(*exploit.at(failure)), MixedGroup()),
        "first_success": Value(PowerPreference(), FirstSuccess()),
    }
    total = whole_number("total", total)
    budgets = {name: allocate(p, total, low=low, high=high, value=value) for name, value in values.items()}
    ranks = rank_budgets(doubled_ranks(p).tolist(), total, low, high)
    return {"uniform": even_budgets(len(p), total), **budgets, "rank": ranks}


def kept_headroom(
    pass_rates: npt.ArrayLike, total: int, *, low: int = 2, high: int = 128, baseline: Baseline = "known"
) -> dict[str, float]:
    """By rule, the variance of even budgets over the rule's: above 1 the rule has less noise, below 1 more.

    Exact at the whole budgets that each rule gives within [low, high] (:func:`rule_budgets`), with prompts weighted
    alike (:func:`gradient_variance`). With the known baseline no rule is above :func:`headroom` where total is a
    multiple of M.

    >>> kept = kept_headroom([0.0, 0.5, 1.0, 0.5], 64)
    >>> round(kept["uniform"], 2), round(kept["neyman"], 2)
    (1.0, 1.88)
    """
    p = _rates(pass_rates)
    rules = rule_budgets(p, total, low=low, high=high)
    even = gradient_variance(p, rules["uniform"], baseline=baseline)
    return {name: even / gradient_variance(p, budgets, baseline=baseline) for name, budgets in rules.items()}
