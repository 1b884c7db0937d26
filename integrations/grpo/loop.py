"""The training loop: prompts, budgets, rollouts, rewards, advantages by group id, one or more optimiser steps."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch

import coba_core
from coba_core.temperature import EntropyTemperature

from ..vllm import VLLMRollouts
from . import checkpoint
from .config import TrainConfig
from .loss import LossSettings, backward, token_weights
from .methods import make_allocator
from .model import Policy, load_policy
from .parallel import divided, join, whole
from .rollouts import Rollouts, generate
from .tasks import Problem, PromptStream, Task, make_task


@dataclasses.dataclass
class Batch:
    """One or more rounds of rollouts: problems ``[M]``, budgets int64 ``[M]``, rewards float64 ``[R]``.

    Tensors are on the policy's device.
    """

    problems: list[Problem]
    budgets: torch.Tensor
    pass_rates: torch.Tensor  # float64 [M], as the allocator estimated them before the rollouts
    rollouts: Rollouts
    rewards: torch.Tensor

    def spread(self) -> torch.Tensor:
        """Whether the rewards of each group differ, bool ``[M]``."""
        largest = self.rewards.new_full((len(self.problems),), -math.inf)
        smallest = -largest
        largest.scatter_reduce_(0, self.rollouts.rows, self.rewards, "amax")
        smallest.scatter_reduce_(0, self.rollouts.rows, self.rewards, "amin")
        return largest > smallest

    def group_means(self) -> torch.Tensor:
        """Mean reward of each prompt, float64 ``[M]``; NaN for a prompt without a rollout."""
        sums = self.rewards.new_zeros(len(self.problems)).scatter_add_(0, self.rollouts.rows, self.rewards)
        return sums / self.budgets


class Trainer:
    """The state of a run and one step of it; :func:`.run.train` adds files, progress and interruption."""

    def __init__(self, config: TrainConfig, *, progress: bool = True, weights: Path | None = None) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        torch.manual_seed(config.seed)
        self.processes, config = join(config)
        self.config = config
        self.task: Task = make_task(config.task, config.task_args)
        if not self.processes.first:
            self.processes.wait()  # the first one makes what the others then find in the cache
        progress = progress and self.processes.first
        self.policy: Policy = load_policy(config, progress=progress, weights=weights, processes=self.processes)
        if self.processes.first:
            self.processes.wait()
        self.prompts = self.policy.encode([p.prompt for p in self.task.train], chat=config.chat)
        for problem, tokens in zip(self.task.train, self.prompts, strict=True):
            if not 0 < len(tokens) <= config.max_prompt_tokens:
                raise ValueError(
                    f"max_prompt_tokens: problem {problem.key!r} has {len(tokens)} tokens, not 1 to "
                    f"{config.max_prompt_tokens}"
                )
        self.engine: VLLMRollouts | None = None
        if config.rollout_engine == "vllm":
            self.engine = VLLMRollouts.for_loop(self.policy, config, longest_prompt=max(map(len, self.prompts)))
        self.allocator = make_allocator(config, len(self.task.train), self.policy.device)
        self.stream = PromptStream(len(self.task.train), config.seed)
        self.sampler = torch.Generator(self.policy.device).manual_seed(config.seed)
        self.settings = LossSettings(**{f.name: getattr(config, f.name) for f in dataclasses.fields(LossSettings)})
        self.temperature: EntropyTemperature | None = None
        if config.entropy_temperature is not None:
            arguments = {"initial": config.temperature, "total_steps": config.steps, **config.entropy_temperature}
            try:
                self.temperature = EntropyTemperature(self.policy.vocab_size, **arguments)
            except TypeError as error:
                raise ValueError(f"entropy_temperature: {error}") from error
        self.parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=config.lr, weight_decay=config.weight_decay)
        self.reference: torch.nn.Module | None = None
        if config.kl_coef > 0:  # the policy as it was before the first step, also in a resumed run
            if weights is None and not self.processes.sharded:  # a sharded model cannot be copied
                self.reference = copy.deepcopy(self.policy.model)
            else:
                self.reference = load_policy(config, progress=progress, processes=self.processes).model
            self.reference = self.reference.eval().requires_grad_(False)
        self.done = 0  # steps
        self.rollouts = 0
        self.allocator_seconds = 0.0

    @property
    def total_rollouts(self) -> int:
        return self.config.steps * self.config.rollouts_per_step

    @property
    def finished(self) -> bool:
        return self.total_rollouts - self.rollouts < self.config.rollouts_per_prompt

    def sampling_temperature(self) -> float:
        return self.config.temperature if self.temperature is None else self.temperature.temperature

    def round(self, prompts: int) -> Batch:
        """The next prompts, their budgets, rollouts and rewards; the allocator learns from them."""
        config = self.config
        indices = self.stream.take(prompts)
        problems = [self.task.train[i] for i in indices]
        on_device = not isinstance(self.allocator.history, coba_core.PassRateHistory)
        keys: Any = torch.tensor(indices, device=self.policy.device) if on_device else [p.key for p in problems]
        pass_rates = torch.as_tensor(self.allocator.history.pass_rates(keys), device=self.policy.device)
        start = time.perf_counter()
        with warnings.catch_warnings():
            if prompts < config.prompts_per_step:  # a refill is small: that its prompts may take much of it is no news
                warnings.simplefilter("ignore", coba_core.BudgetWarning)
            budgets = torch.as_tensor(self.allocator.allocate(keys, prompts * config.rollouts_per_prompt))
        budgets = self.processes.from_first(budgets.to(self.policy.device))
        self.allocator_seconds += time.perf_counter() - start
        arguments: dict[str, Any] = {
            "generator": self.sampler, "max_new_tokens": config.max_new_tokens,
            "temperature": self.sampling_temperature(), "top_p": config.top_p, "top_k": config.top_k,
        }  # fmt: skip
        asked = [self.prompts[i] for i in indices]
        if config.parallel != "none":
            with self.processes.gathered(self.policy.model):
                rollouts, rewards = self.shared_rollouts(problems, asked, budgets, arguments)
        elif self.engine is not None:
            rollouts = self.engine.generate(asked, budgets, **arguments)
        else:
            rollouts = generate(self.policy, asked, budgets, max_rows=config.generation_rows, **arguments)
        if config.parallel == "none":
            rewards = self.score(problems, rollouts)
        start = time.perf_counter()
        self.allocator.update(keys, rewards, rollouts.rows)
        self.allocator_seconds += time.perf_counter() - start
        self.rollouts += len(rewards)
        return Batch(problems, budgets.to(self.policy.device), pass_rates, rollouts, rewards)

    def score(self, problems: list[Problem], rollouts: Rollouts) -> torch.Tensor:
        texts = self.policy.decode(rollouts.completions())
        scores = [self.task.score(problems[i], text) for i, text in zip(rollouts.rows.tolist(), texts, strict=True)]
        return torch.tensor(scores, dtype=torch.float64, device=self.policy.device)

    def shared_rollouts(
        self, problems: list[Problem], asked: list[list[int]], budgets: torch.Tensor, arguments: dict[str, Any]
    ) -> tuple[Rollouts, torch.Tensor]:
        """All rollouts and rewards, of which each process made a share; random numbers are by rollout."""
        rows = torch.repeat_interleave(budgets)
        length = self.config.max_new_tokens
        uniform = torch.rand(
            (len(rows), length), generator=self.sampler, dtype=torch.float64, device=self.policy.device
        )
        costs = torch.tensor([len(p) + length for p in asked], device=rows.device)[rows]
        mine = self.processes.share(costs)
        if len(mine):
            part = generate(
                self.policy, asked, torch.bincount(rows[mine], minlength=len(asked)), uniform=uniform[mine],
                max_rows=self.config.generation_rows, **arguments,
            )  # fmt: skip
            rewards = self.score(problems, part)
        else:  # more processes than rollouts
            width = max(map(len, asked)) + length
            tokens, real = rows.new_zeros((0, width)), torch.zeros((0, length), device=rows.device)
            part = Rollouts(tokens, tokens, real.bool(), real, real, rows[:0])
            rewards = real.new_zeros(0, dtype=torch.float64)
        fields = [getattr(part, field.name) for field in dataclasses.fields(part)]
        *whole, rewards = (self.processes.gather(values, mine, len(rows)) for values in (*fields, rewards))
        return Rollouts(*whole), rewards

    def collect(self) -> tuple[Batch, dict[str, float]]:
        """The rollouts of a step. With filter_zero_spread, groups without spread are replaced by further prompts."""
        config = self.config
        wanted = config.prompts_per_step
        rounds: list[Batch] = []
        kept = 0
        while True:
            affordable = (self.total_rollouts - self.rollouts) // config.rollouts_per_prompt
            prompts = min(wanted - kept, affordable)
            if rounds and (prompts <= 0 or len(rounds) > config.max_refills):
                break
            rounds.append(self.round(prompts))
            kept += int(rounds[-1].spread().sum())
            if not config.filter_zero_spread:
                break
        batch = rounds[0]
        if len(rounds) > 1:
            batch = Batch(
                [p for r in rounds for p in r.problems],
                torch.cat([r.budgets for r in rounds]),
                torch.cat([r.pass_rates for r in rounds]),
                Rollouts.concatenate([r.rollouts for r in rounds], [len(r.problems) for r in rounds]),
                torch.cat([r.rewards for r in rounds]),
            )
        sizes = batch.budgets
        return batch, {
            "prompts": len(sizes), "rounds": len(rounds), "reward": float(batch.rewards.mean()),
            "pass_rate": float(batch.group_means().nanmean()), "mixed_groups": float(batch.spread().float().mean()),
            "budget_min": float(sizes.min()), "budget_max": float(sizes.max()),
            "budget_mean": float(sizes.double().mean()),
            "length": float(batch.rollouts.lengths.float().mean()),
            "entropy": float(batch.rollouts.mean_entropy()),
        }  # fmt: skip

    def biased_rewards(self, batch: Batch) -> torch.Tensor:
        """r - mu l/(1 + mu l) for right answers to the easiest prompts of the step, l tokens long (off by default)."""
        if self.config.length_bias == 0:
            return batch.rewards
        count = math.ceil(self.config.length_bias_share * len(batch.problems))
        easiest = torch.argsort(batch.pass_rates, descending=True, stable=True)[:count]
        easy = torch.isin(batch.rollouts.rows, easiest)
        scaled = self.config.length_bias * batch.rollouts.lengths.double()
        return torch.where(easy & (batch.rewards >= 0.5), batch.rewards - scaled / (1 + scaled), batch.rewards)

    def learning_rate(self, progress: float) -> float:
        """By the share of the rollouts that is spent; the warm-up counts steps."""
        shape = {"constant": 1.0, "linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}
        warm = min(1.0, (self.done + 1) / (self.config.lr_warmup_steps + 1))
        return self.config.lr * warm * shape[self.config.lr_schedule]

    def step(self) -> tuple[Batch, dict[str, float]]:
        """One step; returns what was sampled and the metrics."""
        config = self.config
        start, allocator_before = time.perf_counter(), self.allocator_seconds
        lr = self.learning_rate(self.rollouts / self.total_rollouts)
        temperature = self.sampling_temperature()
        batch, metrics = self.collect()
        sampled = time.perf_counter()
        rollouts, advantages = batch.rollouts, self.advantages(batch)
        if config.filter_zero_spread:
            keep = batch.spread()[rollouts.rows]
            rollouts, advantages = rollouts.select(keep), advantages[keep]
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        metrics |= self.update(rollouts, advantages, temperature)
        if self.engine is not None:
            self.engine.synchronise()
            metrics["engine_gap"] = self.engine.gap
        if self.temperature is not None:
            self.temperature.update(metrics["entropy"])
            if (target := self.temperature.metrics.get("target_entropy")) is not None:
                metrics["target_entropy"] = target
        self.done += 1
        return batch, {
            "step": self.done, "rollouts": self.rollouts, **self.allocator.metrics, **metrics,
            "lr": lr, "temperature": temperature, "seconds_sampling": sampled - start,
            "seconds_training": time.perf_counter() - sampled,
            "seconds_allocator": self.allocator_seconds - allocator_before,
        }  # fmt: skip

    def advantages(self, batch: Batch) -> torch.Tensor:
        rewards = self.biased_rewards(batch)
        found = coba_core.group_advantages(rewards, batch.rollouts.rows, scale=self.config.advantage_scale)
        return torch.as_tensor(found, device=rewards.device).float()

    def update(self, rollouts: Rollouts, advantages: torch.Tensor, temperature: float) -> dict[str, float]:
        """The optimiser steps on these rollouts; none where no rollout carries a gradient."""
        config = self.config
        metrics: dict[str, float] = {"rows": 0.0, "loss": 0.0, "grad_norm": 0.0, "updates": 0.0}
        if not len(advantages):
            return metrics
        weights = token_weights(rollouts, config.weighting)
        everything = torch.arange(len(advantages), device=advantages.device)
        for _ in range(config.passes):
            order = everything
            if config.minibatches > 1:
                order = torch.randperm(len(everything), generator=self.sampler, device=everything.device)
            for part in order.tensor_split(config.minibatches):
                if not len(part):
                    continue
                self.optimizer.zero_grad(set_to_none=True)
                parts = backward(
                    self.policy, rollouts, advantages, self.settings, temperature, chosen=part, weights=weights,
                    reference=self.reference, processes=None if config.parallel == "none" else self.processes,
                )  # fmt: skip
                if parts["rows"]:
                    of_all = torch.nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
                    norm = float(whole(of_all) if self.processes.sharded else of_all)
                    if math.isfinite(norm):  # else this update is left out: it would destroy the weights
                        self.optimizer.step()
                        metrics["updates"] += 1
                    metrics["grad_norm"] = norm
                metrics |= {**parts, "rows": metrics["rows"] + parts["rows"]}
        return metrics

    def save(self, folder: Path) -> Path | None:
        """A checkpoint from which :meth:`restore` goes on exactly.

        Every process has to call it; the first one writes the files and returns the folder, the others None.
        """
        weights, optimizer = None, self.optimizer.state_dict()
        if self.processes.sharded:
            weights, optimizer = self.policy.weights(), whole(optimizer)
        cuda = torch.cuda.get_rng_state(self.policy.device) if self.policy.device.type == "cuda" else None
        random: dict[str, Any] = {"torch": torch.get_rng_state(), "cuda": cuda}
        if self.processes.size > 1:  # what dropout draws from is each process's own
            random["torch_of_all"] = self.processes.rows(random["torch"], self.policy.device)
            random["cuda_of_all"] = None if cuda is None else self.processes.rows(cuda, self.policy.device)
        if not self.processes.first:
            return None
        return checkpoint.save(
            folder, self.done, keep=self.config.keep_checkpoints,
            model=lambda to: self.policy.save(to, weights),
            training={"optimizer": optimizer, "sampler": self.sampler.get_state(), **random},
            allocator=self.allocator.state_dict(),
            progress={
                "done": self.done, "rollouts": self.rollouts, "position": self.stream.position,
                "allocator_seconds": self.allocator_seconds,
                "temperature": None if self.temperature is None else self.temperature.state_dict(),
            },
        )  # fmt: skip

    def restore(self, folder: Path) -> None:
        """All of a checkpoint but the weights, which the constructor took."""
        training, allocator, progress = checkpoint.load(folder, torch.device("cpu"))
        optimizer = training["optimizer"]
        self.optimizer.load_state_dict(divided(optimizer, self.parameters) if self.processes.sharded else optimizer)
        self.sampler.set_state(training["sampler"])
        of_all = training.get("torch_of_all")
        for name in ("torch", "cuda"):
            if of_all is not None and len(of_all) == self.processes.size and training[f"{name}_of_all"] is not None:
                training[name] = training[f"{name}_of_all"][self.processes.rank].clone()  # torch reads from its start
        torch.set_rng_state(training["torch"])
        if training["cuda"] is not None and self.policy.device.type == "cuda":
            torch.cuda.set_rng_state(training["cuda"], self.policy.device)
        self.allocator.load_state_dict(allocator)
        self.done, self.rollouts = progress["done"], progress["rollouts"]
        self.stream.position, self.allocator_seconds = progress["position"], progress["allocator_seconds"]
        if self.temperature is not None and progress["temperature"] is not None:
            self.temperature.load_state_dict(progress["temperature"])
