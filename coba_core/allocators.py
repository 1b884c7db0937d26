"""Allocators that keep the history: `allocate` before the rollouts of a step, `update` after their rewards."""

from __future__ import annotations

import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from coba_core.allocate import BudgetError, allocate
from coba_core.history import PassRateHistory, PromptId, checked_rows, prompt_keys
from coba_core.kernels.numpy_backend import Floats, Ints
from coba_core.schedules import CapabilitySchedule, Schedule
from coba_core.state import State, check_state, finite_number, read_state, whole_number, write_state
from coba_core.values import AnyValue, BetaPreference, Exponential, KnapsackValue, Saturation, Value

OnInfeasible = Literal["raise", "clip"]
PromptIds = Sequence[PromptId] | npt.NDArray[Any]

DIFFICULTY_CLASSES = ("unsolved", "hard", "medium", "easy", "solved")
"""Raw pass rate 0; up to 0.2; below 0.8; below 1; 1 (2602.03048 figure 7)."""


class BudgetWarning(UserWarning):
    """One prompt may take more than a fifth of a step's rollouts."""


def difficulty_class(pass_rates: Floats) -> Ints:
    """Index into DIFFICULTY_CLASSES of each raw pass rate, [M]; -1 for NaN, a prompt never seen.

    >>> difficulty_class(np.array([0.0, 0.2, 0.5, 0.9, 1.0, np.nan]))
    array([ 0,  1,  2,  3,  4, -1])
    """
    p = pass_rates
    index = (p > 0.0).astype(np.int64) + (p > 0.2) + (p >= 0.8) + (p >= 1.0)
    return np.where(np.isnan(p), -1, index)


