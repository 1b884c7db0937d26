"""Declarative studies: pools × batches × methods × seeds from one YAML file, in processes, gone on with any time."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import hashlib
import json
import multiprocessing
import os
import platform
import re
import time
import traceback
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from tqdm import tqdm

from coba_core.state import read_text

from .config import TrainConfig, parse_yaml

VERSION = 2  # of what a cell holds (1 had no machine): another number makes all cells be run again
FIELDS = {"name", "seeds", "settings", "pools", "batches", "methods", "reference", "ablations"}
NOT_IDENTITY = ("output", "threads", "tensorboard", "checkpoint_every", "keep_checkpoints", "stop_after", "eval_every")


def chosen(config: TrainConfig) -> dict[str, Any]:
    """The settings that bear on the result and are not the default's."""
    usual = TrainConfig().to_dict()
    return {k: v for k, v in config.to_dict().items() if k not in NOT_IDENTITY and v != usual[k]}


@dataclasses.dataclass(frozen=True)
class StudyCell:
    """One run of a study. ``path`` is where its result appears, whole, when it is complete."""

    pool: str
    batch: str
    method: str
    seed: int
    config: TrainConfig
    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def identity(self) -> str:
        """A hash of the settings that bear on the result and differ from the defaults: a new field changes none."""
        return hashlib.sha256(json.dumps([VERSION, chosen(self.config)], sort_keys=True).encode()).hexdigest()[:16]

    def finished(self) -> dict[str, Any] | None:
        """The stored result; None if there is none, or one of other settings."""
        try:
            stored = json.loads(self.path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ValueError(f"{self.path}: not valid JSON ({error}); remove it to run the cell again") from error
        if not isinstance(stored, dict):
            raise ValueError(f"{self.path}: not the result of a cell; remove it to run the cell again")
        return stored if stored.get("identity") == self.identity else None


@dataclasses.dataclass(frozen=True)
class Study:
    """A study file that was read and checked; ``cells`` are in the order in which they are run."""

    name: str
    reference: str
    cells: list[StudyCell]


def _mapping(content: dict[str, Any], name: str, source: str) -> dict[str, dict[str, Any]]:
    """``content[name]``, labels to settings; None as settings changes nothing."""
    found = content.get(name)
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{source}: {name}: expected at least one label with settings")
    for label, settings in found.items():
        if not isinstance(label, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.]*", label):
            raise ValueError(f"{source}: {name}: the label {label!r} may hold letters, digits, _ and . only")
        if settings is not None and not isinstance(settings, dict):
            raise ValueError(f"{source}: {name}: {label}: expected settings, got {settings!r}")
    return {label: dict(settings or {}) for label, settings in found.items()}


def _count(value: Any, where: str) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{where}: expected a number of at least 1, got {value!r}")
    return value


def load_study(path: str | os.PathLike[str], output: Path, *, seeds: int | None = None) -> Study:
    """Reads a study; ValueErrors name the file and the entry.

    ``settings`` (fields of TrainConfig) hold for all; ``pools``, ``batches`` and ``methods`` are labels with settings
    that come on top, in that order. A method may also have ``rollouts_factor``, which multiplies rollouts_per_prompt
    and frees it from the rule that all methods of a batch spend the same. ``ablations`` are further methods for the one
    ``pool`` and ``batch`` named there, with a number of ``seeds`` of their own. ``seeds`` replaces the study's number.

    Order: batch by batch, seed by seed, so that an interrupted study is one over fewer seeds.
    """
    content = parse_yaml(read_text(path), str(path))
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a mapping with {', '.join(sorted(FIELDS))}")
    if unknown := sorted(str(key) for key in set(content) - FIELDS):
        raise ValueError(f"{path}: {unknown[0]}: no such entry; there are {', '.join(sorted(FIELDS))}")
    base = TrainConfig(checkpoint_every=0, tensorboard=False, eval_samples=16, threads=1, allocator="uniform")
    parts = {name: _mapping(content, name, str(path)) for name in ("pools", "batches", "methods")}
    settings = content.get("settings") or {}
    reference = content.get("reference", next(iter(parts["methods"])))
    if reference not in parts["methods"]:
        raise ValueError(f"{path}: reference: {reference!r} is none of the methods")
    number = _count(content.get("seeds", 3) if seeds is None else seeds, f"{path}: seeds")
    ablations = content.get("ablations")
    extra: dict[str, dict[str, Any]] = {}
    place: tuple[Any, Any] = (None, None)
    extra_seeds = 0
    if ablations is not None:
        if not isinstance(ablations, dict) or set(ablations) - {"pool", "batch", "seeds", "methods"}:
            raise ValueError(f"{path}: ablations: expected pool, batch, seeds and methods")
        extra = _mapping(ablations, "methods", f"{path}: ablations")
        place = (ablations.get("pool"), ablations.get("batch"))
        if place[0] not in parts["pools"] or place[1] not in parts["batches"]:
            raise ValueError(f"{path}: ablations: pool {place[0]!r} or batch {place[1]!r} is not in the study")
        if twice := sorted(set(extra) & set(parts["methods"])):
            raise ValueError(f"{path}: ablations: {twice[0]!r} is also a method")
        extra_seeds = _count(ablations.get("seeds", 5) if seeds is None else seeds, f"{path}: ablations: seeds")
    cells = []
    for batch in parts["batches"]:
        for seed in range(max(number, extra_seeds)):
            for pool in parts["pools"]:
                methods = dict(parts["methods"]) if seed < number else {}
                if (pool, batch) == place and seed < extra_seeds:
                    methods |= extra
                spent = None
                for method, changes in methods.items():
                    where = f"{path}: {pool}, {batch}, {method}"
                    changes = dict(changes)
                    factor = changes.pop("rollouts_factor", None)
                    try:
                        config = base.replace(**_merged(settings, parts["pools"][pool], parts["batches"][batch]))
                        if factor is not None:
                            each = config.rollouts_per_prompt * factor
                            if each != int(each):
                                raise ValueError(f"rollouts_factor: {factor} leaves {each} rollouts a prompt")
                            config = config.replace(rollouts_per_prompt=int(each))
                        changes |= {"seed": seed, "output": f"out/{method}"}
                        config = config.replace(**_merged(config.to_dict(), changes))
                    except (ValueError, TypeError) as error:
                        raise ValueError(f"{where}: {error}") from error
                    budget = config.steps * config.rollouts_per_step
                    if factor is None and budget != (spent := spent or budget):
                        raise ValueError(f"{where}: spends {budget} rollouts where the others spend {spent}")
                    name = f"{pool}-{batch}-{method}-{seed}"
                    cells.append(StudyCell(pool, batch, method, seed, config, output / "cells" / f"{name}.json"))
    return Study(str(content.get("name", Path(path).stem)), reference, cells)


def _merged(*settings: dict[str, Any]) -> dict[str, Any]:
    """Later settings over earlier ones. Those of one allocator do not carry over to another."""
    result: dict[str, Any] = {}
    for part in settings:
        if "allocator" in part and part["allocator"] != result.get("allocator") and "allocator_args" not in part:
            result.pop("allocator_args", None)
        result |= part
    return result


def _run(cell: StudyCell) -> None:
    """Trains and stores the result; the file appears by one rename."""
    from .measures import run_cell

    measured = run_cell(cell.config)
    result = {
        "identity": cell.identity, "pool_name": cell.pool, "batch": cell.batch, "method": cell.method,
        "seed": cell.seed, "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "machine": machine(), "config": chosen(cell.config), **measured,
    }  # fmt: skip
    cell.path.parent.mkdir(parents=True, exist_ok=True)
    partial = cell.path.with_name(f".{cell.path.name}.partial")
    partial.write_text(json.dumps(result, separators=(",", ":")) + "\n", encoding="utf-8")
    partial.replace(cell.path)


def make_policies(cells: list[StudyCell], *, progress: bool) -> None:
    """Makes the policies that the cells need, once, before the processes would each do it."""
    from .embedded import embedded_policy
    from .packaged import packaged_policy
    from .skills import skills_policy

    makers = {"embedded": embedded_policy, "skills": skills_policy}
    wanted = {(c.config.policy, json.dumps(c.config.policy_args, sort_keys=True)): None for c in cells}
    for name, arguments in wanted:
        if name in makers:
            makers[name](json.loads(arguments), progress=progress)
        elif name.startswith("package:"):
            packaged_policy(name.removeprefix("package:"))


def select(study: Study, labels: list[str]) -> Study:
    """The study's cells whose pool, batch and method are among ``labels``; a kind with no label there stays whole."""
    cells = study.cells
    unknown = set(labels)
    for kind in ("pool", "batch", "method"):
        named = {getattr(cell, kind) for cell in study.cells} & set(labels)
        unknown -= named
        if named:
            cells = [cell for cell in cells if getattr(cell, kind) in named]
    if unknown:
        raise ValueError(f"--only: {min(unknown)!r} is no pool, batch or method of the study")
    return dataclasses.replace(study, cells=cells)


def run_study(
    study: Study, *, jobs: int = 1, progress: bool = True, until: float | None = None
) -> dict[str, str]:
    """Runs the cells that have no result yet, ``jobs`` at a time, each in a process of its own pool.

    Returns the error of each that failed, by name; a failed cell stops no other. ``until``: a time (seconds since the
    epoch) after which no cell is begun.
    """
    todo = [cell for cell in study.cells if cell.finished() is None]
    there = len(study.cells) - len(todo)
    failed: dict[str, str] = {}
    if todo and (until is None or until > time.time()):
        make_policies(todo, progress=progress)
    bar = tqdm(total=len(study.cells), initial=there, unit="cell", disable=not progress, smoothing=0.05)
    context = multiprocessing.get_context("spawn")
    with bar:
        while todo and (until is None or until > time.time()):
            pool = concurrent.futures.ProcessPoolExecutor(max(1, min(jobs, len(todo))), mp_context=context)
            running: dict[concurrent.futures.Future[None], StudyCell] = {}
            try:
                while running or (todo and (until is None or until > time.time())):
                    while todo and len(running) < jobs and (until is None or until > time.time()):
                        cell = todo.pop(0)
                        running[pool.submit(_run, cell)] = cell
                    for future in concurrent.futures.wait(running, return_when="FIRST_COMPLETED").done:
                        cell = running.pop(future)
                        try:
                            future.result()
                        except BrokenProcessPool:
                            failed[cell.name] = "its process ended (killed, or out of memory)"
                            raise
                        except Exception as error:
                            failed[cell.name] = "".join(traceback.format_exception(error))
                            bar.write(f"failed: {cell.name}: {type(error).__name__}: {error}")
                        bar.update(1)
            except BrokenProcessPool:
                for cell in running.values():
                    failed[cell.name] = "its process, or one beside it, ended (killed, or out of memory)"
                bar.write(f"failed: {', '.join(sorted(failed))}: a process ended")
                bar.update(1 + len(running))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
    return failed


def machine() -> dict[str, Any]:
    """Processor and versions, for the report."""
    import numpy
    import torch
    import transformers

    import coba_core

    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    versions = {"python": platform.python_version(), "numpy": numpy.__version__, "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "coba_core": coba_core.__version__}
    return {"processor": cpu, "cores": os.cpu_count(), "versions": versions}
