"""The configuration of a run: one dataclass, filled from YAML and the command line. Imports no framework."""

from __future__ import annotations

import dataclasses
import os
import re
import typing
from typing import Any, Literal

from coba_core.state import finite_number, read_text

ALLOCATORS = (
    "uniform", "coba", "coba_released", "coba_explore_first", "knapsack", "rank", "fixed", "linear", "lean", "value",
)  # fmt: skip
RESUMABLE = ("steps", "stop_after", "threads", "checkpoint_every", "keep_checkpoints", "eval_every", "tensorboard")
"""What may change when a run is resumed; all else would make it another run."""


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. A ValueError names the field that is wrong."""

    # Policy: "embedded", "skills", "package:NAME" (packaged.py), or the name or path of any causal LM. policy_args:
    # fields of embedded.Warmup or skills.SkillsWarmup, or keyword arguments of from_pretrained. lora: of LoraConfig.
    policy: str = "embedded"
    policy_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    lora: dict[str, Any] | None = None
    quantize: Literal["none", "4bit"] = "none"  # QLoRA: lora on weights in 4 bits, by bitsandbytes
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    autocast: bool = False  # compute in bfloat16, keep the weights in dtype
    gradient_checkpointing: bool = False
    device: str = "auto"
    threads: int = 0  # of torch on the CPU; 0 leaves them alone

    # Task and its arguments: see tasks.py.
    task: Literal["arithmetic", "skills", "reasoning_gym", "file"] = "arithmetic"
    task_args: dict[str, Any] = dataclasses.field(default_factory=dict)
    chat: bool = False  # put prompts through the tokenizer's chat template
    max_prompt_tokens: int = 1024

    # Budget of a step: prompts_per_step * rollouts_per_prompt rollouts, each prompt within [budget_low, budget_high].
    # The run ends after `steps` steps' worth of rollouts.
    steps: int = 100
    prompts_per_step: int = 64
    rollouts_per_prompt: int = 8
    budget_low: int = 2
    budget_high: int = 64
    allocator: str = "coba"
    allocator_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    # Sampling
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 8
    stop: str = ""  # a text of one token that ends a completion, besides the end of sequence
    generation_rows: int = 4096  # rollouts generated at a time
    # Who samples: "generate" is this loop, "vllm" an engine in its process (docs/vllm.md). rollout_engine_args are for
    # coba_core.integrations.vllm.VLLMRollouts and for vllm.LLM. Evaluation samples by "generate".
    rollout_engine: Literal["generate", "vllm"] = "generate"
    rollout_engine_args: dict[str, Any] = dataclasses.field(default_factory=dict)

    # Loss and optimiser
    lr: float = 1e-4
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    lr_warmup_steps: int = 0
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    entropy_coef: float = 0.0  # 2505.18573's counter-example: 1e-4
    weighting: Literal["token", "sequence", "prompt"] = "token"
    advantage_scale: Literal["group", "none", "batch"] = "group"
    minibatches: int = 1  # optimiser steps a pass over the rollouts
    passes: int = 1  # passes over the rollouts of a step
    micro_batch_tokens: int = 16384  # bounds the memory of a backward pass, whatever the budgets

    # "ddp": rollouts and gradients are shared by the processes that torchrun started; "fsdp2" also divides weights,
    # gradients and the optimiser's state among them (docs/training.md). Both draw other random numbers than "none", the
    # same for any number of processes.
    parallel: Literal["none", "ddp", "fsdp2"] = "none"

    # From E3 and DAPO. entropy_temperature: keyword arguments of coba_core.temperature.EntropyTemperature.
    entropy_temperature: dict[str, Any] | None = None
    filter_zero_spread: bool = False  # replace groups of equal rewards by groups of further prompts
    max_refills: int = 3
    length_bias: float = 0.0  # mu in r = 1 - mu l / (1 + mu l), for right answers of l tokens to the easiest prompts
    length_bias_share: float = 0.25

    # Evaluation on the held-out problems
    eval_every: int = 20  # 0: only before the first and after the last step
    eval_samples: int = 8
    eval_problems: int = 0  # 0: all
    eval_temperature: float = 1.0
    eval_top_p: float = 1.0

    # Run
    seed: int = 0
    output: str = "out/train"
    checkpoint_every: int = 50  # 0: only after the last step
    keep_checkpoints: int = 2
    stop_after: int = 0  # stop, saved, once so many steps are done in all; 0: never
    tensorboard: bool = True

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _typed(field.name, getattr(self, field.name), hints[field.name]))
        if self.allocator not in ALLOCATORS:
            raise ValueError(f"allocator: {self.allocator!r} is none of {', '.join(ALLOCATORS)}")
        bounds = {
            "steps prompts_per_step rollouts_per_prompt max_prompt_tokens max_new_tokens generation_rows minibatches "
            "passes micro_batch_tokens eval_samples keep_checkpoints": (1, None),
            "threads budget_low top_k lr_warmup_steps weight_decay kl_coef entropy_coef max_refills length_bias "
            "eval_every eval_problems seed checkpoint_every stop_after": (0, None),
            "length_bias_share clip_low": (0, 1),
        }
        for names, (low, high) in bounds.items():
            for name in names.split():
                value = getattr(self, name)
                if value < low or (high is not None and value > high):
                    limits = f"at least {low}" if high is None else f"from {low} to {high}"
                    raise ValueError(f"{name}: must be {limits}, got {value}")
        for name in ("temperature", "lr", "max_grad_norm", "clip_high", "eval_temperature", "top_p", "eval_top_p"):
            value = getattr(self, name)
            if not value > 0 or (name.endswith("top_p") and value > 1):
                raise ValueError(f"{name}: must be above 0{' and at most 1' if 'top_p' in name else ''}, got {value}")
        if not self.budget_low <= self.rollouts_per_prompt <= self.budget_high:
            raise ValueError(
                f"rollouts_per_prompt: must lie within [budget_low, budget_high] = [{self.budget_low}, "
                f"{self.budget_high}], got {self.rollouts_per_prompt}"
            )
        if self.rollout_engine_args and self.rollout_engine == "generate":
            raise ValueError("rollout_engine_args: 'generate' takes none; set rollout_engine: vllm, or leave them out")
        if self.rollout_engine == "vllm" and self.parallel != "none":
            raise ValueError("rollout_engine: 'vllm' runs in one process only; set parallel: none, or use generate")
        if self.quantize != "none":
            if self.lora is None:
                raise ValueError(f"quantize: {self.quantize!r} trains adapters only; set lora, or leave it at none")
            if self.parallel == "fsdp2" or self.rollout_engine == "vllm":
                name = "parallel" if self.parallel == "fsdp2" else "rollout_engine"
                raise ValueError(
                    f"quantize: {self.quantize!r} does not go with {name}: {getattr(self, name)}, which takes weights "
                    "of 16 or 32 bits; set quantize: none, or parallel: ddp and rollout_engine: generate"
                )
        if not self.output:
            raise ValueError("output: must name a folder")

    @property
    def rollouts_per_step(self) -> int:
        return self.prompts_per_step * self.rollouts_per_prompt

    def replace(self, **changes: Any) -> TrainConfig:
        """A copy with these fields changed; checked like the original."""
        unknown = sorted(set(changes) - {f.name for f in dataclasses.fields(self)})
        if unknown:
            raise ValueError(f"{unknown[0]}: no such field of the configuration")
        return dataclasses.replace(self, **changes)

    def override(self, assignments: list[str]) -> TrainConfig:
        """A copy after assignments ``field=value`` or ``field.key=value``; values are YAML."""
        changes: dict[str, Any] = {}
        for assignment in assignments:
            path, equals, text = assignment.partition("=")
            if not equals or not path:
                raise ValueError(f"{assignment!r}: expected field=value")
            name, *keys = path.strip().replace("-", "_").split(".")
            if not keys:
                changes[name] = parse_yaml(text, path)
                continue
            inner = changes[name] = dict(changes.get(name, getattr(self, name, None)) or {})
            for key in keys[:-1]:
                inner[key] = dict(inner.get(key) or {})
                inner = inner[key]
            inner[keys[-1]] = parse_yaml(text, path)
        return self.replace(**changes)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def _typed(name: str, value: Any, hint: Any) -> Any:
    """value as a ``hint``, where nothing is lost (an int for a float); else a ValueError naming the field."""
    options = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        if value not in options:
            raise ValueError(f"{name}: {value!r} is none of {', '.join(options)}")
        return value
    kind = typing.get_origin(hint) or hint
    if type(None) in options:
        if value is None:
            return None
        kind = dict
    if kind is float and type(value) is int:
        value = finite_number(name, value)
    if type(value) is not kind:
        raise ValueError(f"{name}: expected {kind.__name__}, got {value!r}")
    if kind is float and value - value != 0:
        raise ValueError(f"{name}: must be finite, got {value}")
    return value


def parse_yaml(text: str, source: str) -> Any:
    """YAML by the safe loader, which also reads 1e-4 as a number; a ValueError names ``source``."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        pass

    number = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", number, list("-+0123456789."))
    try:
        return yaml.load(text, Loader=Loader)  # a subclass of SafeLoader
    except yaml.YAMLError as error:
        raise ValueError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from error


def load_config(path: str | os.PathLike[str] | None) -> TrainConfig:
    """The configuration in a YAML file; the defaults for None."""
    if path is None:
        return TrainConfig()
    content = parse_yaml(read_text(path), str(path))
    if content is None:
        content = {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise ValueError(f"{path}: expected a mapping of fields to values")
    try:
        return TrainConfig().replace(**content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def dump_config(config: TrainConfig) -> str:
    """The configuration as YAML, in the order of the fields."""
    import yaml

    return str(yaml.safe_dump(config.to_dict(), sort_keys=False))
