"""Methods × seeds at the same total rollouts: runs, a table and a picture. What is finished is not run again."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import json
import multiprocessing
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from .config import ALLOCATORS, TrainConfig


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run: a method and a seed. ``result`` appears, whole, when the run is complete."""

    label: str
    config: TrainConfig
    result: Path

    @property
    def folder(self) -> Path:
        return Path(self.config.output)

    @property
    def identity(self) -> str:
        content = {k: v for k, v in self.config.to_dict().items() if k not in ("output", "threads", "tensorboard")}
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    def finished(self) -> dict[str, Any] | None:
        """The stored result; None if there is none, or one of other settings."""
        try:
            stored = json.loads(self.result.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{self.result}: not valid JSON ({error}); remove it to run the cell again") from error
        return stored if stored.get("identity") == self.identity else None

    def run(self) -> dict[str, Any]:
        """Trains, going on from the last checkpoint of an interrupted attempt at the same settings."""
        from .run import resumed_config, train

        attempt = self.folder / "config.yaml"
        again = attempt.is_file() and resumed_config(self.folder, []) == self.config
        summary = train(self.config, resume=again, overwrite=not again, progress=False)
        if not summary["finished"]:
            raise KeyboardInterrupt
        result = {"identity": self.identity, "label": self.label, "seed": self.config.seed, **summary}
        self.result.parent.mkdir(parents=True, exist_ok=True)
        partial = self.result.with_name(f".{self.result.name}.partial")
        partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.result)
        return result


def parse_method(text: str) -> tuple[str, list[str]]:
    """``"coba"``, or a label and settings: ``"e3 allocator=rank entropy_temperature={}"``.

    >>> parse_method("sharp allocator=coba allocator_args.kappa=21")
    ('sharp', ['allocator=coba', 'allocator_args.kappa=21'])
    """
    label, *settings = shlex.split(text) or [""]
    if not settings:
        if label not in ALLOCATORS:
            raise ValueError(f"method: {label!r} is none of {', '.join(ALLOCATORS)}; give it settings, as field=value")
        settings = [f"allocator={label}"]
    if not label.replace("-", "").replace("_", "").isalnum():
        raise ValueError(f"method: the label {label!r} may hold letters, digits, - and _ only")
    return label, settings


def make_cells(base: TrainConfig, methods: list[str], seeds: int, output: Path) -> list[Cell]:
    """Seed by seed, so that an interrupted comparison is one over fewer seeds."""
    parsed = [parse_method(method) for method in methods]
    if len({label for label, _ in parsed}) != len(parsed):
        raise ValueError("method: two methods have the same label")
    cells = []
    for seed in range(base.seed, base.seed + seeds):
        for label, settings in parsed:
            name = f"{label}-seed{seed}"
            config = base.override(settings).replace(seed=seed, output=str(output / "runs" / name))
            if config.steps * config.rollouts_per_step != base.steps * base.rollouts_per_step:
                raise ValueError(f"method: {label!r} would spend another number of rollouts than the rest")
            cells.append(Cell(label, config, output / "cells" / f"{name}.json"))
    return cells


