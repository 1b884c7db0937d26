"""``coba-core headroom``: pass rates or a run's log in; what there is to win and what each rule keeps of it out."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from coba_core.headroom import headroom, kept_headroom
from coba_core.kernels.numpy_backend import Floats
from coba_core.state import read_text


def _rate(value: Any, where: str) -> float:
    """A pass rate in [0, 1]; ValueError saying where it stood."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise ValueError(f"{where}: {value!r} is not a pass rate in [0, 1]")
    return float(value)


def read_log(path: Path, last: int) -> tuple[list[float], float]:
    """Pass rate of each prompt over its last visits in a run's allocations.jsonl, and the mean rollouts behind one.

    The visits are those of the last `last` steps; all steps for 0.
    """
    steps: list[dict[str, Any]] = []
    for number, line in enumerate(read_text(path).split("\n")[:-1], 1):  # the last is being written, or nothing
        try:
            record = json.loads(line)
            step = {name: record[name] for name in ("ids", "budgets", "rewards")}
            if not all(isinstance(column, list) and len(column) == len(step["ids"]) for column in step.values()):
                raise ValueError("lists of one length are needed")
            for key, budget in zip(step["ids"], step["budgets"], strict=True):
                if not isinstance(key, str | int) or type(budget) is not int or budget < 0:
                    raise ValueError(f"prompt {key!r} with a budget of {budget!r}")
            steps.append(step)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise ValueError(f"{path}:{number}: not a step with ids, budgets and rewards ({error})") from error
    right: dict[str, float] = {}
    rollouts: dict[str, int] = {}
    for step in steps[-last:] if last else steps:
        for key, budget, reward in zip(step["ids"], step["budgets"], step["rewards"], strict=True):
            if budget and reward is not None:
                right[key] = right.get(key, 0.0) + budget * _rate(reward, f"{path}: prompt {key!r}")
                rollouts[key] = rollouts.get(key, 0) + budget
    if not right:
        raise ValueError(f"{path}: holds no step with a rollout")
    return [right[key] / rollouts[key] for key in right], float(np.mean(list(rollouts.values())))


def _from_json(content: Any, column: str, where: str) -> list[float]:
    """A list of rates or of objects, or an object of rates by prompt."""
    items = list(content.items()) if isinstance(content, dict) else list(enumerate(content, 1))
    found = []
    for name, item in items:
        if isinstance(item, dict):
            if column not in item:
                raise ValueError(f"{where}: item {name}: no {column!r}")
            item = item[column]
        found.append(_rate(item, f"{where}: item {name}"))
    return found


def read_source(source: str, column: str, last: int) -> tuple[Floats, str]:
    """Pass rates [M] of a file, a run's folder or standard input ("-"), and a remark for whoever reads the figure."""
    from coba_core.cli import read_pass_rates

    path, remark = Path(source), ""
    if source == "-":
        text = sys.stdin.read()
        try:
            rates = [_rate(float(word), f"standard input, number {i}") for i, word in enumerate(text.split(), 1)]
        except ValueError as error:
            if "not a pass rate" in str(error):
                raise
            try:
                content = json.loads(text)
            except ValueError:
                raise ValueError(f"standard input: neither numbers nor JSON ({error})") from error
            if not isinstance(content, (list, dict)):
                raise ValueError("standard input: expected a list or an object of pass rates") from error
            rates = _from_json(content, column, "standard input")
    elif path.is_dir() or path.name == "allocations.jsonl":
        rates, mean = read_log(path / "allocations.jsonl" if path.is_dir() else path, last)
        remark = (
            f"rates from {mean:.0f} rollouts a prompt on average: a 0 or 1 among them may be chance, which makes the "
            "headroom look larger than it is"
        )
    elif path.suffix.lower() == ".npy":
        try:
            array = np.load(path, allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path}: not a readable .npy file: {error}") from error
        if array.dtype.kind not in "fiu":
            raise ValueError(f"{path}: dtype {array.dtype}, not numbers")
        rates = [_rate(x, f"{path}: item {i}") for i, x in enumerate(array.ravel().tolist())]
    elif path.suffix.lower() == ".json":
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: not valid JSON: {error}") from error
        if not isinstance(content, (list, dict)):
            raise ValueError(f"{path}: expected a list or an object of pass rates")
        rates = _from_json(content, column, str(path))
    else:
        rates = read_pass_rates(path, column)[1]
    return np.array(rates, dtype=np.float64), remark


def run_headroom(arguments: argparse.Namespace) -> int:
    """Prints the headroom and, for each mean budget, the share of it that each rule keeps."""
    rates, remark = read_source(arguments.source, arguments.column, arguments.last)
    most = headroom(rates)
    kept = {}
    for mean in arguments.mean:
        if not arguments.low <= mean <= arguments.high:
            raise ValueError(f"--mean: {mean:g} is not within [{arguments.low}, {arguments.high}]")
        kept[mean] = kept_headroom(
            rates, round(mean * len(rates)), low=arguments.low, high=arguments.high, baseline=arguments.baseline
        )
    counts = [int(np.sum(rates == 0)), int(np.sum(rates == 1))]
    if arguments.json:
        result = {
            "prompts": len(rates), "mean_pass_rate": float(rates.mean()), "never_right": counts[0],
            "always_right": counts[1], "headroom": most, "low": arguments.low, "high": arguments.high,
            "baseline": arguments.baseline, "kept": {f"{mean:g}": rules for mean, rules in kept.items()},
            "remark": remark,
        }  # fmt: skip
        print(json.dumps(result, indent=1))
        return 0
    print(
        f"{len(rates)} prompts, mean pass rate {rates.mean():.3f}, {counts[0]} never right, {counts[1]} always right\n"
        f"headroom E[σ²]/(E[σ])² = {most:.3f}: no budgets have less than {1 / most:.3f} of even budgets' variance"
    )
    if remark:
        print(f"({remark})")
    print(f"\nvariance of even budgets / of the rule's, budgets in [{arguments.low}, {arguments.high}]:\n")
    print("| rule | " + " | ".join(f"mean {mean:g}" for mean in kept) + " |\n|---|" + "---|" * len(kept))
    for name in next(iter(kept.values())):
        print(f"| {name} | " + " | ".join(f"{rules[name]:.3f}" for rules in kept.values()) + " |")
    return 0


def add_headroom_command(subparsers: Any) -> argparse.ArgumentParser:
    """Adds ``headroom`` to the subparsers of ``coba-core``."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "headroom", help="how much an allocation can win on given pass rates, and what each rule keeps"
    )
    parser.add_argument(
        "source", help="JSONL, CSV, JSON or .npy of pass rates; a run's folder or its allocations.jsonl; - for stdin"
    )
    parser.add_argument("--column", default="pass_rate", help="the column of pass rates [%(default)s]")
    parser.add_argument("--last", type=int, default=0, help="of a run's log: the last so many steps [all]")
    parser.add_argument("--mean", type=float, nargs="+", default=[4.0, 8.0, 16.0], help="mean budgets [4 8 16]")
    parser.add_argument("--low", type=int, default=2, help="least rollouts of a prompt [%(default)s]")
    parser.add_argument("--high", type=int, default=128, help="most rollouts of a prompt [%(default)s]")
    parser.add_argument(
        "--baseline", choices=("known", "leave_one_out"), default="known",
        help="what is subtracted from a reward: the true pass rate, or the mean of its group's others [%(default)s]",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.set_defaults(run=run_headroom)
    return parser
