"""verl: a budget for each prompt, as trainer mode ``coba_sync`` of the V1 trainer.

    python3 -m verl.trainer.main_ppo trainer.v1.trainer_mode=coba_sync +coba.allocator=coba +coba.high=128 ...

verl imports this module by itself, in every process that imports verl, through the entry point ``verl.plugins``; it
keeps an import error of a plugin to itself, so call :func:`check` before a run. A step's total is
data.train_batch_size * actor_rollout_ref.rollout.n: n becomes the mean size of a group. docs/verl.md has every key.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer

from coba_core import Allocator, EntropyTemperature, prompt_weights
from coba_core.kernels.numpy_backend import Floats, Ints
from coba_core.state import check_state, read_state, whole_number, write_state

from .grpo.config import TrainConfig
from .grpo.methods import make_allocator

MODE = "coba_sync"
VERSIONS = ((0, 9, 1), (0, 10))
"""First version of verl that this was tested with, and the first that it is not."""
GROUPED_ESTIMATORS = ("grpo", "grpo_vectorized", "rloo", "rloo_vectorized")
"""Values of algorithm.adv_estimator that compare a rollout with those of the same uid, however many there are."""
STATE_FILE = "coba.json"
KIND = "coba_core.integrations.verl"


@dataclasses.dataclass(frozen=True)
class BudgetConfig:
    """The group ``coba`` of verl's configuration; what is not a field here is an argument of the allocator.

    allocator: uniform, coba, coba_released, coba_explore_first, fixed, linear, lean, knapsack, rank or e3, value.
    low, high: bounds of a prompt's budget. tau: of the exponential saturation. seed: of the allocator's noise.
    prompt_weighting: "rollout" as verl weighs (a prompt counts in proportion to its budget) or "prompt" (all the same).
    key: the field of the data set, or a list of them, that names a prompt. metric: "reward", or a field of the reward
    function's extra information such as "acc": what success is judged by. temperature: arguments of EntropyTemperature,
    or None. fresh_history: start without a history where the checkpoint has none.
    """

    allocator: str = "coba"
    low: int = 2
    high: int = 128
    tau: float | None = None
    seed: int = 0
    prompt_weighting: str = "rollout"
    key: str | list[str] = "index"
    metric: str = "reward"
    temperature: dict[str, Any] | None = None
    fresh_history: bool = False
    allocator_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_verl(cls, config: DictConfig) -> BudgetConfig:
        """The group of a verl configuration; ValueError for a value that cannot be."""
        group = config.get("coba", None)
        if group is not None and not OmegaConf.is_dict(group):
            raise ValueError(f"coba is {group!r}: give its keys one by one, such as +coba.allocator=coba")
        given: dict[str, Any] = {} if group is None else OmegaConf.to_container(group, resolve=True)
        own = {field.name for field in dataclasses.fields(cls)} - {"allocator_args"}
        rest = {name: value for name, value in given.items() if name not in own}
        result = cls(**{name: value for name, value in given.items() if name in own}, allocator_args=rest)
        result._check()
        return result

    def _check(self) -> None:
        if whole_number("coba.low", self.low) < 2:
            raise ValueError(f"coba.low is {self.low}: a group of fewer than 2 has nothing to compare a rollout with")
        if whole_number("coba.high", self.high) < self.low:
            raise ValueError(f"coba.high is {self.high}, below coba.low, which is {self.low}")
        whole_number("coba.seed", self.seed, at_least=0)
        if self.prompt_weighting not in ("rollout", "prompt"):
            raise ValueError(f"coba.prompt_weighting is {self.prompt_weighting!r}, not 'rollout' or 'prompt'")
        if (
            not isinstance(self.key, (str, list))
            or not self.key
            or not all(isinstance(name, str) and name for name in self.key_fields)
        ):
            raise ValueError(f"coba.key is {self.key!r}, not the name of a field or a list of names")
        if not isinstance(self.metric, str) or not self.metric:
            raise ValueError(f"coba.metric is {self.metric!r}, not 'reward' or a field of the reward's extra info")
        if not isinstance(self.fresh_history, bool):
            raise ValueError(f"coba.fresh_history is {self.fresh_history!r}, not true or false")
        if self.temperature is not None and not isinstance(self.temperature, dict):
            raise ValueError(
                f"coba.temperature is {self.temperature!r}: give the arguments of EntropyTemperature one by one, such "
                "as +coba.temperature.high=1.5, or +coba.temperature={} for its defaults"
            )
        saturated = ("coba", "coba_explore_first", "fixed", "linear", "lean", "value")
        for name in ("tau", "saturation"):
            given = self.tau if name == "tau" else self.allocator_args.get("saturation")
            if given is not None and self.allocator not in saturated:
                raise ValueError(f"coba.{name} is {given!r}, which coba.allocator={self.allocator} does not take")
        if self.tau is not None and "saturation" in self.allocator_args:
            raise ValueError("coba.tau and coba.saturation both set the saturation: give one of them")

    @property
    def key_fields(self) -> list[str]:
        return [self.key] if isinstance(self.key, str) else list(self.key)

    def make_allocator(self, rollouts: int, steps: int, dataset_size: int) -> Allocator:
        """The allocator, on the CPU; ValueError for a name or an argument that does not exist."""
        arguments = dict(self.allocator_args)
        if self.tau is not None:
            arguments["saturation"] = {"name": "exponential", "tau": self.tau}
        try:
            config = TrainConfig(
                allocator="rank" if self.allocator == "e3" else self.allocator,
                allocator_args=arguments,
                budget_low=self.low,
                budget_high=self.high,
                rollouts_per_prompt=rollouts,
                steps=steps,
                seed=self.seed,
            )
            return make_allocator(config, dataset_size, torch.device("cpu"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"+coba.*: {error}") from error


def check_config(config: DictConfig, budget: BudgetConfig) -> None:
    """ValueError, with the key and what to set instead, for a configuration that unequal groups do not work with."""
    rollout = config.actor_rollout_ref.rollout
    if not budget.low <= rollout.n <= budget.high:
        raise ValueError(
            f"actor_rollout_ref.rollout.n is {rollout.n}, the mean budget, which must lie within [coba.low, coba.high] "
            f"= [{budget.low}, {budget.high}]"
        )
    estimator = str(getattr(config.algorithm.adv_estimator, "value", config.algorithm.adv_estimator))
    if estimator not in GROUPED_ESTIMATORS:
        raise ValueError(
            f"algorithm.adv_estimator is {estimator!r}, which does not compare the rollouts of a prompt by its uid "
            f"alone: set one of {', '.join(GROUPED_ESTIMATORS)}"
        )
    if config.critic.get("enable"):
        raise ValueError("critic.enable is true: its mini-batches count prompts of equal size; set critic.enable=False")
    if (config.algorithm.get("filter_groups") or {}).get("enable"):
        raise ValueError(
            "algorithm.filter_groups.enable is true: verl then asks for prompts one at a time, and their replacements "
            "come outside the step's decision; set it to False and let the budgets avoid groups of equal rewards"
        )
    sampler = config.trainer.v1.sampler
    if sampler.get("sync_refill_failed_groups"):
        raise ValueError(
            "trainer.v1.sampler.sync_refill_failed_groups is true: replacements come outside the step's decision; "
            "set it to False (a failed rollout then makes its group smaller)"
        )
    if (sampler.get("custom_sampler") or {}).get("path"):
        raise ValueError(
            f"trainer.v1.sampler.custom_sampler.path is {sampler.custom_sampler.path!r}: a sampler of one's own may "
            "leave prompts out of a step that the budgets count on; leave it null"
        )
    if ((config.get("skip") or {}).get("rollout_tq") or {}).get("enable"):
        raise ValueError("skip.rollout_tq.enable is true: stored rollouts have another run's budgets; set it to False")
    prompts, mini_batch = config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size
    if prompts % mini_batch:
        raise ValueError(
            f"data.train_batch_size is {prompts}, which actor_rollout_ref.actor.ppo_mini_batch_size = {mini_batch} "
            "does not divide: the last mini-batch of every step would be padding for the most part"
        )
    if budget.temperature is not None and (config.algorithm.get("rollout_correction") or {}).get("bypass_mode"):
        raise ValueError(
            "algorithm.rollout_correction.bypass_mode is true: verl then measures no entropy, which coba.temperature "
            "needs; set it to False"
        )


def check_version() -> str:
    """The version of verl; RuntimeError if it is not one that this module was tested with."""
    version = importlib.metadata.version("verl")
    numbers = tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in version.split(".")[:3])
    first, beyond = VERSIONS
    if not first <= numbers < beyond:
        limits = [".".join(map(str, x)) for x in VERSIONS]
        raise RuntimeError(
            f"verl is {version}; {MODE} overrides private methods of its trainer and was tested with verl "
            f">={limits[0]},<{limits[1]}: pip install 'verl>={limits[0]},<{limits[1]}'"
        )
    return version


def check(cluster: bool = False) -> str:
    """Says that verl will find the trainer mode here or, with `cluster`, on every node of the connected Ray cluster.

    RuntimeError with the reason otherwise: a wrong version of verl, coba_core not installed (its entry point is
    missing), or plugins turned off. Run it before a launch, as verl itself only reports an unknown trainer:
    ``python3 -c "from coba_core.integrations import verl; print(verl.check())"``.
    """
    if cluster:
        return _check_nodes()
    version = check_version()
    if __name__ in os.environ.get("VERL_USE_EXTERNAL_MODULES", "").split(","):
        return f"verl {version}: {MODE} is registered through VERL_USE_EXTERNAL_MODULES"
    names = [x.name for x in importlib.metadata.entry_points(group="verl.plugins") if x.value == __name__]
    if not names:
        raise RuntimeError(
            f"no entry point of the group verl.plugins names {__name__}: install coba-core with pip (a path on "
            f"PYTHONPATH is not enough), or set VERL_USE_EXTERNAL_MODULES={__name__}"
        )
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if policy != "auto" and names[0] not in [name.strip() for name in policy.split(",")]:
        raise RuntimeError(f"VERL_USE_EXTERNAL_PLUGINS is {policy!r}, which leaves {names[0]!r} out: unset it")
    return f"verl {version}: {MODE} is registered through the entry point {names[0]!r}"


def _check_nodes() -> str:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def found() -> str:
        from coba_core.integrations import verl

        return verl.check()

    task = ray.remote(num_cpus=0)(found)
    lines = []
    for node in ray.nodes():
        if node["Alive"]:
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            name = node["NodeManagerAddress"]
            try:
                lines.append(f"{name}: {ray.get(task.options(scheduling_strategy=where).remote())}")
            except ray.exceptions.RayTaskError as error:
                raise RuntimeError(f"node {name}: {error.cause!r}") from error
    return "\n".join(lines)


def session_rows(keys: list[str]) -> tuple[list[str], Ints]:
    """(uids [S], last row int64 [S]) of the sessions of a batch: one session is one rollout.

    keys: of the batch, [R], each ``{uid}_{session}_{output}``. An agent loop may have several outputs, rows of one
    session; the last one carries the reward.

    >>> session_rows(["a_0_0", "a_0_1", "b_0_0"])
    (['a', 'b'], array([1, 2]))
    """
    last: dict[tuple[str, str], tuple[int, int]] = {}
    for row, key in enumerate(keys):
        uid, session, output = key.rsplit("_", 2)
        if last.get((uid, session), (-1, -1))[0] < int(output):
            last[uid, session] = int(output), row
    return [uid for uid, _ in last], np.array([row for _, row in last.values()], dtype=np.int64)


def row_factors(rows: Ints, weighting: str) -> Floats:
    """What the advantage of each rollout is multiplied by, float64 [S]; rows[j]: the prompt of rollout j.

    0 in a group of one, whose advantage verl makes its reward; else 1, or with ``weighting="prompt"`` the mean size of
    a group over its own, so that every prompt has the same weight in a mean over rollouts.

    >>> row_factors(np.array([0, 0, 1, 1, 1, 1, 2]), "rollout")
    array([1., 1., 1., 1., 1., 1., 0.])
    """
    sizes = np.bincount(rows)[rows]
    factors = len(rows) * np.asarray(prompt_weights(rows)) if weighting == "prompt" else np.ones(len(rows))
    return np.where(sizes > 1, factors, 0.0)


@register_trainer(MODE)
class BudgetedPPOTrainer(PPOTrainerSync):  # type: ignore[misc]  # verl has no types
    """verl's synchronous trainer with a budget for each prompt.

    Before the rollouts of a step `allocate` decides, after their rewards `update` takes them; the state is in verl's
    checkpoint, ``global_step_N/coba.json``; metrics are logged as ``coba/...``.
    """

    def _build_replay_buffer(self) -> Any:
        check_version()
        self.budget = BudgetConfig.from_verl(self.config)
        check_config(self.config, self.budget)
        self.trainer_mode = "sync"  # verl compares this string in several places
        return super()._build_replay_buffer()

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        rollout = self.config.actor_rollout_ref.rollout
        self.allocator = self.budget.make_allocator(rollout.n, self.total_training_steps, len(self.train_dataset))
        self.temperature: EntropyTemperature | None = None
        if self.budget.temperature is not None:
            options = {"initial": rollout.temperature, "vocab_size": len(self.tokenizer), **self.budget.temperature}
            try:
                self.temperature = EntropyTemperature(**options)
            except (TypeError, ValueError) as error:
                raise ValueError(f"+coba.temperature.*: {error}") from error
        self._position: dict[str, int] = {}

    def _submit_batch_to_rollout(self, batch: TensorDict) -> int:
        """Decides the step's budgets and hands them to the agent loop, which takes n from each prompt."""
        keys = self._prompt_keys(batch)
        budgets = self.allocator.allocate(keys, len(keys) * self.config.actor_rollout_ref.rollout.n)
        self._keys, self._planned = keys, budgets
        self._position = {uid: i for i, uid in enumerate(batch["uid"])}
        batch["__rollout_n__"] = torch.from_numpy(budgets)
        if self.temperature is not None:
            self._set_temperature(self.temperature.temperature)
        return int(super()._submit_batch_to_rollout(batch))

    def _prompt_keys(self, batch: TensorDict) -> list[int | str]:
        """The stable key of each prompt; ValueError if two prompts share one."""
        fields = self.budget.key_fields
        for name in fields:
            if name not in batch.keys():
                known = sorted(map(str, batch.keys()))
                raise ValueError(f"coba.key is {self.budget.key!r}; the data set's fields are {', '.join(known)}")
        columns = [list(batch[name]) for name in fields]
        keys = columns[0] if len(columns) == 1 else ["/".join(map(str, parts)) for parts in zip(*columns, strict=True)]
        first: dict[int | str, Any] = {}
        for i, (key, prompt) in enumerate(zip(keys, batch["raw_prompt"], strict=True)):
            if first.setdefault(key, prompt) != prompt:
                raise ValueError(
                    f"prompt {i} of the step has the key {key!r}, as another one has: {prompt!r} and {first[key]!r}. "
                    "verl takes index from the column extra_info (0 where that is missing): give every prompt its own "
                    "there, or name other fields, such as '+coba.key=[data_source,index]'"
                )
        return keys

    def _set_temperature(self, temperature: float) -> None:
        """The same temperature for the rollouts of the coming step and, here, for their log-probabilities."""
        import ray

        def set_it(worker: Any) -> None:
            worker.config.actor_rollout_ref.rollout.temperature = temperature

        self.config.actor_rollout_ref.rollout.temperature = temperature
        ray.get([worker.__ray_call__.remote(set_it) for worker in self.agent_loop_manager.agent_loop_workers])

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Besides, gives the mean entropy of the sampled tokens, at their temperature, to the temperature's rule."""
        batch = super()._compute_old_log_prob(batch, metrics)
        if self.temperature is not None:
            fields = ["entropy", "response_mask"]
            data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
            entropy, mask = data["entropy"].values().double(), data["response_mask"].values().double()
            metrics["coba/temperature"] = self.temperature.temperature  # what these rollouts were sampled with
            self.temperature.update(float((entropy * mask).sum() / mask.sum()))
            metrics |= {f"coba/{name}": self.temperature.metrics[name] for name in ("entropy", "target_entropy")}
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """Besides, mends and weighs the advantages of unequal groups, and gives the rewards to the allocator."""
        batch = super()._compute_advantage(batch, metrics)
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        uids, last = session_rows([batch.keys[i] for i in real])
        rows = np.array([self._position[uid] for uid in uids], dtype=np.int64)
        self._scale_advantages(batch, uids, row_factors(rows, self.budget.prompt_weighting))
        outcomes = self._outcomes([batch.keys[real[i]] for i in last], batch.partition_id)
        self.allocator.update(self._keys, outcomes, rows)
        metrics |= {f"coba/{name}": value for name, value in self.allocator.metrics.items()}
        metrics["coba/missing_rollouts"] = float(self._planned.sum() - len(rows))
        return batch

    def _scale_advantages(self, batch: Any, uids: list[str], factors: Floats) -> None:
        of_prompt = dict(zip(uids, factors.tolist(), strict=True))
        rows = [(key, of_prompt.get(key.rsplit("_", 2)[0], 1.0)) for key in batch.keys]
        scaled = [(key, factor) for key, factor in rows if factor != 1.0]
        if not scaled:
            return
        keys = [key for key, _ in scaled]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=["advantages"])
        values = [x * factor for x, (_, factor) in zip(data["advantages"].unbind(), scaled, strict=True)]
        nested = torch.nested.as_nested_tensor(values, layout=torch.jagged)
        fields = TensorDict({"advantages": nested}, batch_size=len(keys))
        tq.kv_batch_put(keys=keys, partition_id=batch.partition_id, fields=fields)

    def _outcomes(self, keys: list[str], partition_id: str) -> Floats:
        """What success is judged by, float64, one a key."""
        name = self.budget.metric
        if name == "reward":
            data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["rm_scores"])
            return np.array([float(row.sum()) for row in data["rm_scores"].unbind()])
        data = tq.kv_batch_get(keys=keys, partition_id=partition_id, select_fields=["extra_fields"])
        extras = [extra.get("reward_extra_info", {}) for extra in data["extra_fields"]]
        for extra in extras:
            if name not in extra:
                known = ", ".join(sorted(extra)) or "empty"
                raise ValueError(f"coba.metric is {name!r}; the reward's extra information is {known}")
        return np.array([float(extra[name]) for extra in extras])

    def _save_checkpoint(self) -> None:
        # Before verl's own files: it ends with the one that makes this checkpoint the latest.
        folder = Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"
        folder.mkdir(parents=True, exist_ok=True)
        self._write_state(folder / STATE_FILE)
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if not self.global_steps:
            return
        trainer = self.config.trainer
        folder = Path(trainer.default_local_dir) / f"global_step_{self.global_steps}"
        if trainer.resume_mode == "resume_path":
            folder = Path(trainer.resume_from_path)
        self._read_state(folder / STATE_FILE)

    def _write_state(self, path: Path) -> None:
        temperature = None if self.temperature is None else self.temperature.state_dict()
        state = {"kind": KIND, "version": 1, "allocator": self.allocator.state_dict(), "temperature": temperature}
        write_state(path, state)

    def _read_state(self, path: Path) -> None:
        """An error names the file; a missing one is passed over with coba.fresh_history."""
        if not path.exists():
            if self.budget.fresh_history:
                return
            raise FileNotFoundError(
                f"{path} is missing: the checkpoint was made without {MODE}. To go on from it with an empty history, "
                "set +coba.fresh_history=true"
            )
        state = read_state(path)
        try:
            check_state(state, KIND, 1, ("allocator", "temperature"))
            if (state["temperature"] is None) != (self.temperature is None):
                raise ValueError("it was made with coba.temperature and this run has none, or the reverse")
            if self.temperature is not None:
                self.temperature.load_state_dict(state["temperature"])
            self.allocator.load_state_dict(state["allocator"])
        except ValueError as error:
            raise ValueError(f"state file {path}: {error}") from error


class _Refused(PPOTrainerSync):  # type: ignore[misc]  # verl has no types
    """Says why there is no asynchronous mode, to whom asks for one."""

    def __init__(self, config: DictConfig) -> None:
        raise ValueError(
            f"trainer.v1.trainer_mode is {config.trainer.v1.trainer_mode!r}, which does not exist: verl's asynchronous "
            "trainers train on the prompts whose groups are complete first. Large groups are complete last, so a batch "
            "would not have as many rows as were allocated and verl would pad it to a multiple of the mini-batch; the "
            f"pass rates would be of an older policy, too. Set trainer.v1.trainer_mode={MODE}"
        )


register_trainer("coba_colocate_async")(_Refused)
register_trainer("coba_separate_async")(_Refused)