def run_cells(cells: list[Cell], *, jobs: int = 1, progress: bool = True) -> list[dict[str, Any]]:
    """Results of all cells, in order; ``jobs`` processes run those that have none yet."""
    results = {cell.result: stored for cell in cells if (stored := cell.finished()) is not None}
    todo = [cell for cell in cells if cell.result not in results]
    if todo and progress:
        print(f"{len(results)} of {len(cells)} runs are there, {len(todo)} to go")
    if todo and todo[0].config.policy == "embedded":
        from .embedded import embedded_policy

        for arguments in {json.dumps(cell.config.policy_args, sort_keys=True) for cell in todo}:
            embedded_policy(json.loads(arguments), progress=progress)  # once, before the processes would each do it
    bar = tqdm(total=sum(c.config.steps for c in todo), unit="step", disable=not progress or not todo, mininterval=1)
    context = multiprocessing.get_context("spawn")
    with bar, concurrent.futures.ProcessPoolExecutor(max(1, min(jobs, len(todo))), mp_context=context) as pool:
        waiting = {pool.submit(cell.run): cell for cell in todo}
        try:
            while waiting:
                done, _ = concurrent.futures.wait(waiting, timeout=1, return_when="FIRST_COMPLETED")
                for future in done:
                    cell = waiting.pop(future)
                    results[cell.result] = future.result()
                bar.update(sum(len(_steps(cell)) for cell in todo) - bar.n)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [results[cell.result] for cell in cells]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    whole = [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
    return [json.loads(line) for line in whole]


def _steps(cell: Cell) -> list[dict[str, Any]]:
    return [line for line in _lines(cell.folder / "metrics.jsonl") if line["step"]]


def _spread(values: list[float], digits: int = 3) -> str:
    deviation = f" ± {np.std(values, ddof=1):.{digits}f}" if len(values) > 1 else ""
    return f"{np.mean(values):.{digits}f}{deviation}"


def table(cells: list[Cell], results: list[dict[str, Any]]) -> str:
    """Markdown, one line a method: mean ± standard deviation over seeds; differences are paired by seed."""
    average = next((k for k in results[0] if k.startswith("eval/avg@")), None)
    last_pass = [k for k in results[0] if k.startswith("eval/pass@")][-1:]
    keys = [k for k in (average, *last_pass) if k]
    first = {r["seed"]: r for c, r in zip(cells, results, strict=True) if c.label == cells[0].label}
    headings = ["method", "seeds", *(k.replace("eval/", "held-out ") for k in keys),
                *([f"minus {cells[0].label}"] if average else []), "mixed groups", "rollouts",
                "allocator ms/step", "s/step"]  # fmt: skip
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    for label in dict.fromkeys(cell.label for cell in cells):
        mine = [(c, r) for c, r in zip(cells, results, strict=True) if c.label == label]
        logs = [_steps(c) for c, _ in mine]
        row = [label, str(len(mine)), *(_spread([r[k] for _, r in mine]) for k in keys)]
        if average:
            row.append(_spread([r[average] - first[r["seed"]][average] for _, r in mine]))
        row.append(_spread([float(np.mean([s["mixed_groups"] for s in log])) for log in logs], 2))
        row.append(f"{np.mean([r['rollouts'] for _, r in mine]):.0f}")
        row.append(f"{np.mean([1e3 * s['seconds_allocator'] for log in logs for s in log]):.2f}")
        row.append(f"{np.median([s['seconds_sampling'] + s['seconds_training'] for log in logs for s in log]):.3f}")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(cells: list[Cell], path: Path) -> None:
    """One picture: training pass rate, held-out pass rate, alpha, and budget against pass rate early and late."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained")
    (left, right), (below, corner) = figure.subplots(2, 2)
    labels = list(dict.fromkeys(cell.label for cell in cells))
    colours = dict(zip(labels, matplotlib.color_sequences["tab10"] * len(labels), strict=False))
    for label in labels:
        mine, colour = [c for c in cells if c.label == label], colours[label]
        logs = [_lines(c.folder / "metrics.jsonl") for c in mine]
        _curve(left, logs, "pass_rate", label, colour, smooth=5)
        scored = [[{**s, "held": v} for s in log for k, v in s.items() if k.startswith("eval/avg@")] for log in logs]
        _curve(right, scored, "held", label, colour)
        _curve(below, logs, "alpha", label, colour, at="step")
        _budgets(corner, [_lines(c.folder / "allocations.jsonl") for c in mine], label, colour)
    left.set(title="Training prompts of the step", xlabel="rollouts", ylabel="pass rate, mean over prompts")
    right.set(title="Held-out problems", xlabel="rollouts", ylabel="pass rate")
    below.set(title="Preference: large α prefers easy prompts", xlabel="step", ylabel="α")
    if not below.lines:
        below.text(0.5, 0.5, "no method here has an α", ha="center", transform=below.transAxes)
    corner.set(title="Where the budget goes (dashed: first fifth, solid: last fifth)", xlabel="estimated pass rate",
               ylabel="mean budget of a prompt", xlim=(0, 1))  # fmt: skip
    for axes in (left, right, below, corner):
        axes.grid(alpha=0.3)
        if axes.lines:
            axes.legend(frameon=False)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", dpi=110)
    partial.replace(path)


def _curve(
    axes: Any, logs: list[list[dict[str, Any]]], key: str, label: str, colour: Any, *, smooth: int = 1,
    at: str = "rollouts",
) -> None:  # fmt: skip
    """Mean over seeds of ``key``, and the range between the seeds."""
    runs = [([s[at] for s in log if key in s], [s[key] for s in log if key in s]) for log in logs]
    runs = [(x, y) for x, y in runs if len(x) >= smooth]
    if not runs:
        return
    grid = np.unique(np.concatenate([x for x, _ in runs]))
    grid = grid[(grid >= max(x[0] for x, _ in runs)) & (grid <= min(x[-1] for x, _ in runs))]
    weights = np.ones(smooth)
    values = np.array([
        np.interp(grid, x, np.convolve(y, weights, "same") / np.convolve(np.ones(len(y)), weights, "same"))
        for x, y in runs
    ])  # fmt: skip
    axes.plot(grid, values.mean(0), color=colour, label=label)
    if len(runs) > 1:
        axes.fill_between(grid, values.min(0), values.max(0), color=colour, alpha=0.15, linewidth=0)


def _budgets(axes: Any, logs: list[list[dict[str, Any]]], label: str, colour: Any) -> None:
    """Mean budget by estimated pass rate, in bins, over the first and the last fifth of the steps."""
    edges = np.linspace(0, 1, 11)
    for style, early in (("--", True), ("-", False)):
        parts = [log[: max(1, len(log) // 5)] if early else log[-max(1, len(log) // 5) :] for log in logs]
        estimates = np.concatenate([s["estimates"] for part in parts for s in part])
        budgets = np.concatenate([s["budgets"] for part in parts for s in part])
        place = np.clip(np.digitize(estimates, edges) - 1, 0, 9)
        count = np.bincount(place, minlength=10)
        filled = count >= 5
        mean = np.bincount(place, budgets, 10)[filled] / count[filled]
        centre = np.bincount(place, estimates, 10)[filled] / count[filled]
        axes.plot(centre, mean, style, color=colour, marker="o", markersize=3, label=None if early else label)


def compare(
    base: TrainConfig, methods: list[str], *, seeds: int, output: Path, jobs: int = 1, progress: bool = True
) -> str:
    """Runs what is missing, writes table.md and picture.png to ``output``, and returns the table.

    The runs of several jobs share the cores, unless ``base.threads`` says otherwise.
    """
    if jobs > 1 and not base.threads:
        base = base.replace(threads=max(1, (os.cpu_count() or 1) // jobs))
    cells = make_cells(base, methods, seeds, output)
    output.mkdir(parents=True, exist_ok=True)
    results = run_cells(cells, jobs=jobs, progress=progress)
    text = table(cells, results)
    (output / "table.md").write_text(text + "\n", encoding="utf-8")
    draw(cells, output / "picture.png")
    return text
