"""The embedded policy: a Qwen2-architecture model of 0.08 M parameters with its own character tokenizer.

It is warmed up by supervised training on the spot (once, then kept in the user's cache folder): clean arithmetic
first, then answers whose digits are replaced at random at a rate that grows with difficulty. So its pass rates start
spread from 0 to 1, and reinforcement has noise to remove: a controlled instrument to compare methods on, not the
discovery of a new skill.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from . import arithmetic
from .model import without_bars


@dataclasses.dataclass(frozen=True)
class Warmup:
    """Everything that determines the warmed-up weights; its hash is their name in the cache.

    In the last steps a digit of an answer is replaced by a random one at a rate of 0 for the easiest kind, rising with
    the square of its rank to ``noise`` for the hardest.
    """

    steps: int = 1400
    clean_share: float = 0.6
    batch: int = 128
    lr: float = 6e-3
    seed: int = 0
    hidden: int = 64
    layers: int = 2
    noise: float = 0.3


def build_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character of arithmetic.VOCABULARY."""
    core = Tokenizer(models.WordLevel({t: i for i, t in enumerate(arithmetic.VOCABULARY)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )


def build_model(warmup: Warmup) -> transformers.Qwen2ForCausalLM:
    """The untrained model. Eager attention: on sequences this short it is faster than sdpa."""
    pad, eos = arithmetic.VOCABULARY.index("<pad>"), arithmetic.VOCABULARY.index("<eos>")
    config = transformers.Qwen2Config(
        vocab_size=len(arithmetic.VOCABULARY), hidden_size=warmup.hidden, intermediate_size=2 * warmup.hidden,
        num_hidden_layers=warmup.layers, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64,
        tie_word_embeddings=True, pad_token_id=pad, eos_token_id=eos, bos_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(warmup.seed)
        return transformers.Qwen2ForCausalLM(config)


def warm_up(warmup: Warmup, *, progress: bool = True) -> transformers.Qwen2ForCausalLM:
    """Train the embedded model: a fixed number of steps on one thread, so that a seed gives the same weights.

    More threads would gain little on sums this small, and lose much where other programs compete for the cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _warm_up(warmup, progress)
    finally:
        torch.set_num_threads(threads)


def _warm_up(warmup: Warmup, progress: bool) -> transformers.Qwen2ForCausalLM:
    model = build_model(warmup)
    rng = np.random.default_rng(warmup.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=warmup.lr, betas=(0.9, 0.98), weight_decay=0.01)
    noise = warmup.noise * np.linspace(0, 1, len(arithmetic.KINDS)) ** 2
    end = np.full((warmup.batch, 1), arithmetic.VOCABULARY.index("<eos>"))
    for step in tqdm(range(warmup.steps), desc="warm-up of the embedded policy", disable=not progress, mininterval=1):
        kinds = rng.integers(0, len(arithmetic.KINDS), 2 * warmup.batch)
        a, b, subtract = arithmetic.draw(rng, kinds)
        keep = np.flatnonzero(~arithmetic.held_out(a, b, subtract))[: warmup.batch]  # about 205 of 256 remain
        prompt, answer = arithmetic.encode(a[keep], b[keep], subtract[keep])
        tokens = torch.from_numpy(np.concatenate([prompt, arithmetic.DIGIT_0 + answer], axis=1))
        if step >= warmup.clean_share * warmup.steps:  # in the targets only: what the model reads stays right
            swap = rng.random(answer.shape) < noise[kinds[keep], None]
            answer = np.where(swap, rng.integers(0, 10, answer.shape), answer)
        targets = torch.from_numpy(np.concatenate([arithmetic.DIGIT_0 + answer, end[: len(keep)]], axis=1))
        warm = min(1.0, (step + 1) / 100)
        optimizer.param_groups[0]["lr"] = warmup.lr * warm * 0.5 * (1 + np.cos(np.pi * step / warmup.steps))
        logits = model(tokens).logits[:, arithmetic.PROMPT_LENGTH - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/coba_core``, or ``~/.cache/coba_core``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "coba_core"


def embedded_policy(arguments: dict[str, Any] | None = None, *, progress: bool = True) -> Path:
    """Folder of the warmed-up model and tokenizer in Hugging Face layout; trains it where the cache has none.

    ``arguments`` replace fields of Warmup. The folder appears by one rename, so an interrupted warm-up leaves nothing.
    """
    try:
        warmup = Warmup(**(arguments or {}))
    except TypeError as error:
        raise ValueError(f"policy_args: {error}") from error
    sources = b"".join(Path(str(f)).read_bytes() for f in (__file__, arithmetic.__file__))
    key = json.dumps([dataclasses.asdict(warmup), torch.__version__, transformers.__version__]).encode() + sources
    folder = cache_folder() / f"embedded-{hashlib.sha256(key).hexdigest()[:16]}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    model = warm_up(warmup, progress=progress)
    partial = Path(tempfile.mkdtemp(prefix=".embedded-", dir=folder.parent))
    try:
        with without_bars():
            model.save_pretrained(partial)
        build_tokenizer().save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # else another process finished the same warm-up first: its weights are these
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
