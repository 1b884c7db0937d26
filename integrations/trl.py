"""TRL's GRPOTrainer with a budget of rollouts for each prompt.

::

    from coba_core.integrations.trl import BudgetedGRPOTrainer

    trainer = BudgetedGRPOTrainer(model=..., reward_funcs=..., args=GRPOConfig(num_generations=16, ...),
                                  train_dataset=..., allocator="coba", budget_low=2, budget_high=64)

`num_generations` is the mean size of a group: a generation batch keeps its number of rows, and the allocator says which
prompt each row is of. Needs trl >=1.10,<1.17 without 1.15; the import fails with the reason otherwise.
"""

from __future__ import annotations

import inspect
import math
from typing import Any, Literal

import numpy as np
import torch
import trl
from accelerate.utils import broadcast_object_list, gather_object
from datasets import IterableDataset
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl import GRPOTrainer

from coba_core.allocators import Allocator, CapabilityAllocator, KnapsackAllocator, UniformAllocator
from coba_core.groups import Weighting, group_advantages, prompt_weights, repeat_index
from coba_core.rank import RankAllocator
from coba_core.state import State, check_state
from coba_core.temperature import EntropyTemperature

AllocatorName = Literal["coba", "knapsack", "e3", "uniform"]

ALLOCATORS: dict[str, type[Allocator]] = {
    "coba": CapabilityAllocator,
    "knapsack": KnapsackAllocator,
    "e3": RankAllocator,
    "uniform": UniformAllocator,
}
"""What a name given as `allocator` stands for."""

VERSIONS = ">=1.10,<1.17,!=1.15.*"
"""The releases of TRL that this module works with."""

OVERRIDDEN = {
    "_generate_and_score_completions": ("self", "inputs"),
    "_calculate_rewards": ("self", "inputs", "prompts", "completions", "completion_ids_list"),
    "_set_signature_columns_if_needed": ("self",),
    "_compute_loss": ("self", "model", "inputs"),
}
"""The private methods of GRPOTrainer that are overridden here, and the parameters they must have."""

KEY = "_coba_key"
KIND = "BudgetCallback"


def check_version(version: str = trl.__version__, trainer: type = GRPOTrainer) -> None:
    """ImportError if this release of TRL is not one of VERSIONS, or if a method overridden here has changed."""
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:2])
    changed = []
    for name, parameters in OVERRIDDEN.items():
        found = getattr(trainer, name, None)
        if found is None:
            changed.append(f"{name} is missing")
        elif (has := tuple(inspect.signature(found).parameters)) != parameters:
            changed.append(f"{name}({', '.join(has)}) was {name}({', '.join(parameters)})")
    if (1, 10) <= numbers < (1, 17) and numbers != (1, 15) and not changed:
        return
    reason = f"; of the methods it overrides {'; '.join(changed)}" if changed else ""
    raise ImportError(
        f"trl is {version}; BudgetedGRPOTrainer overrides private methods of GRPOTrainer and works with trl {VERSIONS}"
        f"{reason}: pip install 'trl{VERSIONS}'"
    )


check_version()


