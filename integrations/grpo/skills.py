"""Prerequisite skills: a problem of level k needs skills 1 to k, so it cannot be solved before the easier ones are.

``704192*3=`` asks for three digits: skill 1 of 7, skill 2 of 0, skill 3 of 4. A skill is a secret map of the digits, of
its own for each position, so learning one teaches nothing about another. The policy is warmed up to answer each digit
right with probability ``right`` and with a fixed wrong digit with the larger probability ``misled``: to become surer of
what it already prefers is no progress either. It starts right on level k with probability about right^k, which is
hopeless for the high levels until training on the low ones has raised their skills.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
import transformers
from tqdm import tqdm

from . import arithmetic, embedded
from .arithmetic import DIGIT_0, VOCABULARY, Integers
from .model import without_bars

SKILLS = 6
PROMPT_LENGTH = SKILLS + 3


@dataclasses.dataclass(frozen=True)
class SkillsWarmup:
    """Everything that determines the policy's weights; its hash is their name in the cache."""

    steps: int = 900
    batch: int = 128
    lr: float = 4e-3
    seed: int = 0
    hidden: int = 64
    layers: int = 2
    right: float = 0.3
    misled: float = 0.5

    def __post_init__(self) -> None:
        if not (0 < self.right and 0 <= self.misled and self.right + self.misled <= 1):
            raise ValueError(
                f"policy_args: right is {self.right} and misled {self.misled}: shares with a sum of at most 1 needed"
            )


def maps(seed: int = 0) -> tuple[Integers, Integers]:
    """Right and misleading answers of each skill to each digit, ``[SKILLS, 10]`` each; nowhere the same."""
    rng = np.random.default_rng([seed, 7])
    right = np.stack([rng.permutation(10) for _ in range(SKILLS)])
    return right, (right + rng.integers(1, 10, right.shape)) % 10


def draw(rng: np.random.Generator, count: int, *, hold_out: bool) -> Integers:
    """Digits of ``count`` problems, ``[count, SKILLS]``; one combination of digits in five is held out."""
    digits = rng.integers(0, 10, (10 * count + 64, SKILLS))
    number = digits @ 10 ** np.arange(SKILLS)
    side = arithmetic.held_out(number, np.zeros_like(number), np.zeros(len(number), dtype=np.bool_)) == hold_out
    return np.asarray(digits[side][:count])


def encode(digits: Integers, levels: Integers) -> Integers:
    """Token ids of prompts, ``[n, PROMPT_LENGTH]``: six digits, ``*``, the level, ``=``."""
    fixed = [np.full((len(digits), 1), VOCABULARY.index(sign)) for sign in "*="]
    return np.concatenate([DIGIT_0 + digits, fixed[0], DIGIT_0 + levels[:, None], fixed[1]], axis=1)


def problems(
    rng: np.random.Generator, size: int, mix: dict[int, float], *, hold_out: bool, seed: int
) -> list[tuple[str, str, str]]:
    """Distinct problems (kind, prompt, answer), shared out over the levels as ``mix`` weighs them."""
    if not mix or not set(mix) <= set(range(1, SKILLS + 1)) or min(mix.values()) < 0 or not sum(mix.values()):
        raise ValueError(f"mix: expected weights of levels from 1 to {SKILLS}, got {mix}")
    right, _ = maps(seed)
    edges = np.round(size * np.cumsum([0, *mix.values()]) / sum(mix.values())).astype(int)
    found: dict[str, tuple[str, str, str]] = {}
    for level, low, high in zip(mix, edges[:-1], edges[1:], strict=True):
        digits = draw(rng, int(high - low) + 16, hold_out=hold_out)
        prompts = encode(digits, np.full(len(digits), level))
        kind: dict[str, tuple[str, str, str]] = {}
        for prompt, row in zip(prompts.tolist(), digits, strict=True):
            answer = "".join(str(right[j, row[j]]) for j in range(level))
            text = "".join(VOCABULARY[t] for t in prompt)
            kind.setdefault(text, (f"level {level}", text, answer))
        found |= dict(list(kind.items())[: high - low])
    return list(found.values())


def _warm_up(warmup: SkillsWarmup, progress: bool) -> transformers.Qwen2ForCausalLM:
    model = embedded.build_model(
        embedded.Warmup(seed=warmup.seed, hidden=warmup.hidden, layers=warmup.layers)
    )
    rng = np.random.default_rng(warmup.seed)
    right, wrong = maps(warmup.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=warmup.lr, betas=(0.9, 0.98), weight_decay=0.01)
    end = VOCABULARY.index("<eos>")
    place = np.arange(SKILLS)
    for step in tqdm(range(warmup.steps), desc="warm-up of the skills policy", disable=not progress, mininterval=1):
        digits = draw(rng, warmup.batch, hold_out=False)
        levels = rng.integers(1, SKILLS + 1, len(digits))
        chance = rng.random(digits.shape)
        answer = np.where(chance < warmup.right, right[place, digits], rng.integers(0, 10, digits.shape))
        misled = (chance >= warmup.right) & (chance < warmup.right + warmup.misled)
        answer = np.where(misled, wrong[place, digits], answer)
        tokens = np.concatenate([encode(digits, levels), DIGIT_0 + answer], axis=1)
        targets = np.concatenate([DIGIT_0 + answer, np.full((len(digits), 1), end)], axis=1)
        targets = np.where(np.arange(SKILLS + 1) < levels[:, None], targets, end)
        targets = np.where(np.arange(SKILLS + 1) > levels[:, None], -100, targets)  # nothing follows the end
        warm = min(1.0, (step + 1) / 100)
        optimizer.param_groups[0]["lr"] = warmup.lr * warm * 0.5 * (1 + np.cos(np.pi * step / warmup.steps))
        logits = model(torch.from_numpy(tokens)).logits[:, PROMPT_LENGTH - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model


def skills_policy(arguments: dict[str, Any] | None = None, *, progress: bool = True) -> Path:
    """Folder of the warmed-up model and tokenizer in Hugging Face layout; trains it where the cache has none."""
    try:
        warmup = SkillsWarmup(**(arguments or {}))
    except TypeError as error:
        raise ValueError(f"policy_args: {error}") from error
    sources = b"".join(Path(str(f)).read_bytes() for f in (__file__, embedded.__file__, arithmetic.__file__))
    key = json.dumps([dataclasses.asdict(warmup), torch.__version__, transformers.__version__]).encode() + sources
    folder = embedded.cache_folder() / f"skills-{hashlib.sha256(key).hexdigest()[:16]}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the same weights for a seed wherever they are made
    try:
        model = _warm_up(warmup, progress)
    finally:
        torch.set_num_threads(threads)
    partial = Path(tempfile.mkdtemp(prefix=".skills-", dir=folder.parent))
    try:
        with without_bars():
            model.save_pretrained(partial)
        embedded.build_tokenizer().save_pretrained(partial)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # else another process finished the same warm-up first: its weights are these
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def pass_rates_at_start(warmup: SkillsWarmup | None = None) -> npt.NDArray[np.float64]:
    """What the warm-up aims at: the chance of a right answer by level, ``[SKILLS]``.

    >>> pass_rates_at_start().round(4)
    array([0.32  , 0.1024, 0.0328, 0.0105, 0.0034, 0.0011])
    """
    warmup = SkillsWarmup() if warmup is None else warmup
    by_chance = (1 - warmup.right - warmup.misled) / 10
    return np.asarray((warmup.right + by_chance) ** np.arange(1, SKILLS + 1))
