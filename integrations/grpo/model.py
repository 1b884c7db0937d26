"""The policy: any Hugging Face causal LM, or the embedded one; optionally with LoRA."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from .config import TrainConfig
from .parallel import Processes, shard, whole

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pick_device(name: str) -> torch.device:
    """The device of that name; for "auto" CUDA where there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises an AssertionError
        raise ValueError(f"device: {name!r} is not available: {str(error).splitlines()[0]}") from error
    return device


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """No progress bars of transformers' own: they would break the loop's."""
    shown = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers.utils.logging.enable_progress_bar()


class Policy:
    """A model, its tokenizer and what the loop needs to know about them.

    ``forward_arguments`` maps what the loop passes to the names that this model and this version of transformers use.
    """

    def __init__(self, model: torch.nn.Module, tokenizer: Any, config: TrainConfig) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.device = next(model.parameters()).device
        self.autocast = config.autocast
        wrapped: Any = model
        base = wrapped.get_base_model() if hasattr(model, "get_base_model") else wrapped
        parameters = inspect.signature(base.forward).parameters
        self.cache_name = "cache" if "cache" in parameters else "past_key_values"
        self.takes_positions = "position_ids" in parameters
        self.takes_logits_to_keep = "logits_to_keep" in parameters
        self.model_config: Any = base.config
        self.vocab_size: int = base.config.get_text_config().vocab_size
        ends = base.generation_config.eos_token_id
        ends = tokenizer.eos_token_id if ends is None else ends
        stop = tokenizer(config.stop, add_special_tokens=False)["input_ids"] if config.stop else []
        if len(stop) > 1:
            raise ValueError(f"stop: {config.stop!r} is {len(stop)} tokens of this tokenizer, not one")
        self.eos_ids = torch.tensor([*([ends] if isinstance(ends, int) else ends), *stop], device=self.device)

    def forward(
        self, tokens: torch.Tensor, mask: torch.Tensor, *, keep: int, model: torch.nn.Module | None = None
    ) -> torch.Tensor:
        """Logits of the last ``keep`` positions, ``[n, keep, V]``, in the model's dtype; tokens, mask ``[n, L]``."""
        logits: torch.Tensor = self._call(model or self.model, tokens, mask, keep, use_cache=False).logits[:, -keep:]
        return logits

    def step(self, tokens: torch.Tensor, mask: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Logits of the next token, float32 ``[n, V]``, and the cache; tokens are those the cache does not hold yet."""
        out = self._call(self.model, tokens, mask, 1, **{self.cache_name: cache, "use_cache": True})
        return out.logits[:, -1].float(), getattr(out, self.cache_name, None) or out.past_key_values

    def _call(self, model: torch.nn.Module, tokens: torch.Tensor, mask: torch.Tensor, keep: int, **more: Any) -> Any:
        if self.takes_positions:  # padding on the left shifts no position
            more["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        if self.takes_logits_to_keep:
            more["logits_to_keep"] = keep
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            return model(input_ids=tokens, attention_mask=mask, **more)

    def encode(self, prompts: list[Any], *, chat: bool) -> list[list[int]]:
        """Token ids of prompts, texts or messages."""
        if chat or any(not isinstance(p, str) for p in prompts):
            messages = [[{"role": "user", "content": p}] if isinstance(p, str) else list(p) for p in prompts]
            texts = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            return list(self.tokenizer(texts, add_special_tokens=False)["input_ids"])
        return list(self.tokenizer(prompts)["input_ids"])

    def decode(self, completions: list[list[int]]) -> list[str]:
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}  # what was sampled, unchanged
        return list(self.tokenizer.batch_decode(completions, **options))

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by name; those of a sharded model put together, for which every process has to ask."""
        return whole(self.model.state_dict(keep_vars=True))  # type: ignore[no-any-return]

    def save(self, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
        """Weights as safetensors (a LoRA policy: its adapter) and the tokenizer."""
        with without_bars():
            self.model.save_pretrained(folder, state_dict=weights)  # type: ignore[operator]
            self.tokenizer.save_pretrained(folder)


def four_bit(config: TrainConfig, device: torch.device) -> dict[str, Any]:
    """Arguments of from_pretrained for weights in 4 bits as in QLoRA (arXiv 2305.14314): NF4, double quantisation."""
    for package in ("bitsandbytes", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(
                "quantize: '4bit' needs bitsandbytes and accelerate: pip install 'coba-core[qlora]', or set quantize: "
                f"none; {package} is not installed"
            )
    computes = torch.bfloat16 if config.autocast else DTYPES[config.dtype]
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=computes
    )
    return {"quantization_config": settings, "device_map": {"": device}}


def load_policy(
    config: TrainConfig, *, progress: bool = True, weights: Path | None = None, processes: Processes | None = None
) -> Policy:
    """The policy that the configuration names; with the weights of a checkpoint, if its folder is given.

    Divided among ``processes`` where they say so.
    """
    device = pick_device(config.device)
    arguments = dict(config.policy_args)
    source: str | Path = config.policy
    if config.policy == "embedded":
        from .embedded import embedded_policy

        source, arguments = embedded_policy(arguments, progress=progress), {"attn_implementation": "eager"}
    elif config.policy == "skills":
        from .skills import skills_policy

        source, arguments = skills_policy(arguments, progress=progress), {"attn_implementation": "eager"}
    elif config.policy.startswith("package:"):
        from .packaged import packaged_policy

        source = packaged_policy(config.policy.removeprefix("package:"))
    if weights is not None and config.lora is None:
        source = weights
        arguments.pop("gguf_file", None)  # a checkpoint is in the plain layout
    shared = {k: arguments[k] for k in ("gguf_file", "revision", "trust_remote_code") if k in arguments}
    if config.quantize == "4bit":
        arguments |= four_bit(config, device)
    with without_bars():
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, padding_side="left", **shared)
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                source, dtype=DTYPES[config.dtype], **arguments
            )
        except (ImportError, RuntimeError) as error:
            if config.quantize == "none":
                raise
            raise ValueError(
                f"quantize: {config.quantize!r} does not run on {device} with this bitsandbytes ({error}); install "
                "one that supports the device, or set quantize: none"
            ) from error
    if tokenizer.eos_token_id is None:
        raise ValueError(f"policy: the tokenizer of {config.policy!r} has no end-of-sequence token")
    if config.lora is not None:
        import peft

        if config.quantize != "none":
            model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
            for module in model.modules():  # its fast path on CPUs, once taken in sampling, would lose the gradient
                if hasattr(module, "support_avx512bf16_for_cpu"):
                    module.support_avx512bf16_for_cpu = False
        if weights is not None:
            model = peft.PeftModel.from_pretrained(model, str(weights), is_trainable=True)
        else:
            with torch.random.fork_rng():
                torch.manual_seed(config.seed)
                model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **config.lora))
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable()
        if config.lora is not None:
            model.enable_input_require_grads()
    if processes is not None and processes.sharded:
        model = shard(model, device)
    elif config.quantize == "none":  # else it is there
        model = model.to(device)
    return Policy(model, tokenizer, config)
