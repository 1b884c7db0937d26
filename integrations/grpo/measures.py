"""One cell of a study: trains once and returns what the study measures, small enough to keep for every cell."""

from __future__ import annotations

import time
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from coba_core.allocators import DIFFICULTY_CLASSES, BudgetWarning, difficulty_class
from coba_core.headroom import headroom

from .config import TrainConfig

Floats = npt.NDArray[np.float64]

EVALUATIONS = 8  # along a run, besides the one before it
BINS = 24  # of the rollouts, over which the curves of the steps are averaged
PASS_RATE_BINS = 10
CURVES = (
    "pass_rate", "mixed_groups", "rows", "entropy", "length", "grad_norm", "gini", "alpha", "beta",
    "mean_failure_rate", "budget_max",
)  # fmt: skip
TARGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


def gini(budgets: npt.ArrayLike) -> float:
    """Gini coefficient of budgets [M], 0 (all equal) to 1 - 1/M (one has all); 0 for budgets that are all 0.

    >>> gini([4, 4, 4]), gini([0, 0, 0, 8])
    (0.0, 0.75)
    """
    x = np.sort(np.asarray(budgets, dtype=np.float64))
    total = x.sum()
    return float((2 * np.arange(1, len(x) + 1) - len(x) - 1) @ x / (len(x) * total)) if total else 0.0


def area(rollouts: npt.ArrayLike, rates: npt.ArrayLike) -> Any:
    """Mean of a curve over the rollouts, by trapezia: rollouts [T] ascending, rates [T] or [T, P].

    >>> float(area([0, 10, 20], [0.0, 1.0, 1.0]))
    0.75
    """
    x, y = np.asarray(rollouts, dtype=np.float64), np.asarray(rates, dtype=np.float64)
    return np.trapezoid(y, x, axis=0) / (x[-1] - x[0])


def rollouts_to_reach(rollouts: npt.ArrayLike, rates: npt.ArrayLike, target: float) -> float | None:
    """Rollouts at which a curve first passes `target`, between evaluations by a straight line; None if it never does.

    >>> rollouts_to_reach([0, 10, 20], [0.0, 0.5, 1.0], 0.75)
    15.0
    """
    x, y = np.asarray(rollouts, dtype=np.float64), np.asarray(rates, dtype=np.float64)
    above = np.flatnonzero(y >= target)
    if not len(above):
        return None
    i = int(above[0])
    if i == 0:
        return float(x[0])
    return round(float(x[i - 1] + (target - y[i - 1]) / (y[i] - y[i - 1]) * (x[i] - x[i - 1])), 1)


def transitions(before: Floats, after: Floats) -> list[list[int]]:
    """Problems by difficulty class before (rows) and after (columns), hardest first: counts [5][5].

    >>> transitions(np.array([0.0, 0.5]), np.array([0.5, 1.0]))[0]
    [0, 0, 1, 0, 0]
    """
    table = np.zeros((len(DIFFICULTY_CLASSES),) * 2, dtype=np.int64)
    np.add.at(table, (difficulty_class(before), difficulty_class(after)), 1)
    return table.tolist()


def _rounded(x: Any, digits: int = 4) -> Any:
    return np.round(np.asarray(x, dtype=np.float64), digits).tolist()


def budgets_by_rate(estimates: list[Floats], budgets: list[npt.NDArray[np.int64]]) -> list[list[float]]:
    """[mean estimate, mean budget, prompts] of each filled tenth of the estimated pass rate."""
    rate, budget = np.concatenate(estimates), np.concatenate(budgets)
    place = np.minimum((rate * PASS_RATE_BINS).astype(int), PASS_RATE_BINS - 1)
    count = np.bincount(place, minlength=PASS_RATE_BINS)
    sums = [np.bincount(place, x, PASS_RATE_BINS) for x in (rate, budget)]
    return [_rounded([sums[0][b] / count[b], sums[1][b] / count[b], count[b]], 3) for b in np.flatnonzero(count)]


