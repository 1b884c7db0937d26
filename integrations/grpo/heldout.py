"""Evaluation on the held-out problems: avg@n and unbiased pass@k."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from coba_core.evaluation import pass_at_k

from .config import TrainConfig
from .model import Policy
from .rollouts import generate
from .tasks import Problem, Task


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """``correct[i]`` of ``samples`` completions of ``problems[i]`` were right."""

    problems: list[Problem]
    samples: int
    correct: npt.NDArray[np.int64]

    def metrics(self) -> dict[str, float]:
        """``eval/avg@n`` and ``eval/pass@k`` for k = 1, 2, 4, ... up to n."""
        ks = [2**i for i in range(self.samples.bit_length()) if 2**i <= self.samples]
        average = {f"eval/avg@{self.samples}": float(self.correct.mean() / self.samples)}
        passed = pass_at_k(np.full(len(self.correct), self.samples), self.correct).mean(0)
        return average | {f"eval/pass@{k}": float(passed[k - 1]) for k in ks}

    def histogram(self) -> list[int]:
        """Problems with pass rate 0, up to 1/4, up to 1/2, up to 3/4, below 1, and 1."""
        rate = self.correct / self.samples
        edges = np.searchsorted([0, 0.25, 0.5, 0.75, np.nextafter(1, 0)], rate, side="left")
        return np.bincount(edges, minlength=6).tolist()  # type: ignore[no-any-return]

    def records(self) -> list[dict[str, Any]]:
        """One record a problem, for a JSONL file that ``coba-core evaluate`` reads."""
        return [
            {"prompt_id": p.key, "kind": p.kind, "samples": self.samples, "correct": int(c)}
            for p, c in zip(self.problems, self.correct, strict=True)
        ]


def evaluate(policy: Policy, task: Task, config: TrainConfig) -> Evaluation:
    """Samples held-out problems with a generator of its own: training is the same with and without evaluation."""
    problems = task.heldout[: config.eval_problems or None]
    prompts = policy.encode([p.prompt for p in problems], chat=config.chat)
    generator = torch.Generator(policy.device).manual_seed(config.seed + 1_000_003)
    rollouts = generate(
        policy, prompts, torch.full((len(problems),), config.eval_samples), generator=generator,
        max_new_tokens=config.max_new_tokens, temperature=config.eval_temperature, top_p=config.eval_top_p,
        max_rows=config.generation_rows,
    )  # fmt: skip
    texts = policy.decode(rollouts.completions())
    right = [task.score(problems[i], text) >= 0.5 for i, text in zip(rollouts.rows.tolist(), texts, strict=True)]
    correct = np.array(right, dtype=np.int64).reshape(len(problems), config.eval_samples).sum(1)
    return Evaluation(problems, config.eval_samples, correct)
