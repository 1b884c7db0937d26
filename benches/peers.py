"""What one would use instead of coba_core, each written as its users have it.

All take (pass_rates, alpha, beta, tau, low, high, total) of the capability value and return budgets, [M]. They subtract
values where ours compares log gains, so their answers may differ where gains tie within rounding; the benches compare
the total value.
"""

from __future__ import annotations

import heapq
import math

import numba
import numpy as np
import numpy.typing as npt
from scipy import optimize, stats

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def value(budget: float, p: float, density: float, tau: float) -> float:
    return density * (1.0 - math.exp(-budget * p * (1.0 - p) / tau))


def python_heap(p: Floats, alpha: float, beta: float, tau: float, low: int, high: int, total: int) -> Ints:
    """2602.03048 Algorithm 1 as the paper prints it: heapq, the value evaluated twice a unit."""
    budgets = [low] * len(p)
    densities = stats.beta.pdf(p, alpha, beta).tolist()
    rates = p.tolist()

    def gain(i: int) -> float:
        return value(budgets[i] + 1, rates[i], densities[i], tau) - value(budgets[i], rates[i], densities[i], tau)

    heap = [(-gain(i), i) for i in range(len(p))]
    heapq.heapify(heap)
    for _ in range(total - low * len(p)):
        _, i = heapq.heappop(heap)
        budgets[i] += 1
        if budgets[i] < high:
            heapq.heappush(heap, (-gain(i), i))
    return np.array(budgets)


def released_heap(p: Floats, alpha: float, beta: float, tau: float, low: int, high: int, total: int) -> Ints:
    """The same, with the Beta density evaluated again at every push, as the released recipe does."""
    budgets = [low] * len(p)
    rates = p.tolist()
    scale = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)

    def density(x: float) -> float:
        return math.exp(scale + (alpha - 1.0) * math.log(x) + (beta - 1.0) * math.log1p(-x)) if 0.0 < x < 1.0 else 0.0

    def gain(i: int) -> float:
        x = rates[i]
        return value(budgets[i] + 1, x, density(x), tau) - value(budgets[i], x, density(x), tau)

    heap = [(-gain(i), i) for i in range(len(p))]
    heapq.heapify(heap)
    for _ in range(total - low * len(p)):
        _, i = heapq.heappop(heap)
        budgets[i] += 1
        if budgets[i] < high:
            heapq.heappush(heap, (-gain(i), i))
    return np.array(budgets)


@numba.njit
def _numba_heap(gains: Floats, rates: Floats, low: int, high: int, total: int) -> Ints:
    budgets = np.full(len(gains), low)
    heap = [(-gains[i], i) for i in range(len(gains))]
    heapq.heapify(heap)
    for _ in range(total - low * len(gains)):
        _, i = heapq.heappop(heap)
        budgets[i] += 1
        if budgets[i] < high:
            heapq.heappush(heap, (-gains[i] * math.exp(-rates[i] * (budgets[i] - low)), i))
    return budgets


def numba_heap(p: Floats, alpha: float, beta: float, tau: float, low: int, high: int, total: int) -> Ints:
    """heapq compiled by Numba, with the gain's geometric form: one exponential a push."""
    return _numba_heap(marginal_gains(p, alpha, beta, tau, low), p * (1.0 - p) / tau, low, high, total)


def marginal_gains(p: Floats, alpha: float, beta: float, tau: float, budgets: Ints | int) -> Floats:
    """One NumPy evaluation of every prompt's next gain: what a vectorised program pays before it decides anything."""
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = math.lgamma(alpha + beta) - math.lgamma(alpha) - math.lgamma(beta)
        k = p * (1.0 - p) / tau
        log_density = scale + (alpha - 1.0) * np.log(p) + (beta - 1.0) * np.log1p(-p)
        return np.exp(log_density - k * budgets) * -np.expm1(-k)


def argpartition(p: Floats, alpha: float, beta: float, tau: float, low: int, high: int, total: int) -> Ints:
    """All gains in one table, the largest picked by NumPy's partition."""
    k = (p * (1.0 - p) / tau)[:, None]
    gains = marginal_gains(p, alpha, beta, tau, low)[:, None] * np.exp(-k * np.arange(high - low))
    spare = total - low * len(p)
    chosen = np.argpartition(gains.ravel(), gains.size - spare)[gains.size - spare :]
    return low + np.bincount(chosen // (high - low), minlength=len(p))


def linear_program(p: Floats, alpha: float, beta: float, tau: float, low: int, high: int, total: int) -> Ints:
    """SciPy's HiGHS on the units as variables in [0, 1]: whole numbers come out, as gains fall."""
    k = (p * (1.0 - p) / tau)[:, None]
    gains = marginal_gains(p, alpha, beta, tau, low)[:, None] * np.exp(-k * np.arange(high - low))
    result = optimize.linprog(
        -gains.ravel(), A_eq=np.ones((1, gains.size)), b_eq=[total - low * len(p)], bounds=(0.0, 1.0), method="highs"
    )
    return low + np.rint(result.x).astype(np.int64).reshape(gains.shape).sum(axis=1)


def python_dp(p: Floats, alpha: float, beta: float, tau: float, low: int, high: int, total: int) -> Ints:
    """Multiple-choice knapsack by dynamic programming in plain Python: O(M R W)."""
    densities = stats.beta.pdf(p, alpha, beta).tolist()
    spare, width = total - low * len(p), high - low
    best = [0.0] + [-math.inf] * spare
    choices = []
    for x, density in zip(p.tolist(), densities, strict=True):
        worth = [value(low + b, x, density, tau) for b in range(width + 1)]
        following, choice = [], []
        for r in range(spare + 1):
            top, taken = -math.inf, 0
            for b in range(min(width, r) + 1):
                trial = best[r - b] + worth[b]
                if trial > top:
                    top, taken = trial, b
            following.append(top)
            choice.append(taken)
        best = following
        choices.append(choice)
    budgets = []
    for choice in reversed(choices):
        budgets.append(low + choice[spare])
        spare -= choice[spare]
    return np.array(budgets[::-1])
