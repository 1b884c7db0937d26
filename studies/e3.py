"""E3's parts and their rivals on the embedded task, at equal rollouts: ``python studies/e3.py`` (``make study-e3``).

A cell is one method with one seed. Within a seed every method has the same policy, problems and order of problems, so
that differences between methods are paired. A finished cell is a file and is not run again unless its settings change;
Ctrl-C loses the running cell only. After the cells come the table, the curves and a summary.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from coba_core.integrations.grpo.config import TrainConfig
from coba_core.integrations.grpo.study import machine
from tqdm import tqdm

from coba_core.evaluation import bootstrap_interval, pass_at_k

Floats = npt.NDArray[np.float64]

RANK = {"allocator": "rank", "allocator_args": {"start": 8, "step": 2}, "budget_low": 4, "budget_high": 12}
COBA = {"allocator": "coba", "budget_low": 2, "budget_high": 128}
HELD = {"total_steps": None}  # the entropy is held to the end: no annealing
METHODS: dict[str, dict[str, Any]] = {
    "GRPO": {},
    "+ rank budgets": RANK,
    "+ temperature": {"entropy_temperature": HELD},
    "+ annealing": {"entropy_temperature": {}},
    "all (E3)": {**RANK, "entropy_temperature": {}},
    "+ entropy bonus": {"entropy_coef": 1e-4},
    "DAPO filtering": {"filter_zero_spread": True},
    "CoBA": COBA,
    "CoBA + temperature": {**COBA, "entropy_temperature": HELD},
    "+ temperature up to 1.2": {"entropy_temperature": {**HELD, "high": 1.2}},
}
"""What each method changes in the common settings; a plus adds to GRPO."""

BINS = 40  # of the rollouts, over which the curves of entropy and temperature are averaged
EVALUATIONS = 5  # along a run, besides the one before it


def settings(method: str, seed: int, steps: int, policy_args: dict[str, Any]) -> dict[str, Any]:
    """The fields of TrainConfig that the study sets; the others keep their defaults."""
    return {
        "allocator": "uniform", "steps": steps, "prompts_per_step": 32, "rollouts_per_prompt": 8, "lr": 1e-4,
        "seed": seed, "threads": 1, "task_args": {"train": 256, "heldout": 256, "seed": seed},
        "policy_args": policy_args, "eval_samples": 16, **METHODS[method],
    }  # fmt: skip


def run_cell(config: TrainConfig, final_samples: int, bar: tqdm[Any]) -> dict[str, Any]:
    """Trains once; returns curves over rollouts and the right answers of the last evaluation, problem by problem."""
    from coba_core.integrations.grpo.heldout import evaluate
    from coba_core.integrations.grpo.loop import Trainer

    trainer = Trainer(config, progress=False)
    total = trainer.total_rollouts
    begun = time.perf_counter()
    rows: list[tuple[float, ...]] = []
    evaluations: list[dict[str, float]] = []

    def measure() -> None:
        found = evaluate(trainer.policy, trainer.task, config)
        curve = pass_at_k(np.full(len(found.correct), found.samples), found.correct).mean(axis=0)
        evaluations.append({"rollouts": trainer.rollouts} | {f"pass@{k}": round(curve[k - 1], 5) for k in (1, 4, 16)})

    measure()
    while not trainer.finished:
        before = trainer.rollouts
        metrics = trainer.step()[1]
        rows.append(tuple(metrics[name] for name in ("entropy", "temperature", "mixed_groups", "pass_rate")))
        rows[-1] = (before / total, *rows[-1])
        bar.update((trainer.rollouts - before) / total)
        if trainer.finished or trainer.rollouts * EVALUATIONS // total > before * EVALUATIONS // total:
            measure()
    last = evaluate(trainer.policy, trainer.task, config.replace(eval_samples=final_samples))
    steps = np.array(rows)
    place = np.minimum((steps[:, 0] * BINS).astype(int), BINS - 1)
    curves = {
        name: [round(float(steps[place == b, i].mean()), 5) for b in np.unique(place)]
        for i, name in enumerate(("share", "entropy", "temperature", "mixed_groups", "pass_rate"))
    }
    return {
        "steps": trainer.done, "rollouts": trainer.rollouts, "seconds": round(time.perf_counter() - begun, 1),
        "curves": curves, "evaluations": evaluations, "samples": final_samples, "correct": last.correct.tolist(),
    }  # fmt: skip


def write_text(path: Path, text: str) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def write_json(path: Path, content: Any, **style: Any) -> None:
    write_text(path, json.dumps(content, allow_nan=False, **style) + "\n")


def run_cells(
    folder: Path,
    methods: list[str],
    seeds: list[int],
    steps: int,
    final_samples: int,
    policy_args: dict[str, Any],
    policy: str,
) -> dict[tuple[str, int], dict[str, Any]]:
    """All cells, seed by seed; those finished with the same settings and `policy` are read from their files."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    with tqdm(total=len(methods) * len(seeds), unit="cell", smoothing=0.05, disable=None) as bar:
        for seed in seeds:
            for method in methods:
                bar.set_postfix_str(f"{method}, seed {seed}")
                wanted = settings(method, seed, steps, policy_args)
                fingerprint = {**wanted, "final_samples": final_samples, "policy": policy}
                path = folder / "cells" / f"{'_'.join(re.findall('[A-Za-z0-9]+', method))}-{seed}.json"
                if path.exists() and (cell := json.loads(path.read_text()))["settings"] == fingerprint:
                    bar.update(1)
                else:
                    cell = {"method": method, "seed": seed, "settings": fingerprint}
                    cell |= run_cell(TrainConfig(**wanted), final_samples, bar)
                    write_json(path, cell)
                found[method, seed] = cell
    return found


