"""Console script ``coba-core``. A command imports what it needs when it runs."""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import io
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import coba_core
from coba_core.state import read_text


def read_pass_rates(path: Path, column: str) -> tuple[list[dict[str, Any]], list[float]]:
    """Records of a .csv (with a header) or JSONL file and their pass rates; a ValueError names file and line.

    A line of JSONL is an object with the column, or a bare number.
    """
    records: list[tuple[int, Any]] = []
    file = io.StringIO(read_text(path), newline="")
    if path.suffix.lower() == ".csv":
        reader = csv.DictReader(file)
        try:
            if column not in (reader.fieldnames or ()):
                raise ValueError(f"{path}:1: no column {column!r}; the header has {', '.join(reader.fieldnames or ())}")
            records = [(reader.line_num, row) for row in reader]
        except csv.Error as error:
            raise ValueError(f"{path}:{reader.line_num}: not valid CSV: {error}") from error
    else:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    record = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ValueError(f"{path}:{number}: not valid JSON: {error}") from error
                records.append((number, {column: record} if isinstance(record, (int, float)) else record))
    rates = []
    for number, record in records:
        where = f"{path}:{number}"
        if not isinstance(record, dict) or record.get(column) is None:
            raise ValueError(f"{where}: no {column!r}")
        if None in record:
            raise ValueError(f"{where}: more fields than the header has")
        try:
            rate = float(record[column])
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{where}: {column!r} is {record[column]!r}, not a number") from None
        if not 0 <= rate <= 1:
            raise ValueError(f"{where}: {column!r} is {record[column]}, not within [0, 1]")
        rates.append(rate)
    if not rates:
        raise ValueError(f"{path}: holds no pass rates")
    return [record for _, record in records], rates


def run_allocate(arguments: argparse.Namespace) -> int:
    """Adds a column ``budget`` to a file of pass rates."""
    records, rates = read_pass_rates(Path(arguments.file), arguments.column)
    total = round(arguments.mean * len(rates)) if arguments.total is None else arguments.total
    value = coba_core.KnapsackValue() if arguments.value == "knapsack" else None
    if arguments.alpha is not None or arguments.beta is not None:
        if arguments.value == "knapsack" or arguments.alpha is None or arguments.beta is None:
            raise ValueError("--alpha and --beta go together, with --value capability")
        value = coba_core.CapabilityValue(arguments.alpha, arguments.beta, arguments.tau)
    budgets = coba_core.allocate(rates, total, low=arguments.low, high=arguments.high, value=value)
    for record, budget in zip(records, budgets.tolist(), strict=True):
        record["budget"] = budget
    if arguments.output is None:
        _write(sys.stdout, records, csv_format=arguments.file.lower().endswith(".csv"))
        return 0
    target = Path(arguments.output)
    partial = target.with_name(f".{target.name}.partial")
    with partial.open("w", encoding="utf-8", newline="") as file:
        _write(file, records, csv_format=target.suffix.lower() == ".csv")
    partial.replace(target)
    return 0


def _write(file: IO[str], records: list[dict[str, Any]], *, csv_format: bool) -> None:
    if csv_format:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for record in records for key in record)))
        writer.writeheader()
        writer.writerows(records)
    else:
        file.writelines(json.dumps(record) + "\n" for record in records)


def run_info(arguments: argparse.Namespace) -> int:
    """Prints backends and versions found."""
    from coba_core import kernels

    print(f"coba_core {coba_core.__version__}, Python {platform.python_version()}, {platform.machine()}")
    for name, (usable, reason) in kernels.available().items():
        print(f"  backend {name:8} {'yes' if usable else 'no: ' + reason}")
    for package in (
        "numpy", "numba", "torch", "triton", "transformers", "peft", "trl", "verl", "vllm",
        "reasoning-gym", "math-verify",
    ):  # fmt: skip
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "not installed"
        print(f"  {package:16} {version}")
    return 0


def _parser() -> argparse.ArgumentParser:
    from coba_core.evaluate_cli import add_evaluate_command
    from coba_core.headroom_cli import add_headroom_command
    from coba_core.integrations.grpo import command

    root = argparse.ArgumentParser(prog="coba-core", description="Exact allocation of rollouts to prompts.")
    commands = root.add_subparsers(dest="command", required=True, metavar="command")
    command.add_train_arguments(commands.add_parser("train", help="train a policy with GRPO"))
    command.add_compare_arguments(commands.add_parser("compare", help="methods and seeds at the same total rollouts"))
    allocate = commands.add_parser("allocate", help="pass rates in, budgets out")
    allocate.add_argument("file", help="CSV with a header, or JSONL")
    allocate.add_argument("--column", default="pass_rate", help="the column of pass rates [%(default)s]")
    size = allocate.add_mutually_exclusive_group(required=True)
    size.add_argument("--total", type=int, help="rollouts in all")
    size.add_argument("--mean", type=float, help="rollouts a prompt on average")
    allocate.add_argument("--low", type=int, default=2, help="least rollouts of a prompt [%(default)s]")
    allocate.add_argument("--high", type=int, default=128, help="most rollouts of a prompt [%(default)s]")
    allocate.add_argument("--value", choices=("capability", "knapsack"), default="capability")
    allocate.add_argument("--alpha", type=float, help="of the capability value; by default from the failure rate")
    allocate.add_argument("--beta", type=float)
    allocate.add_argument("--tau", type=float, default=5.0)
    allocate.add_argument("--output", metavar="FILE", help="CSV or JSONL by its ending [standard output]")
    allocate.set_defaults(run=run_allocate)
    add_evaluate_command(commands)
    add_headroom_command(commands)
    commands.add_parser("info", help="backends and versions found").set_defaults(run=run_info)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; what the user got wrong is one line on standard error and exit status 2.

    Exit status 1: a package is missing; 130: interrupted.
    """
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except KeyboardInterrupt:
        return 130
    except ModuleNotFoundError as error:
        print(f"coba-core {arguments.command}: error: {error}; pip install 'coba-core[train]'", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"coba-core {arguments.command}: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