class BudgetCallback(TrainerCallback, ExportableState):  # type: ignore[misc]  # transformers has no types
    """Keeps the allocator's (and the temperature's) state in a checkpoint's trainer_state.json and takes it back.

    BudgetedGRPOTrainer adds one by itself. ValueError at the start of a run that resumes from a checkpoint without such
    a state, unless `fresh_history`.
    """

    def __init__(
        self, allocator: Allocator, temperature: EntropyTemperature | None = None, *, fresh_history: bool = False
    ) -> None:
        self.allocator, self.temperature, self.fresh_history = allocator, temperature, fresh_history
        self.entropies: list[float] = []
        """Mean entropy of each micro-batch of the current generation batch, for the temperature's next update."""

    def state(self) -> dict[str, Any]:
        """The state in the form that transformers writes."""
        budget: State = {
            "kind": KIND,
            "version": 1,
            "allocator": self.allocator.state_dict(),
            "temperature": None if self.temperature is None else self.temperature.state_dict(),
            "entropies": list(self.entropies),
        }
        return {"args": {}, "attributes": {"budget": budget}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the state of the checkpoint that the run resumes from."""
        if not state.global_step:
            return
        saved = state.stateful_callbacks.get(KIND)
        if saved is None:
            if self.fresh_history:
                state.stateful_callbacks[KIND] = self.state()  # a checkpoint only renews what is there
                return
            raise ValueError(
                "the checkpoint has no state of an allocator (it was made by another trainer). To go on from it with "
                "an empty history, give BudgetedGRPOTrainer fresh_history=True"
            )
        budget = saved["attributes"]["budget"]
        check_state(budget, KIND, 1, ("allocator", "temperature", "entropies"))
        if (budget["temperature"] is None) != (self.temperature is None):
            raise ValueError("the checkpoint was made with `temperature` and this run has none, or the reverse")
        if self.temperature is not None:
            self.temperature.load_state_dict(budget["temperature"])
        self.allocator.load_state_dict(budget["allocator"])
        self.entropies = [float(x) for x in budget["entropies"]]


def grouped_advantages(
    rewards: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor, scale: str, aggregation: str
) -> torch.Tensor:
    """Advantages as GRPOTrainer defines them, by group id instead of by position, float64 [R].

    rewards: [R, K] of K reward functions, NaN where one gave None; weights: [K]; rows: group ids, int64 [R]. A row
    without any reward gets advantage 0 and is in no mean. scale: of `sum_then_normalize`.
    """
    values, weight = rewards.double(), weights.double().to(rewards.device)
    unknown = values.isnan().all(dim=1)
    if aggregation == "sum_then_normalize":
        total = total_rewards(values, weight)
        return torch.as_tensor(group_advantages(total, rows, scale=scale))  # type: ignore[call-overload]
    columns = [group_advantages(values[:, k].contiguous(), rows) for k in range(values.shape[1])]
    summed = (torch.stack(columns, dim=1) * weight).sum(dim=1)
    summed[unknown] = math.nan
    return torch.as_tensor(group_advantages(summed, torch.zeros_like(rows)))


def total_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Weighted sum of [R, K] rewards over the functions that gave one, [R]; NaN where none did."""
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    total[rewards.isnan().all(dim=1)] = math.nan
    return total


def zero_spread(total: torch.Tensor, rows: torch.Tensor, prompts: int) -> float:
    """Share of the rows whose group's rewards are all equal (a row without reward counts as none of them)."""
    known = ~total.isnan()
    low = torch.full((prompts,), math.inf, dtype=total.dtype, device=total.device)
    low = low.scatter_reduce(0, rows[known], total[known], "amin")
    high = torch.full_like(low, -math.inf).scatter_reduce(0, rows[known], total[known], "amax")
    return float(torch.isclose(low, high)[rows].float().mean())


class BudgetedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # trl has no types
    """GRPOTrainer whose prompts get as many rollouts as an allocator decides.

    Takes the arguments of GRPOTrainer, and:

    - allocator: any of coba_core's, or "coba", "knapsack", "e3" (ranks renewed when a pass repeats a prompt) or
      "uniform", with bounds `budget_low` (2) and `budget_high` (128), which only a name takes;
    - prompt_weighting: "rollout", every rollout weighs the same in the loss, or "prompt", advantages are multiplied by
      mean(B)/Bᵢ so that every prompt does;
    - key_column: the column with each prompt's stable key (integers or strings), by default its place in the data set;
    - success_from: name of the reward function that the allocator learns from, by default the weighted sum of all;
    - temperature: an EntropyTemperature that sets the sampling temperature before each generation;
    - fresh_history: go on from a checkpoint of another trainer, with an empty history.

    `num_generations` is the mean of the budgets, so budgets must be able to have it: low <= num_generations <= high.
    The allocator lives on rank 0, which broadcasts its decision. Metrics are logged as ``coba/...``. ValueError or
    TypeError for arguments that do not fit each other.
    """

    train_dataset: Any
    num_generations: int

    def __init__(
        self,
        *args: Any,
        allocator: Allocator | AllocatorName = "coba",
        budget_low: int | None = None,
        budget_high: int | None = None,
        prompt_weighting: Weighting = "rollout",
        key_column: str | None = None,
        success_from: str | None = None,
        temperature: EntropyTemperature | None = None,
        fresh_history: bool = False,
        **kwargs: Any,
    ) -> None:
        check_version()
        if prompt_weighting not in ("prompt", "rollout"):
            raise ValueError(f"prompt_weighting is {prompt_weighting!r}, not 'prompt' or 'rollout'")
        if temperature is not None and not isinstance(temperature, EntropyTemperature):
            raise TypeError(f"temperature is {temperature!r}, not an EntropyTemperature (args.temperature is a number)")
        self.allocator = _allocator(allocator, budget_low, budget_high)
        self.prompt_weighting, self.entropy_temperature = prompt_weighting, temperature
        self._key_column = KEY if key_column is None else key_column
        self._scored: torch.Tensor | None = None
        super().__init__(*args, **kwargs)
        self._check(temperature, success_from)
        self._success_column = None if success_from is None else self.reward_func_names.index(success_from)
        if self.train_dataset is not None:
            self.train_dataset = _with_keys(self.train_dataset, key_column)
        self.budget_callback = BudgetCallback(self.allocator, temperature, fresh_history=fresh_history)
        self.add_callback(self.budget_callback)

    def _check(self, temperature: EntropyTemperature | None, success_from: str | None) -> None:
        mean, low, high = self.num_generations, self.allocator.low, self.allocator.high
        if self.allocator.on_infeasible == "clip":
            raise ValueError("allocator has on_infeasible='clip'; a generation batch has a fixed size: use 'raise'")
        if not low <= mean <= high:
            raise ValueError(
                f"num_generations, the mean budget, is {mean}, outside the allocator's [{low}, {high}]: change "
                "num_generations or the bounds (budget_low, budget_high)"
            )
        if success_from is not None and success_from not in self.reward_func_names:
            raise ValueError(f"success_from is {success_from!r}; the reward functions are {self.reward_func_names}")
        if getattr(self.args, "restore_callback_states_from_checkpoint", False):
            raise ValueError(
                "restore_callback_states_from_checkpoint=True replaces callbacks by copies, and the copy of "
                "BudgetCallback would not know the allocator; leave it False: the budget's state is restored anyway"
            )
        if temperature is not None:
            if self.use_vllm and self.vllm_mode == "server" and not hasattr(self.vllm_generation, "temperature"):
                raise ValueError("temperature needs TRL's vllm_generation.temperature, which this release lacks")
            if getattr(self.args, "use_liger_kernel", False):
                raise ValueError("temperature needs the entropy of the tokens, which use_liger_kernel does not compute")

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self._key_column not in self._signature_columns:
            self._signature_columns.append(self._key_column)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.model.training:
            return self._evaluate_completions(inputs)
        decision = self._decide(inputs)
        keys, budgets, prompts = decision["keys"], decision["budgets"], decision["prompts"]
        index = repeat_index(budgets)
        first = self.accelerator.process_index * len(inputs)
        local = [dict(prompts[i]) for i in index[first : first + len(inputs)]]
        self._set_temperature(decision["temperature"])
        mean = self.num_generations
        self.num_generations = 1  # TRL then neither reshapes into groups nor removes repeated prompts
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(local)
        finally:
            self.num_generations = mean
        rewards = self._scored
        if rewards is None or len(rewards) != len(index):
            scored = 0 if rewards is None else len(rewards)
            raise RuntimeError(f"{len(index)} rollouts were planned and TRL scored {scored}")
        rows = torch.as_tensor(index, device=rewards.device)
        aggregation = getattr(self, "multi_objective_aggregation", "sum_then_normalize")
        advantages = grouped_advantages(rewards, self.reward_weights, rows, self.scale_rewards, aggregation)
        if self.prompt_weighting == "prompt":
            advantages = advantages * (len(index) * prompt_weights(rows))
        output["advantages"] = advantages[first : first + len(inputs)].to(output["advantages"].dtype)
        self._mend_logs(advantages, rewards, rows, len(budgets), aggregation)
        self._learn(keys, rewards, index)
        return output

    def _evaluate_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Evaluation as TRL does it, at args.temperature."""
        before = self.temperature
        if self.entropy_temperature is not None:
            self._set_temperature(self.args.temperature)
        try:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
        finally:
            if self.entropy_temperature is not None:
                self._set_temperature(before)
        return output

    def _decide(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """The step's prompts, one row each, with keys, budgets and temperature: the same on every rank."""
        mean, rank, world = self.num_generations, self.accelerator.process_index, self.accelerator.num_processes
        total = len(inputs) * world
        if total % mean:
            raise ValueError(f"a generation batch has {total} rows, which num_generations = {mean} does not divide")
        offset = rank * len(inputs)
        heads = [row for j, row in enumerate(inputs) if (offset + j) % mean == 0]  # one row of each group
        prompts = gather_object(heads)
        decision: dict[str, Any] = {"error": None}
        if self.accelerator.is_main_process:
            try:
                keys = [_plain(row[self._key_column]) for row in prompts]
                if self.entropy_temperature is not None and self.budget_callback.entropies:
                    self.entropy_temperature.update(float(np.mean(self.budget_callback.entropies)))
                decision |= {
                    "keys": keys,
                    "budgets": self.allocator.allocate(keys, total),
                    "temperature": None if self.entropy_temperature is None else self.entropy_temperature.temperature,
                }
            except Exception as error:  # the other ranks wait for a decision: they must hear of it
                if world == 1:
                    raise
                decision["error"] = f"{type(error).__name__}: {error}"
        shared = [decision]
        broadcast_object_list(shared)
        if shared[0]["error"] is not None:
            raise RuntimeError(f"rank 0 could not decide the budgets: {shared[0]['error']}")
        self.budget_callback.entropies = []
        if self._key_column == KEY:  # ours alone: reward functions do not see it
            prompts = [{name: x for name, x in row.items() if name != KEY} for row in prompts]
        return {**shared[0], "prompts": prompts}

    def _set_temperature(self, temperature: float | None) -> None:
        """Of the coming rollouts and, as TRL divides its logits by self.temperature, of their log-probabilities."""
        if temperature is None:
            return
        self.temperature = temperature
        if self.use_vllm:
            self.vllm_generation.temperature = temperature
        else:
            self.generation_config.temperature = temperature
            if isinstance(kwargs := getattr(self, "generation_kwargs", None), dict) and "temperature" in kwargs:
                kwargs["temperature"] = temperature

    def _calculate_rewards(
        self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
    ) -> torch.Tensor:
        """Besides, keeps the rewards, which come back gathered from all ranks."""
        self._scored = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        return self._scored

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        """Besides, keeps the entropy of the micro-batches' first pass for the temperature's next update."""
        loss = super()._compute_loss(model, inputs)
        entropies = self.budget_callback.entropies
        if self.entropy_temperature is not None and self.model.training:
            if len(entropies) < self.args.steps_per_generation:
                entropies.append(float(self._metrics["train"]["entropy"][-1]))
        return loss

    def _mend_logs(
        self, advantages: torch.Tensor, rewards: torch.Tensor, rows: torch.Tensor, prompts: int, aggregation: str
    ) -> None:
        """Replaces what TRL logged of groups of one."""
        logged = self._logs["advantages"]
        for _ in range(min(len(logged), len(advantages))):
            logged.pop()
        logged.extend(advantages.tolist())
        if aggregation == "sum_then_normalize" and self.scale_rewards != "batch":
            total = total_rewards(rewards, self.reward_weights)
            self._metrics["train"]["frac_reward_zero_std"][-1] = zero_spread(total, rows, prompts)

    def _learn(self, keys: list[int | str], rewards: torch.Tensor, index: Any) -> None:
        """Gives the rewards of all ranks to the allocator of rank 0."""
        if not self.accelerator.is_main_process:
            return
        if self._success_column is None:
            outcome = total_rewards(rewards, self.reward_weights)
        else:
            outcome = rewards[:, self._success_column]
        self.allocator.update(keys, outcome.double().cpu().numpy(), index)
        metrics = dict(self.allocator.metrics)
        if self.entropy_temperature is not None:
            metrics |= {name: x for name, x in self.entropy_temperature.metrics.items() if name != "entropy"}
        for name, value in metrics.items():
            self._metrics["train"][f"coba/{name}"].append(value)


def _allocator(allocator: Any, low: int | None, high: int | None) -> Allocator:
    if isinstance(allocator, Allocator):
        if low is not None or high is not None:
            raise ValueError("budget_low and budget_high go with a name; this allocator has its own low and high")
        return allocator
    if not isinstance(allocator, str) or allocator not in ALLOCATORS:
        raise ValueError(f"allocator is {allocator!r}, not a coba_core allocator or one of {', '.join(ALLOCATORS)}")
    return ALLOCATORS[allocator](low=2 if low is None else low, high=128 if high is None else high)


def _plain(key: Any) -> Any:
    """A key as Python's own: a data set in torch or NumPy format gives scalars of theirs."""
    return key.item() if hasattr(key, "item") else key


def _with_keys(dataset: Any, key_column: str | None) -> Any:
    """The data set with a column of keys: its own, or the place of each row."""
    names = dataset.column_names
    if key_column is not None:
        if names is not None and key_column not in names:
            raise ValueError(f"key_column is {key_column!r}; the data set's columns are {', '.join(names)}")
        return dataset
    if names is not None and KEY in names:
        raise ValueError(f"the data set has a column {KEY!r}, a name used here: rename it, or set key_column={KEY!r}")
    if isinstance(dataset, IterableDataset):
        return dataset.map(lambda row, i: {**row, KEY: i}, with_indices=True)
    return dataset.add_column(KEY, np.arange(len(dataset)))


__all__ = [
    "ALLOCATORS",
    "VERSIONS",
    "BudgetCallback",
    "BudgetedGRPOTrainer",
    "check_version",
    "grouped_advantages",
]
