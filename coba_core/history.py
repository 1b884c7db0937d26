"""Pass rates per prompt, over windows of the last visits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coba_core.kernels.numpy_backend import Floats, Ints
from coba_core.state import State, check_state, finite_number, whole_number

PromptId = int | str
"""A stable key of a prompt, such as its index in the data set: the same at every visit and after a restart."""


def prompt_keys(prompt_ids: Sequence[PromptId] | npt.NDArray[Any], name: str = "prompt_ids") -> list[PromptId]:
    """`prompt_ids` as Python ints and strings; ValueError naming the first that is neither."""
    keys: list[PromptId] = prompt_ids.tolist() if hasattr(prompt_ids, "tolist") else list(prompt_ids)
    if not all(type(key) is int or type(key) is str for key in keys):
        for i, key in enumerate(keys):
            if isinstance(key, np.integer):
                keys[i] = int(key)
            elif not isinstance(key, (int, str)) or isinstance(key, bool):
                raise ValueError(f"{name}[{i}] is {key!r}, not an int or a string")
    return keys


def as_array(x: Any, dtype: npt.DTypeLike | None) -> npt.NDArray[Any]:
    """A NumPy view or copy of a sequence, an array or a torch tensor on any device."""
    if hasattr(x, "detach"):
        x = x.detach().cpu()
        x = x.float() if str(x.dtype) == "torch.bfloat16" else x
    return np.asarray(x, dtype=dtype)


def checked_rows(rewards: Any, rows: Any, groups: int | None) -> tuple[Floats, Ints]:
    """rewards as float64 [R] and rows as int64 [R], of one length, 0 <= rows < groups; ValueError otherwise."""
    reward = as_array(rewards, np.float64)
    row = as_array(rows, None)
    if row.size and row.dtype.kind not in "iu":
        raise ValueError(f"rows has dtype {row.dtype}, not an integer one")
    row = row.astype(np.int64, copy=False)
    if reward.ndim != 1 or row.ndim != 1 or len(reward) != len(row):
        raise ValueError(f"rewards has shape {reward.shape} and rows {row.shape}: one row a reward is needed")
    if len(row) and (row.min() < 0 or (groups is not None and row.max() >= groups)):
        i = int(((row < 0) if groups is None else (row < 0) | (row >= groups)).argmax())
        bound = "not negative" if groups is None else f"in [0, {groups})"
        raise ValueError(f"rows[{i}] is {row[i]}, which must be {bound}")
    return reward, row


class PassRateHistory:
    """Counts of rollouts and successes of each prompt over its last `window` visits, and the pass rate they suggest.

    A rollout succeeds if its reward is at least `threshold`; with ``fractional=True`` the reward itself, in [0, 1], is
    the success. The estimate is (s + m S)/(n + m): s successes of n rollouts, m = `prior_strength`, S the mean of the
    raw rates of all prompts seen (½ before any). So a prompt never seen has rate S, and m = 0 gives s/n. NaN rewards
    are left out; a visit with nothing but NaN is no visit. A prompt that occurs twice in a step pools its counts and
    ages once.

    An update costs time in proportion to the step, however many prompts were ever seen.

    >>> history = PassRateHistory(prior_strength=0.0)
    >>> history.update(["a", "b"], rewards=[1, 0, 0, 1, 1], rows=[0, 0, 1, 1, 1])
    >>> history.pass_rates(["a", "b", "new"]).round(4)
    array([0.5   , 0.6667, 0.5833])
    """

    kind = "PassRateHistory"

    def __init__(
        self, window: int = 4, threshold: float = 0.5, fractional: bool = False, prior_strength: float = 1.0
    ) -> None:
        self.window = whole_number("window", window, at_least=1)
        self.threshold = finite_number("threshold", threshold)
        self.fractional = fractional
        self.prior_strength = finite_number("prior_strength", prior_strength, at_least=0.0)
        self._slots: dict[PromptId, int] = {}
        self._reset(0)

    def _reset(self, capacity: int) -> None:
        self._successes = np.zeros((capacity, self.window))
        self._counts = np.zeros((capacity, self.window), dtype=np.int64)
        self._visits = np.zeros(capacity, dtype=np.int64)
        self._rate_sum = 0.0

    def __len__(self) -> int:
        """How many prompts have been seen."""
        return len(self._slots)

    def successes(self, rewards: Floats) -> Floats:
        """Reward by reward the success it counts as, [R]; NaN stays NaN. ValueError for a fraction outside [0, 1]."""
        if self.fractional:
            wrong = (rewards < 0.0) | (rewards > 1.0)
            if wrong.any():
                i = int(wrong.argmax())
                raise ValueError(f"rewards[{i}] is {rewards[i]}, not in [0, 1] as fractional=True needs")
            return rewards
        return np.where(np.isnan(rewards), np.nan, rewards >= self.threshold)

    def update(self, prompt_ids: Sequence[PromptId] | npt.NDArray[Any], rewards: Any, rows: Any) -> None:
        """Takes the rewards of a step: rewards[j], [R], is of the prompt at position rows[j] of prompt_ids, [M]."""
        keys = prompt_keys(prompt_ids)
        reward, row = checked_rows(rewards, rows, len(keys))
        self.record(keys, *self.counts(reward, row, len(keys)))

    def counts(self, rewards: Floats, rows: Ints, prompts: int) -> tuple[Floats, Ints]:
        """(successes float64 [M], rollouts int64 [M]) of a step, NaN rewards left out."""
        success = self.successes(rewards)
        known = ~np.isnan(success)
        if not known.all():
            success, rows = success[known], rows[known]
        counts = np.bincount(rows, minlength=prompts).astype(np.int64, copy=False)
        return np.bincount(rows, success, prompts).astype(np.float64, copy=False), counts

    def record(self, keys: list[PromptId], successes: Floats, counts: Ints) -> None:
        """Adds one visit of each prompt with counts above 0."""
        if len(set(keys)) != len(keys):
            first: dict[PromptId, int] = {}
            place = np.array([first.setdefault(key, len(first)) for key in keys])
            keys = list(first)
            successes = np.bincount(place, successes).astype(np.float64, copy=False)
            counts = np.bincount(place, counts).astype(np.int64)
        if not counts.all():
            visited = np.flatnonzero(counts)
            keys, successes, counts = [keys[i] for i in visited], successes[visited], counts[visited]
        if not keys:
            return
        slots = self._slots
        slot = np.array([slots.setdefault(key, len(slots)) for key in keys])
        if len(slots) > len(self._visits):
            self._grow(len(slots))
        before = self._raw(slot)
        at = self._visits[slot] % self.window
        self._successes[slot, at] = successes
        self._counts[slot, at] = counts
        self._visits[slot] += 1
        self._rate_sum += float(np.sum(self._raw(slot) - np.where(np.isnan(before), 0.0, before)))

    def _grow(self, needed: int) -> None:
        extra = max(needed, 2 * len(self._visits), 256) - len(self._visits)
        self._successes = np.concatenate([self._successes, np.zeros((extra, self.window))])
        self._counts = np.concatenate([self._counts, np.zeros((extra, self.window), dtype=np.int64)])
        self._visits = np.concatenate([self._visits, np.zeros(extra, dtype=np.int64)])

    def _raw(self, slot: Ints) -> Floats:
        with np.errstate(invalid="ignore"):
            return self._successes[slot].sum(axis=1) / self._counts[slot].sum(axis=1)  # type: ignore[no-any-return]

    def global_rate(self) -> float:
        """S: the mean of the raw pass rates of all prompts seen; ½ before any was."""
        return min(max(self._rate_sum / len(self._slots), 0.0), 1.0) if self._slots else 0.5

    def estimates(self, prompt_ids: Sequence[PromptId] | npt.NDArray[Any]) -> tuple[Floats, Floats]:
        """(estimated, raw) pass rates, float64 [M] each; raw is NaN for a prompt never seen."""
        keys = prompt_keys(prompt_ids)
        slot = np.array([self._slots.get(key, -1) for key in keys], dtype=np.int64)
        if not len(self._visits):
            return np.full(len(keys), self.global_rate()), np.full(len(keys), np.nan)
        unseen = slot < 0
        s = np.where(unseen, 0.0, self._successes[slot].sum(axis=1))
        n = np.where(unseen, 0, self._counts[slot].sum(axis=1))
        mean, m = self.global_rate(), self.prior_strength
        with np.errstate(invalid="ignore"):
            return np.where(unseen, mean, (s + m * mean) / (n + m)), s / n

    def pass_rates(self, prompt_ids: Sequence[PromptId] | npt.NDArray[Any]) -> Floats:
        """Estimated pass rates, float64 [M] in [0, 1]."""
        return self.estimates(prompt_ids)[0]

    def seen(self, prompt_ids: Sequence[PromptId] | npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
        """Whether each prompt has a visit, bool [M]."""
        return np.array([key in self._slots for key in prompt_keys(prompt_ids)], dtype=np.bool_)

    def state_dict(self) -> State:
        """JSON-able state of all prompts seen."""
        size = len(self._slots)
        return {
            "kind": self.kind,
            "version": 1,
            "window": self.window,
            "keys": list(self._slots),
            "successes": self._successes[:size].tolist(),
            "counts": self._counts[:size].tolist(),
            "visits": self._visits[:size].tolist(),
            "rate_sum": self._rate_sum,
        }

    def load_state_dict(self, state: State) -> None:
        """Restores a state; ValueError, and nothing changed, if it is not a whole state of the same window."""
        where = f"state of {self.kind}"
        check_state(state, self.kind, 1, ("window", "keys", "successes", "counts", "visits", "rate_sum"))
        if state["window"] != self.window:
            raise ValueError(f"{where}: its window is {state['window']!r}, this history's is {self.window}")
        if not isinstance(state["keys"], list):
            raise ValueError(f"{where}: keys is {state['keys']!r}, not a list")
        keys = prompt_keys(state["keys"], f"{where}: keys")
        size = len(keys)
        if len(set(keys)) != size:
            raise ValueError(f"{where}: keys holds a prompt twice")
        try:
            successes = np.array(state["successes"], dtype=np.float64).reshape(size, self.window)
            counts = np.array(state["counts"], dtype=np.float64).reshape(size, self.window)
            visits = np.array(state["visits"], dtype=np.float64).reshape(size)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{where}: successes, counts and visits do not fit {size} keys ({error})") from error
        filled = np.arange(self.window) < visits[:, None]
        whole = np.all(counts % 1.0 == 0.0) and np.all(visits % 1.0 == 0.0) and np.all(visits < 2.0**53)
        right = (successes >= 0.0) & (successes <= counts) & ((counts > 0.0) == filled)
        if not (whole and np.all(right) and np.all(visits > 0.0) and np.all(counts < 2.0**53)):
            raise ValueError(f"{where}: successes, counts and visits contradict each other")
        rate_sum = finite_number(f"{where}: rate_sum", state["rate_sum"])
        if abs(rate_sum - float(np.sum(successes.sum(axis=1) / counts.sum(axis=1)))) > 1e-6 * (size + 1):
            raise ValueError(f"{where}: rate_sum is {rate_sum}, not the sum of the pass rates")
        self._successes, self._counts, self._visits = successes, counts.astype(np.int64), visits.astype(np.int64)
        self._slots = {key: i for i, key in enumerate(keys)}
        self._rate_sum = rate_sum
