"""The commands ``coba-core train`` and ``coba-core compare``: arguments here, work in loop.py and compare.py."""

from __future__ import annotations

import argparse
import dataclasses
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
    print(json.dumps(summary))
    return 130 if summary["interrupted"] else 0


def add_compare_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Arguments of ``coba-core compare``."""
    parser.add_argument(
        "--method", action="append", metavar="METHOD",
        help='an allocator by name, or a label and settings: "e3 allocator=rank entropy_temperature={}"; may be '
        "repeated [uniform, coba, knapsack]",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=3, help="seeds, from the configured one on [%(default)s]")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, each in its own process [%(default)s]")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_config_arguments(parser)
    parser.set_defaults(run=run_compare)
    return parser


def run_compare(arguments: argparse.Namespace) -> int:
    for name in ("seeds", "jobs"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name}: must be at least 1, got {getattr(arguments, name)}")
    from pathlib import Path

    from .compare import compare

    config = load_config(arguments.config).override(assignments(arguments))
    output = Path(config.output) if config.output != TrainConfig.output else Path("out/compare")
    methods = arguments.method or ["uniform", "coba", "knapsack"]
    options = {"seeds": arguments.seeds, "jobs": arguments.jobs, "progress": not arguments.quiet}
    try:
        print(compare(config, methods, output=output, **options))
    except KeyboardInterrupt:
        print(f"\ninterrupted; the same command goes on from what is in {output}", file=sys.stderr)
        return 130
    print(f"written to {output}: table.md, picture.png, runs/")
    return 0