def interval(values: Floats) -> str:
    low, high = bootstrap_interval(values, resamples=10_000)
    return f"{values.mean():.3f} [{low:.3f}, {high:.3f}]"


def table(cells: dict[tuple[str, int], dict[str, Any]], methods: list[str], seeds: list[int]) -> str:
    """Markdown: mean over seeds [95 % bootstrap interval over seeds], and the paired difference to the first method."""
    samples = next(iter(cells.values()))["samples"]
    ks = sorted({1, min(8, samples), samples})
    curves = {
        key: pass_at_k(np.full(len(cell["correct"]), samples), cell["correct"]).mean(axis=0)
        for key, cell in cells.items()
    }

    def of(method: str, k: int) -> Floats:
        return np.array([curves[method, seed][k - 1] for seed in seeds])

    def last(method: str, name: str) -> float:
        return float(np.mean([np.mean(cells[method, seed]["curves"][name][-4:]) for seed in seeds]))

    head = ["method", *(f"pass@{k}" for k in ks), f"pass@1 − {methods[0]}", "steps", "entropy", "temperature", "mixed"]
    rows = [head, ["---"] * len(head)]
    for method in methods:
        steps = np.mean([cells[method, seed]["steps"] for seed in seeds])
        gain = "" if method == methods[0] else interval(of(method, 1) - of(methods[0], 1))
        ends = [f"{last(method, name):.3f}" for name in ("entropy", "temperature", "mixed_groups")]
        rows.append([method, *(interval(of(method, k)) for k in ks), gain, f"{steps:.0f}", *ends])
    before = [cells[methods[0], seed]["evaluations"][0] for seed in seeds]
    start = ", ".join(f"pass@{k} {np.mean([b[f'pass@{k}'] for b in before]):.3f}" for k in (1, 4, 16))
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + f"\n\nBefore training: {start}.\n"


def draw(cells: dict[tuple[str, int], dict[str, Any]], methods: list[str], seeds: list[int], path: Path) -> None:
    """Entropy and temperature over rollouts, held-out pass@1 and pass@16 over rollouts, pass@k over k at the end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 9), layout="constrained")
    grid = figure.subplots(2, 3)
    total = max(cell["rollouts"] for cell in cells.values())
    for number, method in enumerate(methods):
        style = {"color": f"C{number % 10}", "label": method, "linestyle": "--" if number % 2 else "-"}
        runs = [cells[method, seed] for seed in seeds]
        for axes, name in ((grid[0, 0], "entropy"), (grid[0, 1], "temperature"), (grid[0, 2], "mixed_groups")):
            share = np.linspace(0, 1, BINS)
            curves = [np.interp(share, run["curves"]["share"], run["curves"][name]) for run in runs]
            axes.plot(share * total, np.mean(curves, axis=0), **style)
            axes.set(xlabel="rollouts", ylabel=name.replace("_", " "))
        for axes, name in ((grid[1, 0], "pass@1"), (grid[1, 1], "pass@16")):
            share = np.linspace(0, 1, EVALUATIONS + 1)
            curves = [
                np.interp(
                    share * run["rollouts"],
                    [e["rollouts"] for e in run["evaluations"]],
                    [e[name] for e in run["evaluations"]],
                )
                for run in runs
            ]
            axes.plot(share * total, np.mean(curves, axis=0), **style)
            axes.set(xlabel="rollouts", ylabel=f"held-out {name}")
        curves = [pass_at_k(np.full(len(run["correct"]), run["samples"]), run["correct"]).mean(axis=0) for run in runs]
        grid[1, 2].plot(np.arange(1, len(curves[0]) + 1), np.mean(curves, axis=0), **style)
    grid[1, 2].set(xscale="log", xlabel="k", ylabel="pass@k at the end")
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    for axes in grid.flat:
        axes.grid(alpha=0.3)
    partial = path.with_name(f".{path.name}.partial")
    figure.savefig(partial, format="png", dpi=80)
    partial.replace(path)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "results" / "e3")
    parser.add_argument("--seeds", type=int, default=5, help="how many (default 5)")
    parser.add_argument("--steps", type=int, default=160, help="of 256 rollouts (default 160)")
    parser.add_argument("--final-samples", type=int, default=32, help="a problem in the last evaluation (default 32)")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--policy-args", type=json.loads, default={}, help="JSON: fields of embedded.Warmup")
    arguments = parser.parse_args(argv)
    from coba_core.integrations.grpo.embedded import embedded_policy

    policy = embedded_policy(arguments.policy_args).name  # a hash of its making; warmed up where the cache lacks it
    seeds = list(range(arguments.seeds))
    options = (arguments.steps, arguments.final_samples, arguments.policy_args, policy)
    cells = run_cells(arguments.output, arguments.methods, seeds, *options)
    text = table(cells, arguments.methods, seeds)
    print(text)
    write_text(arguments.output / "table.md", text)
    draw(cells, arguments.methods, seeds, arguments.output / "curves.png")
    summary = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": {**machine(), "threads": 1},
        "seconds": round(sum(cell["seconds"] for cell in cells.values())),
        "seeds": seeds,
        "common": dataclasses.asdict(TrainConfig(**settings("GRPO", 0, arguments.steps, arguments.policy_args))),
        "methods": {name: METHODS[name] for name in arguments.methods},
    }
    write_json(arguments.output / "summary.json", summary, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
