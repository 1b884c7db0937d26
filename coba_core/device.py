"""Pass rates and the capability allocator kept on a GPU: from prompt indices to updated counts nothing waits for it.

The classes have the interface, the semantics and the states of :class:`coba_core.PassRateHistory` and
:class:`coba_core.CapabilityAllocator`; prompts are their indices in the data set, tensors come in and go out. What
would need a look at the data is not checked: indices outside [0, size) are left out, fractional rewards held within
[0, 1].

Needs torch and Triton; imported on its own (``import coba_core.device``), so that ``import coba_core`` needs neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from coba_core.allocators import CapabilityAllocator, OnInfeasible
from coba_core.history import PassRateHistory
from coba_core.kernels import triton_backend
from coba_core.kernels.numpy_backend import FIRST_SUCCESS
from coba_core.schedules import CapabilitySchedule
from coba_core.state import State, whole_number
from coba_core.values import Saturation


def _indices(name: str, x: Any, device: torch.device) -> torch.Tensor:
    """x as contiguous int64 [n] on the device."""
    tensor = torch.as_tensor(x, device=device)
    if tensor.ndim != 1 or tensor.dtype.is_floating_point or tensor.dtype == torch.bool:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype}, not integers [n]")
    return tensor.to(torch.int64).contiguous()


class DevicePassRateHistory:
    """:class:`coba_core.PassRateHistory` of the prompts 0 .. size-1, in `size` × `window` counts on a GPU.

    The estimate is (s + m S)/(n + m): s successes of n rollouts over the last `window` visits, m = `prior_strength`, S
    the mean of the raw rates of all prompts seen. States go from one class to the other. A prompt that occurs twice in
    a step pools its counts and ages once; NaN rewards are left out. Sums are made in a fixed order: the same input
    gives the same bits.

    size: prompts in the data set. device: a CUDA or ROCm device. ValueError for one that Triton cannot use.
    """

    kind = PassRateHistory.kind

    def __init__(
        self,
        size: int,
        window: int = 4,
        threshold: float = 0.5,
        fractional: bool = False,
        prior_strength: float = 1.0,
        device: torch.device | str = "cuda",
    ) -> None:
        size = whole_number("size", size, at_least=1)
        self.device = torch.device(device)
        if not triton_backend.runs_on(self.device):
            raise ValueError(f"device is {str(device)!r}, not one that Triton can use; PassRateHistory is for the CPU")
        self._host = PassRateHistory(window, threshold, fractional, prior_strength)  # the checks, and those of states
        self.size, self.window = size, self._host.window
        self.threshold, self.fractional = self._host.threshold, fractional
        self.prior_strength = self._host.prior_strength
        self._successes = torch.zeros((size, self.window), dtype=torch.float64, device=self.device)
        self._counts = torch.zeros((size, self.window), dtype=torch.int64, device=self.device)
        self._visits = torch.zeros(size, dtype=torch.int64, device=self.device)
        self._rate_sum = torch.zeros(1, dtype=torch.float64, device=self.device)
        self._seen = torch.zeros(1, dtype=torch.int64, device=self.device)

    def __len__(self) -> int:
        """How many prompts have been seen; waits for the device."""
        return int(self._seen.item())

    def update(self, prompt_ids: Any, rewards: torch.Tensor, rows: torch.Tensor) -> None:
        """Takes the rewards of a step: rewards[j], [R], is of the prompt at position rows[j] of prompt_ids, [M]."""
        keys = _indices("prompt_ids", prompt_ids, self.device)
        self.record(keys, *self.counts(rewards, rows, keys.numel()))

    def counts(self, rewards: torch.Tensor, rows: torch.Tensor, prompts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(successes float64 [M], rollouts int64 [M]) of a step, NaN rewards left out."""
        reward = torch.as_tensor(rewards, device=self.device)
        row = _indices("rows", rows, self.device)
        if reward.shape != row.shape:
            raise ValueError(
                f"rewards has shape {tuple(reward.shape)} and rows {tuple(row.shape)}: one row a reward is needed"
            )
        return triton_backend.success_counts(reward, row, prompts, self.threshold, self.fractional)

    def record(self, keys: torch.Tensor, successes: torch.Tensor, counts: torch.Tensor) -> None:
        """Adds one visit of each prompt with counts above 0."""
        triton_backend.history_update(
            keys, successes, counts, self._successes, self._counts, self._visits, self._rate_sum, self._seen
        )

    def estimates(self, prompt_ids: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(estimated, raw) pass rates, float64 [M] each; raw is NaN for a prompt never seen."""
        keys = _indices("prompt_ids", prompt_ids, self.device)
        return triton_backend.history_rates(
            keys, self._successes, self._counts, self._rate_sum, self._seen, self.prior_strength
        )

    def pass_rates(self, prompt_ids: Any) -> torch.Tensor:
        """Estimated pass rates, float64 [M] in [0, 1]."""
        return self.estimates(prompt_ids)[0]

    def seen(self, prompt_ids: Any) -> torch.Tensor:
        """Whether each prompt has a visit, bool [M]."""
        return ~torch.isnan(self.estimates(prompt_ids)[1])

    def global_rate(self) -> float:
        """S: the mean of the raw pass rates of all prompts seen; ½ before any was. Waits for the device."""
        seen = len(self)
        return min(max(float(self._rate_sum.item()) / seen, 0.0), 1.0) if seen else 0.5

    def state_dict(self) -> State:
        """JSON-able state of all prompts seen, which a PassRateHistory takes too; waits for the device."""
        visits = self._visits.cpu().numpy()
        keys = np.flatnonzero(visits)
        return {
            "kind": self.kind,
            "version": 1,
            "window": self.window,
            "keys": keys.tolist(),
            "successes": self._successes.cpu().numpy()[keys].tolist(),
            "counts": self._counts.cpu().numpy()[keys].tolist(),
            "visits": visits[keys].tolist(),
            "rate_sum": float(self._rate_sum.item()),
        }

    def load_state_dict(self, state: State) -> None:
        """Restores a state; ValueError, and nothing changed, if it is not a whole state of the same window and size."""
        self._host.load_state_dict(state)
        for i, key in enumerate(state["keys"]):
            if not isinstance(key, int) or not 0 <= key < self.size:
                raise ValueError(f"state of {self.kind}: keys[{i}] is {key!r}, not an index below {self.size}")
        keys = torch.tensor(state["keys"], dtype=torch.int64, device=self.device)
        for kept, name in ((self._successes, "successes"), (self._counts, "counts"), (self._visits, "visits")):
            given = torch.tensor(state[name], dtype=kept.dtype, device=self.device)
            kept.zero_().index_copy_(0, keys, given.reshape(len(keys), *kept.shape[1:]))
        self._rate_sum.fill_(float(state["rate_sum"]))
        self._seen.fill_(len(keys))


class DeviceCapabilityAllocator(CapabilityAllocator):
    """:class:`coba_core.CapabilityAllocator` on a GPU: pass rates, failure rates, α, β and budgets stay there.

    `allocate` and `update` only launch kernels, a fixed number, so that they capture in a CUDA graph; `metrics` and
    `state_dict` wait for the device. States go from one class to the other. α and β come from sums in another order, so
    they may differ from the CPU's in the last bits, and budgets where gains are as near as that.

    size: prompts in the data set; prompt ids are 0 .. size-1. history: a DevicePassRateHistory of its own unless given.
    saturation, schedule, low, high, on_infeasible: as on the CPU; the schedule is a CapabilitySchedule.
    """

    def __init__(
        self,
        size: int,
        saturation: Saturation | None = None,
        schedule: CapabilitySchedule | None = None,
        *,
        low: int = 2,
        high: int = 128,
        history: DevicePassRateHistory | None = None,
        on_infeasible: OnInfeasible = "raise",
        device: torch.device | str = "cuda",
    ) -> None:
        if schedule is not None and not isinstance(schedule, CapabilitySchedule):
            raise ValueError(f"schedule is {schedule!r}, not a CapabilitySchedule")
        kept = DevicePassRateHistory(size, device=device) if history is None else history
        host: Any = kept  # the same methods, of tensors
        super().__init__(saturation, schedule, low=low, high=high, history=host, on_infeasible=on_infeasible)
        self.device_history = kept
        form = self.saturation.form(0.0, 0.0, 0.0)
        if not isinstance(form.log_scale, float) or not isinstance(form.rate, float):
            raise ValueError("the saturation has one number a prompt; here the prompts change from step to step")
        self._form = form
        self._capability = self.schedule if isinstance(self.schedule, CapabilitySchedule) else CapabilitySchedule()
        self._failures = torch.zeros(self._capability.window, dtype=torch.float64, device=kept.device)
        self._updates = torch.zeros(1, dtype=torch.int64, device=kept.device)
        self._from_schedule()

    @property
    def metrics(self) -> dict[str, float]:
        """Flat numbers of the last allocate and update; waits for the device."""
        return {name: x for part in self._measures.values() for name, x in part().items()}

    @metrics.setter
    def metrics(self, _: dict[str, float]) -> None:
        self._measures: dict[str, Callable[[], dict[str, float]]] = {}

    def allocate(self, prompt_ids: Any, total_budget: int) -> Any:
        """Budgets of this step's prompts, int64 [M] on the device, adding up to total_budget."""
        keys = _indices("prompt_ids", prompt_ids, self.device_history.device)
        total_budget = whole_number("total_budget", total_budget)
        total = self._feasible(keys.numel(), total_budget)
        rates, raw = self.device_history.estimates(keys)
        numbers = self._numbers
        rates = torch.where(numbers[7] > 0.0, rates, 0.5)  # nothing known: all alike, so budgets are even
        form = triton_backend.device_form(self._form.saturation, numbers)
        budgets = triton_backend.threshold(rates, form, self.low, self.high, total)
        self._measures["allocate"] = lambda: self._budget_measures(budgets, raw, numbers, total - total_budget)
        return budgets

    def update(self, prompt_ids: Any, rewards: Any, rows: Any) -> None:
        """Takes the step's rewards, [R]; rows[j] is the position in prompt_ids of rollout j's prompt."""
        keys = _indices("prompt_ids", prompt_ids, self.device_history.device)
        successes, counts = self.device_history.counts(rewards, rows, keys.numel())
        self.device_history.record(keys, successes, counts)
        triton_backend.observe_failure_rate(successes, counts, self._failures, self._updates)
        self._numbers = self._next_numbers()
        self._measures["update"] = lambda: self._reward_measures(successes, counts)

    def _next_numbers(self) -> torch.Tensor:
        return triton_backend.capability_numbers(
            self._failures,
            self._updates,
            self._capability,
            float(self._form.log_scale),
            float(self._form.rate),
            0.0 if self._form.saturation == FIRST_SUCCESS else 1.0,
        )

    def _budget_measures(
        self, budgets: torch.Tensor, raw: torch.Tensor, numbers: torch.Tensor, clipped: int
    ) -> dict[str, float]:
        measures = self._metrics(budgets.cpu().numpy(), raw.cpu().numpy())
        for name in ("alpha", "beta", "mean_failure_rate"):
            measures.pop(name, None)
        alpha, beta, mean, known = numbers[4:].tolist()
        if known:
            measures.update(alpha=alpha, beta=beta, mean_failure_rate=mean)
        return {**measures, "clipped": float(clipped)}

    def _reward_measures(self, successes: torch.Tensor, counts: torch.Tensor) -> dict[str, float]:
        visited = counts > 0
        rates = (successes[visited] / counts[visited]).cpu()
        if not rates.numel():
            return {}
        mixed = ((rates > 0.0) & (rates < 1.0)).double().mean()
        return {"failure_rate": 1.0 - float(rates.mean()), "mixed_groups": float(mixed)}

    def _from_schedule(self) -> None:
        """The schedule's failure rates onto the device."""
        rates = self._capability.failure_rates
        self._failures.zero_()
        self._failures[: len(rates)] = torch.tensor(rates, dtype=torch.float64, device=self._failures.device)
        self._updates.fill_(len(rates))
        self._numbers = self._next_numbers()

    def _rule_state(self) -> State:
        done, rates = int(self._updates.item()), self._failures.tolist()
        oldest = done % len(rates) if done > len(rates) else 0
        self._capability.failure_rates = [*rates[oldest:], *rates[:oldest]][: min(done, len(rates))]
        return super()._rule_state()

    def _load_rule_state(self, state: State) -> None:
        super()._load_rule_state(state)
        self._from_schedule()
