"""E3's budgets: harder prompts, by rank, get more, in a window that widens with every pass (2505.18573 Algorithm 1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from coba_core.allocate import BudgetError
from coba_core.allocators import Allocator, PromptIds
from coba_core.history import PromptId, checked_rows, prompt_keys
from coba_core.kernels.numpy_backend import Floats, Ints
from coba_core.state import State, finite_number, whole_number

LARGEST_DENOMINATOR = 2**25
"""A float in `rank` stands for the nearest fraction with at most this denominator, see :func:`rank_budgets`."""


def _numerators(rank: Any) -> list[int]:
    """`rank` over a common denominator, as exact integers."""
    values = rank.tolist() if hasattr(rank, "tolist") else list(rank)
    if all(type(x) is int and x >= 0 for x in values):
        return values
    fractions = []
    for i, x in enumerate(values):
        try:
            k = Fraction(x)
        except (TypeError, ValueError, OverflowError, ZeroDivisionError) as error:
            raise ValueError(f"rank[{i}] is {x!r}, not a finite number") from error
        if k < 0:
            raise ValueError(f"rank[{i}] is {x!r}, which must not be negative")
        fractions.append(k.limit_denominator(LARGEST_DENOMINATOR) if isinstance(x, float) else k)
    scale = math.lcm(*(k.denominator for k in fractions))
    return [k.numerator * (scale // k.denominator) for k in fractions]


def rank_budgets(
    rank: Sequence[float | str | Fraction] | npt.NDArray[Any], total_budget: int, low: int, high: int
) -> Ints:
    """Bᵢ = min(low + ⌊(total - M low) kᵢ / Σk⌋, high), and what is left goes to the largest k first, up to high.

    rank: difficulty kᵢ >= 0, [M], 0 the easiest; only ratios matter. Equal k get equal budgets up to one, the lower
    index first; all 0 (no rank known) is an even split. Returns int64 [M], adding up to total_budget.

    The floor is exact: k may be integers, fractions, or strings such as "3/8"; a float, which cannot hold ``j/|D|``,
    is taken for the nearest fraction with a denominator of at most 2²⁵ = 33,554,432, which recovers every ``j/|D|`` and
    every tie ``(j+½)/|D|`` for up to 2²⁴ prompts. Time: about half a microsecond a prompt for integers, ten for floats.

    Raises BudgetError if no budgets in [low, high] have that total, ValueError for a k that is negative or not finite.
    2505.18573 Algorithm 1; as published it may pass `high`, here that share goes to the next k.

    >>> rank_budgets([0, 0, 0, 0.75], 32, 4, 12)
    array([ 7,  7,  6, 12])
    """
    total_budget = whole_number("total_budget", total_budget)
    low, high = whole_number("low", low), whole_number("high", high)
    if low < 0 or low > high:
        raise ValueError(f"low is {low} and high is {high}: 0 <= low <= high does not hold")
    k = _numerators(rank)
    prompts = len(k)
    if not prompts * low <= total_budget <= prompts * high:
        raise BudgetError(
            f"total_budget is {total_budget}; {prompts} prompts with budgets in [{low}, {high}] take "
            f"from {prompts * low} to {prompts * high}"
        )
    spare, whole = total_budget - prompts * low, max(sum(k), 1)
    budgets = [min(low + spare * ki // whole, high) for ki in k]
    left = total_budget - sum(budgets)
    equal: dict[int, list[int]] = {}
    for i, ki in enumerate(k):
        equal.setdefault(ki, []).append(i)
    for ki in sorted(equal, reverse=True):
        if not left:
            break
        group = equal[ki]
        given = min(left, len(group) * (high - budgets[group[0]]))
        each, rest = divmod(given, len(group))
        for place, i in enumerate(group):
            budgets[i] += each + (place < rest)
        left -= given
    return np.array(budgets, dtype=np.int64)


def doubled_ranks(mean_rewards: Floats) -> Ints:
    """Twice the rank by descending mean reward, 0 the easiest, ties sharing the mean of their ranks: integers, [D].

    Means that agree to twelve decimals are ties.

    >>> doubled_ranks(np.array([0.5, 1.0, 0.5, 0.0]))
    array([3, 0, 3, 6])
    """
    with np.errstate(over="ignore"):
        rounded = np.round(mean_rewards, 12)
    rounded = np.where(np.isfinite(rounded), rounded, mean_rewards)  # too large to have decimals
    _, place, count = np.unique(-rounded, return_inverse=True, return_counts=True)
    first = np.cumsum(count) - count
    return np.asarray((2 * first + count - 1)[place], dtype=np.int64)


class RankAllocator(Allocator):
    """E3: budgets by difficulty rank over the whole data set, in a window that widens pass by pass (2505.18573).

    k of a prompt is its rank by descending mean reward (of all its rollouts so far) among all prompts seen; ties share
    their mean rank. Ranks are renewed at the end of a pass, and until the first such end budgets are even. A prompt
    without a rank then is put at the middle of those that have one.

    Window: [max(low, n - e step), min(high, n + e step)] after e passes. n = `start`, or, if it is None, the step's own
    mean budget (rounded down below, up above), so that any total within [M low, M high] can be spent.
    ``RankAllocator(start=8, low=4, high=12)`` is the paper's.

    The end of a pass, one of three rules:

    - `dataset_size` given: when that many prompts have been visited (a prompt twice in a step is one visit). The
      rest of a step that goes beyond counts for the next pass.
    - `refresh_every` given: after every so many steps, whatever they held.
    - neither: when a step brings a prompt that the pass has had before. That step is the first of the next pass. Right
      for data visited in epochs; for prompts drawn with replacement give one of the two numbers.

    metrics also hold `passes`, `window_low`, `window_high`, `share_ranked` (of the step's prompts) and `rank_mean`,
    their mean rank as a share of the ranked prompts.

    >>> allocator = RankAllocator(step=2, high=9)
    >>> prompts = [0, 1, 2, 3, 4, 5]
    >>> allocator.update(prompts, rewards=[1.0, 1.0, 0.8, 0.5, 0.5, 0.0], rows=prompts)
    >>> allocator.allocate(prompts, 48)  # a second visit: the first pass is over
    array([6, 6, 9, 9, 9, 9])
    """

    kind = "RankAllocator"

    def __init__(
        self,
        *,
        step: int = 2,
        start: int | None = None,
        dataset_size: int | None = None,
        refresh_every: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.step = whole_number("step", step, at_least=0)
        if start is not None and not self.low <= whole_number("start", start) <= self.high:
            raise ValueError(f"start is {start}, not in [low, high] = [{self.low}, {self.high}]")
        for name, size in (("dataset_size", dataset_size), ("refresh_every", refresh_every)):
            if size is not None:
                whole_number(name, size, at_least=1)
        if dataset_size is not None and refresh_every is not None:
            raise ValueError(f"dataset_size is {dataset_size} and refresh_every is {refresh_every}: give one of them")
        self.start, self.dataset_size, self.refresh_every = start, dataset_size, refresh_every
        self._sums: dict[PromptId, float] = {}
        self._counts: dict[PromptId, int] = {}
        self._ranks: dict[PromptId, int] = {}
        self._passes = self._progress = 0
        self._pass_keys: set[PromptId] = set()
        self._rank_metrics: dict[str, float] = {}

    def allocate(self, prompt_ids: PromptIds, total_budget: int) -> Ints:
        before = self._ranks, self._passes, self._pass_keys
        self._begin_step(prompt_keys(prompt_ids))
        try:
            return super().allocate(prompt_ids, total_budget)
        except ValueError:  # refused, so the step has not begun
            self._ranks, self._passes, self._pass_keys = before
            raise

    def update(self, prompt_ids: PromptIds, rewards: Any, rows: Any) -> None:
        keys = prompt_keys(prompt_ids)
        reward, row = checked_rows(rewards, rows, len(keys))
        infinite = np.isinf(reward)
        if infinite.any():
            i = int(infinite.argmax())
            raise ValueError(f"rewards[{i}] is {reward[i]}, which has no mean")
        super().update(prompt_ids, reward, row)
        self._begin_step(keys)
        known = ~np.isnan(reward)
        sums = np.bincount(row[known], reward[known], len(keys)).tolist()
        counts = np.bincount(row[known], minlength=len(keys)).tolist()
        for key, total, count in zip(keys, sums, counts, strict=True):
            if count:
                self._sums[key] = self._sums.get(key, 0.0) + total
                self._counts[key] = self._counts.get(key, 0) + count
        self._count_step(keys)

    def _begin_step(self, keys: list[PromptId]) -> None:
        """Ends the pass if no size of it is given and this step repeats a prompt of it."""
        if self.dataset_size is None and self.refresh_every is None and not self._pass_keys.isdisjoint(keys):
            self._end_pass()
            self._pass_keys = set()

    def _count_step(self, keys: list[PromptId]) -> None:
        if self.dataset_size is None and self.refresh_every is None:
            self._pass_keys.update(keys)
            return
        self._progress += len(set(keys)) if self.refresh_every is None else 1
        size = self.dataset_size or self.refresh_every or 1
        if self._progress >= size:
            self._progress -= size
            self._end_pass()

    def _end_pass(self) -> None:
        means = np.array([total / self._counts[key] for key, total in self._sums.items()])
        self._ranks = dict(zip(self._sums, doubled_ranks(means).tolist(), strict=True))
        self._passes += 1

    def _bounds(self) -> tuple[int, int]:
        return (self.low, self.high) if self.start is None else self._window(self.start, self.start)

    def _window(self, floor: int, ceiling: int) -> tuple[int, int]:
        reach = self._passes * self.step
        return max(self.low, floor - reach), min(self.high, ceiling + reach)

    def _budgets(self, keys: list[PromptId], rates: Floats, raw: Floats, total: int) -> Ints:
        self._rank_metrics = {}
        if not keys:
            return np.empty(0, dtype=np.int64)
        if self.start is None:
            low, high = self._window(total // len(keys), -(-total // len(keys)))
        else:
            low, high = self._bounds()
        size = len(self._ranks)
        rank = [self._ranks.get(key, max(size - 1, 0)) for key in keys]
        self._rank_metrics = {
            "passes": float(self._passes),
            "window_low": float(low),
            "window_high": float(high),
            "share_ranked": sum(key in self._ranks for key in keys) / len(keys),
            "rank_mean": sum(rank) / (2.0 * max(size, 1) * len(keys)),
        }
        return rank_budgets(rank, total, low, high)

    def _metrics(self, budgets: Ints, raw: Floats) -> dict[str, float]:
        return {**super()._metrics(budgets, raw), **self._rank_metrics}

    def _rule_state(self) -> State:
        keys = list(self._sums)
        return {
            "keys": keys,
            "reward_sums": list(self._sums.values()),
            "reward_counts": [self._counts[key] for key in keys],
            "doubled_ranks": [self._ranks.get(key, -1) for key in keys],
            "passes": self._passes,
            "progress": self._progress,
            "pass_keys": sorted(self._pass_keys, key=lambda key: (isinstance(key, str), key)),
        }

    def _load_rule_state(self, state: State) -> None:
        where = f"state of {self.kind}"
        columns = ("keys", "reward_sums", "reward_counts", "doubled_ranks", "pass_keys")
        for name in columns:
            if not isinstance(state[name], list):
                raise ValueError(f"{where}: {name} is {state[name]!r}, not a list")
        keys, pass_keys = (prompt_keys(state[name], f"{where}: {name}") for name in ("keys", "pass_keys"))
        if len(set(keys)) != len(keys) or len(set(pass_keys)) != len(pass_keys):
            raise ValueError(f"{where}: keys or pass_keys holds a prompt twice")
        for name in columns[1:4]:
            if len(state[name]) != len(keys):
                raise ValueError(f"{where}: {name} has {len(state[name])} entries for {len(keys)} keys")
        sums = [finite_number(f"{where}: reward_sums[{i}]", x) for i, x in enumerate(state["reward_sums"])]
        for name, least in (("reward_counts", 1), ("doubled_ranks", -1)):
            for i, x in enumerate(state[name]):
                if type(x) is not int or not least <= x < 2**53 or (name == "doubled_ranks" and x > 2 * len(keys)):
                    raise ValueError(f"{where}: {name}[{i}] is {x!r}, not an integer from {least}")
        for name in ("passes", "progress"):
            if type(state[name]) is not int or not 0 <= state[name] < 2**53:
                raise ValueError(f"{where}: {name} is {state[name]!r}, not a count")
        self._sums = dict(zip(keys, sums, strict=True))
        self._counts = dict(zip(keys, state["reward_counts"], strict=True))
        ranks: list[int] = state["doubled_ranks"]
        self._ranks = {key: x for key, x in zip(keys, ranks, strict=True) if x >= 0}
        self._passes, self._progress, self._pass_keys = state["passes"], state["progress"], set(pass_keys)