def run_cell(config: TrainConfig) -> dict[str, Any]:
    """Trains by `config` and measures on the held-out and on the training problems; see docs/when-it-pays.md."""
    from .heldout import evaluate
    from .loop import Trainer
    from .tasks import Task

    begun = time.perf_counter()
    trainer = Trainer(config, progress=False)
    task, total = trainer.task, trainer.total_rollouts
    mirrored = Task(task.heldout, task.train, task.score)  # to evaluate on the problems that are trained on
    keys = [p.key for p in task.train]
    evaluations: list[dict[str, float]] = []
    correct: list[npt.NDArray[np.int64]] = []
    measured: list[Floats] = []  # pass rates of the training problems at the start, half-way and at the end
    errors: list[dict[str, float]] = []

    def evaluate_heldout() -> None:
        found = evaluate(trainer.policy, task, config)
        correct.append(found.correct)
        metrics = {name.removeprefix("eval/"): round(value, 5) for name, value in found.metrics().items()}
        evaluations.append({"rollouts": trainer.rollouts, **metrics})

    def evaluate_training() -> None:
        problems = dict(eval_problems=0, seed=config.seed + 17)
        measured.append(evaluate(trainer.policy, mirrored, config.replace(**problems)).correct / config.eval_samples)
        if trainer.done:
            estimate, raw = trainer.allocator.history.estimates(keys)
            gap = estimate - measured[-1]
            errors.append({
                "rollouts": trainer.rollouts, "mean_absolute": round(float(np.abs(gap).mean()), 4),
                "bias": round(float(gap.mean()), 4), "unseen": round(float(np.isnan(raw).mean()), 4),
            })  # fmt: skip

    evaluate_heldout()
    evaluate_training()
    steps: list[dict[str, float]] = []
    estimates: list[Floats] = []
    budgets: list[npt.NDArray[np.int64]] = []
    training = 0.0
    while not trainer.finished:
        before, started = trainer.rollouts, time.perf_counter()
        with warnings.catch_warnings():  # that a prompt may take much of a small step is what is studied
            warnings.simplefilter("ignore", BudgetWarning)
            batch, metrics = trainer.step()
        training += time.perf_counter() - started
        estimates.append(batch.pass_rates.cpu().numpy())
        budgets.append(batch.budgets.cpu().numpy())
        steps.append({**metrics, "share": before / total, "gini": gini(budgets[-1])})
        if trainer.finished or trainer.rollouts * EVALUATIONS // total > before * EVALUATIONS // total:
            evaluate_heldout()
        if trainer.finished or before * 2 < total <= trainer.rollouts * 2:
            evaluate_training()
    place = np.array([min(int(s["share"] * BINS), BINS - 1) for s in steps])
    curves: dict[str, list[float | None]] = {}  # None: not known before the first step
    for name in ("share", *CURVES):
        values = np.array([s.get(name, np.nan) for s in steps])
        means = [values[place == b] for b in np.unique(place)]
        if all(np.isfinite(part).any() for part in means[1:]):
            curves[name] = [round(float(np.nanmean(p)), 4) if np.isfinite(p).any() else None for p in means]
    third = max(1, len(steps) // 3)
    parts = {"early": slice(0, third), "middle": slice(third, -third or None), "late": slice(-third, None)}
    spent = [e["rollouts"] for e in evaluations]
    average = f"avg@{config.eval_samples}"
    rates = np.array([e[average] for e in evaluations])
    by_problem = np.array(correct) / config.eval_samples
    start = measured[0]
    return {
        "steps": trainer.done, "rollouts": trainer.rollouts, "seconds": round(time.perf_counter() - begun, 2),
        "seconds_in_steps": round(training, 2), "allocator_ms_per_step": round(
            1e3 * trainer.allocator_seconds / max(trainer.done, 1), 4),
        "final": evaluations[-1][average], "area": round(float(area(spent, rates)), 5), "evaluations": evaluations,
        "reached": {f"{t:g}": rollouts_to_reach(spent, rates, t) for t in TARGETS},
        "correct": correct[-1].tolist(), "area_by_problem": _rounded(area(spent, by_problem)),
        "samples": config.eval_samples, "kinds": _by_kind([p.kind for p in task.heldout], by_problem[[0, -1]]),
        "mixed_groups": round(float(np.mean([s["mixed_groups"] for s in steps])), 4),
        "rows_with_gradient": round(sum(s["rows"] for s in steps) / trainer.rollouts, 4),
        "gini": round(float(np.mean([s["gini"] for s in steps])), 4),
        "entropy": round(float(np.mean([s["entropy"] for s in steps])), 4),
        "length": round(float(np.mean([s["length"] for s in steps])), 3),
        "curves": curves,
        "budget_by_rate": {
            name: budgets_by_rate(estimates[part], budgets[part]) for name, part in parts.items() if estimates[part]
        },
        "pool": {
            "mean_pass_rate": round(float(start.mean()), 4), "never_right": round(float((start == 0).mean()), 4),
            "always_right": round(float((start == 1).mean()), 4),
            "headroom": [round(headroom(m), 4) if np.any((m > 0) & (m < 1)) else None for m in measured],
        },
        "estimate_errors": errors, "transitions": transitions(start, measured[-1]),
    }  # fmt: skip


def _by_kind(kinds: list[str], rates: Floats) -> dict[str, list[float]]:
    """Mean pass rate before and after, by kind of problem."""
    names = np.array(kinds[: rates.shape[1]])
    return {k: _rounded([rates[0][names == k].mean(), rates[1][names == k].mean()]) for k in dict.fromkeys(kinds)}
