"""The commands ``coba-core train`` and ``coba-core compare``: arguments here, work in loop.py and compare.py."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys

from .config import TrainConfig, load_config


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """--config, --set and one flag for each field of TrainConfig that holds a single value."""
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings")
    parser.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE",
        help="set any field, also within one (allocator_args.kappa=21); the value is YAML; may be repeated",
    )  # fmt: skip
    fields = parser.add_argument_group("settings", "each sets the field of the same name; defaults in brackets")
    for field in dataclasses.fields(TrainConfig):
        if field.default is not dataclasses.MISSING and field.default is not None:
            flag = "--" + field.name.replace("_", "-")
            fields.add_argument(flag, dest=f"field_{field.name}", metavar="VALUE", help=f"[{field.default}]")


def assignments(arguments: argparse.Namespace) -> list[str]:
    """What the command line sets, in the form that TrainConfig.override takes."""
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    flags = [f"{name.removeprefix('field_')}={value}" for name, value in given.items() if name.startswith("field_")]
    return [*flags, *arguments.set]


def add_train_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Arguments of ``coba-core train``."""
    parser.add_argument("--resume", metavar="DIR", help="go on with the run whose output folder this is")
    parser.add_argument("--overwrite", action="store_true", help="replace the output folder of an earlier run")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_config_arguments(parser)
    parser.set_defaults(run=run_train)
    return parser


def run_train(arguments: argparse.Namespace) -> int:
    if arguments.resume is not None and (arguments.config is not None or arguments.overwrite):
        raise ValueError("--resume takes its configuration from the run's own config.yaml: no --config or --overwrite")
    import json

    from .run import resumed_config, train

    if arguments.resume is not None:
        config = resumed_config(arguments.resume, assignments(arguments))
    else:
        config = load_config(arguments.config).override(assignments(arguments))
    summary = train(
        config, resume=arguments.resume is not None, overwrite=arguments.overwrite, progress=not arguments.quiet
    )
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(summary))
    return 130 if summary["interrupted"] else 0


def add_compare_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Arguments of ``coba-core compare``."""
    parser.add_argument(
        "--method", action="append", metavar="METHOD",
        help='an allocator by name, or a label and settings: "e3 allocator=rank entropy_temperature={}"; may be '
        "repeated [uniform, coba, knapsack]",
    )  # fmt: skip
    parser.add_argument(
        "study", nargs="?", help="YAML file of a study: pools, batches, methods, seeds; see studies/quick.yaml"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="LABEL", help="of a study: the pools, batches and methods with these labels only"
    )
    parser.add_argument("--minutes", type=float, help="of a study: begin no cell after so many minutes")
    parser.add_argument("--report", action="store_true", help="of a study: run nothing, report what is there")
    parser.add_argument("--seeds", type=int, help="seeds, from the configured one on [3; of a study: its own]")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in its own process [%(default)s]")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_config_arguments(parser)
    parser.set_defaults(run=run_compare)
    return parser


def run_compare(arguments: argparse.Namespace) -> int:
    for name in ("seeds", "jobs"):
        if (value := getattr(arguments, name)) is not None and value < 1:
            raise ValueError(f"--{name}: must be at least 1, got {value}")
    from pathlib import Path

    if arguments.study is not None:
        return run_study_file(arguments)
    for name in ("only", "minutes", "report"):
        if getattr(arguments, name):
            raise ValueError(f"--{name}: goes with the file of a study")
    from .compare import compare

    config = load_config(arguments.config).override(assignments(arguments))
    output = Path(config.output) if config.output != TrainConfig.output else Path("out/compare")
    methods = arguments.method or ["uniform", "coba", "knapsack"]
    options = {"seeds": arguments.seeds or 3, "jobs": arguments.jobs, "progress": not arguments.quiet}
    try:
        print(compare(config, methods, output=output, **options))
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from what is in {output}", file=sys.stderr)
        return 130
    print(f"written to {output}: table.md, picture.png, runs/")
    return 0


def run_study_file(arguments: argparse.Namespace) -> int:
    """Runs what is missing of a study and reports on all that is there; exit status 1 if a cell failed."""
    import time
    from pathlib import Path

    from .report import write_report
    from .study import load_study, run_study, select

    given = [text for text in assignments(arguments) if not text.startswith("output=")]
    if given or arguments.method or arguments.config:
        raise ValueError("a study holds settings and methods in its file: of the settings only --output goes with it")
    output = Path(arguments.field_output or Path("out") / Path(arguments.study).stem)
    study = load_study(arguments.study, output, seeds=arguments.seeds)
    chosen = select(study, arguments.only or [])
    until = None if arguments.minutes is None else time.time() + 60 * arguments.minutes
    failed: dict[str, str] = {}
    if not arguments.report:
        try:
            failed = run_study(chosen, jobs=arguments.jobs, progress=not arguments.quiet, until=until)
        except KeyboardInterrupt:
            print(f"\ninterrupted; the same command goes on from what is in {output}", file=sys.stderr)
            return 130
    print(write_report(study, output))
    print(f"written to {output}: report.md, report.html, cells.jsonl")
    for name, error in failed.items():
        print(f"failed: {name}: {error.strip().splitlines()[-1]}", file=sys.stderr)
    return 1 if failed else 0