def even_budgets(prompts: int, total_budget: int) -> Ints:
    """The total split evenly; what does not divide goes to the first prompts, [M].

    >>> even_budgets(3, 8)
    array([3, 3, 2])
    """
    budgets = np.full(prompts, total_budget // max(prompts, 1), dtype=np.int64)
    budgets[: total_budget - int(budgets.sum())] += 1
    return budgets


class Allocator(ABC):
    """What every allocator does.

    low, high: bounds of a prompt's budget. history: the pass rates (its own unless given). on_infeasible: what to do
    with a total outside [M low, M high]: "raise" a BudgetError, or "clip" to the nearest feasible total and say so in
    `metrics["clipped"]`, rollouts added or taken.
    """

    kind: str
    concentrates: ClassVar[bool] = True
    """Whether one prompt may get many times another's budget, so that a `high` near the total is worth a warning."""

    def __init__(
        self,
        *,
        low: int = 2,
        high: int = 128,
        history: PassRateHistory | None = None,
        on_infeasible: OnInfeasible = "raise",
        solver: str = "auto",
        backend: str = "auto",
    ) -> None:
        low, high = whole_number("low", low), whole_number("high", high)
        if low < 0 or low > high:
            raise ValueError(f"low is {low} and high is {high}: 0 <= low <= high does not hold")
        if on_infeasible not in ("raise", "clip"):
            raise ValueError(f"on_infeasible is {on_infeasible!r}, not 'raise' or 'clip'")
        self.low, self.high = low, high
        self.history = PassRateHistory() if history is None else history
        self.on_infeasible = on_infeasible
        self.solver, self.backend = solver, backend
        self.metrics: dict[str, float] = {}
        self._warned = False

    def allocate(self, prompt_ids: PromptIds, total_budget: int) -> Ints:
        """Budgets of this step's prompts, int64 [M], adding up to total_budget."""
        keys = prompt_keys(prompt_ids)
        total_budget = whole_number("total_budget", total_budget)
        total = self._feasible(len(keys), total_budget)
        rates, raw = self.history.estimates(keys)
        budgets = self._budgets(keys, rates, raw, total)
        self.metrics = {**self._metrics(budgets, raw), "clipped": float(total - total_budget)}
        return budgets

    def _feasible(self, prompts: int, total_budget: int) -> int:
        """The total to allocate, BudgetError if infeasible and not clipped; warns once if one prompt may take it."""
        low, high = self._bounds()
        total = min(max(total_budget, low * prompts), high * prompts)
        if total != total_budget and self.on_infeasible == "raise":
            raise BudgetError(
                f"total_budget is {total_budget}; {prompts} prompts with budgets in [{low}, {high}] take "
                f"from {low * prompts} to {high * prompts}"
            )
        if self.concentrates and not self._warned and prompts > 1 and low < high and high > 0.2 * total:
            self._warned = True
            warnings.warn(
                f"high = {high} is more than 20 % of the step's {total} rollouts: a single prompt may take them; "
                "lower high or raise the total",
                BudgetWarning,
                stacklevel=3,
            )
        return total

    def update(self, prompt_ids: PromptIds, rewards: Any, rows: Any) -> None:
        """Takes the step's rewards, [R]; rows[j] is the position in prompt_ids of rollout j's prompt."""
        keys = prompt_keys(prompt_ids)
        reward, row = checked_rows(rewards, rows, len(keys))
        successes, counts = self.history.counts(reward, row, len(keys))
        visited = counts > 0
        if not visited.any():
            return
        rates = successes[visited] / counts[visited]
        self.history.record(keys, successes, counts)
        self._observe(keys, successes, counts)
        self.metrics = {
            **self.metrics,
            "failure_rate": 1.0 - float(rates.mean()),
            "mixed_groups": float(((rates > 0.0) & (rates < 1.0)).mean()),
        }

    def _bounds(self) -> tuple[int, int]:
        return self.low, self.high

    @abstractmethod
    def _budgets(self, keys: list[PromptId], rates: Floats, raw: Floats, total: int) -> Ints:
        """The decision: `rates` are the estimates, `raw` the raw rates (NaN for a prompt never seen)."""

    def _observe(self, keys: list[PromptId], successes: Floats, counts: Ints) -> None:  # noqa: B027 (optional)
        """What the rule itself learns from a step."""

    def _metrics(self, budgets: Ints, raw: Floats) -> dict[str, float]:
        if not len(budgets):
            return {}
        index = difficulty_class(raw)
        share = np.bincount(index + 1, budgets, len(DIFFICULTY_CLASSES) + 1) / max(int(budgets.sum()), 1)
        return {
            "budget_min": float(budgets.min()),
            "budget_mean": float(budgets.mean()),
            "budget_max": float(budgets.max()),
            "share_unseen": float((index < 0).mean()),
            "budget_unseen": float(share[0]),
            **{f"budget_{name}": float(x) for name, x in zip(DIFFICULTY_CLASSES, share[1:], strict=True)},
        }

    def state_dict(self) -> State:
        """JSON-able state: after ``load_state_dict`` the next allocation is identical."""
        return {"kind": self.kind, "version": 1, "history": self.history.state_dict(), **self._rule_state()}

    def load_state_dict(self, state: State) -> None:
        """ValueError, and nothing changed, if the state is of another kind, newer, or not whole."""
        check_state(state, self.kind, 1, ("history", *self._rule_state()))
        before = self.history.state_dict()
        self.history.load_state_dict(state["history"])
        try:
            self._load_rule_state(state)
        except BaseException:
            self.history.load_state_dict(before)
            raise

    def _rule_state(self) -> State:
        return {}

    def _load_rule_state(self, state: State) -> None:  # noqa: B027 (optional)
        """Checks all of the rule's own state, then takes it over."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the state to a JSON file with a checksum, whole or not at all."""
        write_state(path, self.state_dict())

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads a file written by :meth:`save`; an error names the file and leaves the allocator as it was."""
        state = read_state(path)
        try:
            self.load_state_dict(state)
        except ValueError as error:
            raise ValueError(f"state file {os.fspath(path)}: {error}") from error


class UniformAllocator(Allocator):
    """The same budget for all, as every trainer does.

    >>> UniformAllocator().allocate(["a", "b", "c"], 24)
    array([8, 8, 8])
    """

    kind = "UniformAllocator"
    concentrates = False

    def _budgets(self, keys: list[PromptId], rates: Floats, raw: Floats, total: int) -> Ints:
        return even_budgets(len(keys), total)


class ValueAllocator(Allocator):
    """Maximises any value of :mod:`coba_core.values` at the estimated pass rates.

    noise: 0, or the standard deviation of a factor exp(noise × normal) on each prompt's value, so that ties and near
    ties change from step to step (0.01 to 0.05; `seed` makes it repeatable).

    >>> from coba_core import FirstSuccess, PowerPreference
    >>> allocator = ValueAllocator(PowerPreference(0, 1) * FirstSuccess(), high=16)
    >>> allocator.update([7, 8], rewards=[1, 1, 1, 0, 0, 0, 0, 1], rows=[0, 0, 0, 0, 1, 1, 1, 1])
    >>> allocator.allocate([7, 8], 16)
    array([ 4, 12])
    """

    kind = "ValueAllocator"

    def __init__(self, value: AnyValue | None = None, *, noise: float = 0.0, seed: int = 0, **options: Any) -> None:
        super().__init__(**options)
        self.noise = finite_number("noise", noise, at_least=0.0, at_most=1.0)
        self._random = np.random.default_rng(seed)
        self._value = value
        if value is not None and self.low < value.concave_from:
            raise ValueError(f"low is {self.low}, below {value.concave_from}, from where the gains of this value fall")

    def value(self) -> AnyValue | None:
        """What the next step maximises; None while nothing is known."""
        return self._value

    def _budgets(self, keys: list[PromptId], rates: Floats, raw: Floats, total: int) -> Ints:
        value = self.value()
        if value is None:
            return even_budgets(len(keys), total)
        return self._maximise(value, rates, total)

    def _maximise(self, value: AnyValue, rates: Floats, total: int) -> Ints:
        if self.noise and len(rates):
            value = value.reweighted(np.exp(self.noise * self._random.standard_normal(len(rates))))
        return allocate(
            rates,
            total,
            low=self.low,
            high=self.high,
            value=value,
            solver=self.solver,
            backend=self.backend,
        )

    def _rule_state(self) -> State:
        return {"random": dict(self._random.bit_generator.state)}

    def _load_rule_state(self, state: State) -> None:
        random = np.random.default_rng(0)
        try:
            random.bit_generator.state = state["random"]
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ValueError(f"state of {self.kind}: random is not a state of NumPy's generator ({error})") from error
        self._random = random


class KnapsackAllocator(ValueAllocator):
    """Knapsack-RL: information gain times the chance of a mixed group (2509.25849).

    >>> KnapsackAllocator().allocate(["a", "b"], 24)
    array([12, 12])
    """

    kind = "KnapsackAllocator"

    def __init__(self, **options: Any) -> None:
        super().__init__(KnapsackValue(), **options)


class CapabilityAllocator(ValueAllocator):
    """CoBA-RL: a Beta preference that follows the policy's failure rate, times a saturation (2602.03048).

    saturation: Exponential(5.0), the paper's, or any other. schedule: CapabilitySchedule(), the paper's, or any other.
    Until the first failure rate is known, budgets are even.

    >>> from coba_core import repeat_index
    >>> allocator = CapabilityAllocator(high=16)
    >>> allocator.allocate([0, 1, 2], 24)
    array([8, 8, 8])
    >>> allocator.update([0, 1, 2], rewards=[0] * 8 + [0, 1] * 4 + [1] * 8, rows=repeat_index([8, 8, 8]))
    >>> allocator.allocate([0, 1, 2], 24)
    array([ 4, 16,  4])
    """

    kind = "CapabilityAllocator"

    def __init__(
        self,
        saturation: Saturation | None = None,
        schedule: Schedule | None = None,
        *,
        noise: float = 0.0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(noise=noise, seed=seed, **options)
        self.saturation = Exponential(5.0) if saturation is None else saturation
        self.schedule = CapabilitySchedule() if schedule is None else schedule
        if self.low < self.saturation.concave_from:
            raise ValueError(f"low is {self.low}, below {self.saturation.concave_from}, from where its gains fall")

    @staticmethod
    def released(*, noise: float = 0.0, seed: int = 0, **options: Any) -> ReleasedAllocator:
        """The recipe of the authors' released code beside the paper's: see :class:`ReleasedAllocator`."""
        return ReleasedAllocator(noise=noise, seed=seed, **options)

    def value(self) -> AnyValue | None:
        known = self.schedule.alpha_beta()
        return None if known is None else Value(BetaPreference(*known), self.saturation)

    def _observe(self, keys: list[PromptId], successes: Floats, counts: Ints) -> None:
        visited = counts > 0
        rate = float((successes[visited] / counts[visited]).mean())
        self.schedule.update(min(max(1.0 - rate, 0.0), 1.0))

    def _metrics(self, budgets: Ints, raw: Floats) -> dict[str, float]:
        known = self.schedule.alpha_beta()
        metrics = super()._metrics(budgets, raw)
        if known is not None:
            metrics.update(alpha=known[0], beta=known[1])
        if isinstance(self.schedule, CapabilitySchedule) and (mean := self.schedule.mean_failure_rate()) is not None:
            metrics["mean_failure_rate"] = mean
        return metrics

    def _rule_state(self) -> State:
        return {**super()._rule_state(), "schedule": self.schedule.state_dict()}

    def _load_rule_state(self, state: State) -> None:
        before = self._random
        super()._load_rule_state(state)
        try:
            self.schedule.load_state_dict(state["schedule"])
        except BaseException:
            self._random = before
            raise


class ReleasedAllocator(CapabilityAllocator):
    """The recipe of CoBA-RL's released code, which differs from the paper, without its bias by position.

    Raw pass rates of the last visit, clipped to [.01, .99]; α from 1 to κ-1; τ = 3 + 9 clip(Var(p)/.1667, 0, 1) over
    prompts with .05 <= p <= .99. Of the budget above `low`, those prompts share a part by the capability value: their
    own share of the batch, held within 60 to 80 %. The rest goes by 1-p to prompts of p < .05 first (equal p, equal
    budgets up to one); what neither can hold goes to whoever has room. Even budgets while nothing is known.

    >>> allocator = CapabilityAllocator.released(high=32)
    >>> allocator.allocate([0, 1], 16)
    array([8, 8])
    """

    kind = "ReleasedAllocator"

    def __init__(self, *, kappa: float = 11.0, noise: float = 0.0, seed: int = 0, **options: Any) -> None:
        options.setdefault("history", PassRateHistory(window=1, prior_strength=0.0))
        super().__init__(schedule=CapabilitySchedule(kappa=kappa, lam=kappa - 2.0), noise=noise, seed=seed, **options)

    def _budgets(self, keys: list[PromptId], rates: Floats, raw: Floats, total: int) -> Ints:
        known = self.schedule.alpha_beta()
        if known is None:
            return even_budgets(len(keys), total)
        learnable = (rates >= 0.05) & (rates <= 0.99)
        p = np.clip(rates, 0.01, 0.99)
        budgets = np.full(len(keys), self.low, dtype=np.int64)
        spare = total - int(budgets.sum())
        inside = np.flatnonzero(learnable)
        if len(inside):
            share = min(max(len(inside) / len(keys), 0.6), 0.8)
            part = min(int(spare * share), len(inside) * (self.high - self.low))
            tau = 3.0 + 9.0 * min(float(np.var(p[inside])) / 0.1667, 1.0)
            value = Value(BetaPreference(*known), Exponential(tau))
            budgets[inside] = self._maximise(value, p[inside], part + self.low * len(inside))
        for group in (np.flatnonzero(rates < 0.05), np.arange(len(keys))):
            spare = total - int(budgets.sum())
            _share_by_weight(budgets, group, 1.0 - p[group], spare, self.high)
        return budgets


def _share_by_weight(budgets: Ints, group: Ints, weights: Floats, spare: int, high: int) -> None:
    """Adds up to `spare` to budgets[group] in proportion to weights, none above high, by largest remainders."""
    while spare > 0:
        room = high - budgets[group]
        group, weights, room = group[room > 0], weights[room > 0], room[room > 0]
        if not len(group):
            return
        exact = spare * weights / weights.sum()
        whole = exact.astype(np.int64)
        given = np.minimum(whole, room)
        if (given == whole).all():  # else some were cut at high, and the next round shares what they left
            order = np.lexsort((group, budgets[group], whole - exact))
            order = order[given[order] < room[order]]
            given[order[: spare - int(given.sum())]] += 1
        budgets[group] += given
        spare -= int(given.sum())
