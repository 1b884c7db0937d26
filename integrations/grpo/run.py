"""A run from start to end: files, progress, evaluation, checkpoints, interruption and going on after it."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

from tqdm import tqdm

from . import checkpoint
from .config import RESUMABLE, TrainConfig, dump_config, load_config
from .heldout import Evaluation, evaluate
from .loop import Batch, Trainer
from .parallel import Processes, join


class RunFiles:
    """metrics.jsonl, allocations.jsonl, evaluations/ and TensorBoard events in the output folder."""

    def __init__(self, folder: Path, *, tensorboard: bool, after: int) -> None:
        self.folder = folder
        for name in ("metrics.jsonl", "allocations.jsonl"):
            self._forget(folder / name, after)
        self.writer: Any = None
        if tensorboard:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError:
                return
            self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=after + 1)

    @staticmethod
    def _forget(path: Path, after: int) -> None:
        """Drops what a resumed run will do again: lines of later steps, and one that was cut short."""
        if not path.exists():
            return
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n") and json.loads(line)["step"] <= after:
                kept.append(line)
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text("".join(kept), encoding="utf-8")
        partial.replace(path)

    def _append(self, name: str, record: dict[str, Any]) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def log(self, metrics: dict[str, float], batch: Batch | None = None) -> None:
        self._append("metrics.jsonl", {key: _rounded(value) for key, value in metrics.items()})
        if batch is not None:
            self._append("allocations.jsonl", {
                "step": metrics["step"], "ids": [p.key for p in batch.problems], "budgets": batch.budgets.tolist(),
                "estimates": batch.pass_rates.cpu().numpy().round(4).tolist(),
                "rewards": [_rounded(x) for x in batch.group_means().tolist()],
            })  # fmt: skip
        if self.writer is not None:
            for key, value in metrics.items():
                if key != "step":
                    self.writer.add_scalar(key if "/" in key else f"train/{key}", value, int(metrics["step"]))
            self.writer.flush()

    def evaluation(self, step: int, evaluation: Evaluation) -> None:
        path = self.folder / "evaluations" / f"step-{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(record) + "\n" for record in evaluation.records()), encoding="utf-8")

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()


def _rounded(value: float) -> float | int | None:
    if isinstance(value, int):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None  # JSON has no NaN


class Interruption:
    """Turns the first Ctrl-C (or SIGTERM) into a wish to stop after the step; the second one stops at once.

    ``shown``: whether to say so.
    """

    def __init__(self, *, shown: bool = True) -> None:
        self.asked, self.shown = False, shown
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def _ask(self, number: int, frame: types.FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        if self.shown:
            print("\nstopping after this step, then saving (again: stop at once, without saving)", file=sys.stderr)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def prepare_output(folder: Path, *, overwrite: bool) -> None:
    """Makes the output folder; one that is in use is an error unless it may be overwritten and a run made it."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        if not overwrite:
            raise ValueError(f"output: {folder} is not empty; choose another, or pass --overwrite or --resume {folder}")
        if not (folder / "config.yaml").is_file():
            raise ValueError(f"output: {folder} was not written by a run, so --overwrite leaves it alone")
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)


def resumed_config(folder: str | os.PathLike[str], assignments: list[str]) -> TrainConfig:
    """The configuration of a run that goes on, with changes to fields that leave it the same run."""
    path = Path(folder) / "config.yaml"
    if not path.is_file():
        raise ValueError(f"resume: {folder} holds no config.yaml: not the output of a run")
    before = load_config(path)
    after = before.override(assignments).replace(output=str(folder))
    for name, value in after.to_dict().items():
        if name not in (*RESUMABLE, "output") and value != getattr(before, name):
            raise ValueError(f"{name}: cannot change when a run is resumed; only {', '.join(RESUMABLE)} can")
    return after


def train(
    config: TrainConfig, *, resume: bool = False, overwrite: bool = False, progress: bool = True
) -> dict[str, Any]:
    """Runs (or goes on with) the training that the configuration describes, in ``config.output``.

    Returns the summary that also lands in summary.json: steps, rollouts, seconds in all and in the allocator, whether
    the run is complete, and the last evaluation. Ctrl-C finishes the step, saves, and prints how to go on.

    Of several processes (``parallel``), the first evaluates and writes all files; a signal to any stops all, and so
    does a failure of any: the others raise a ConnectionError with its message.
    """
    processes, _ = join(config)
    try:
        return _train(config, processes, resume, overwrite, progress)
    except Exception as error:
        reported = processes.reported(error)
        raise reported from None if reported is error else error
    finally:
        processes.leave()


def _train(
    config: TrainConfig, processes: Processes, resume: bool, overwrite: bool, progress: bool
) -> dict[str, Any]:
    progress = progress and processes.first
    folder = Path(config.output)
    weights: Path | None = None
    last: Path | None = None
    if resume:
        saved = checkpoint.checkpoints(folder / "checkpoints")
        last = saved[-1] if saved else None
        weights = None if last is None else last / "model"
    elif processes.first:
        prepare_output(folder, overwrite=overwrite)
    if processes.first:
        partial = folder / ".config.yaml.partial"
        partial.write_text(dump_config(config), encoding="utf-8")
        partial.replace(folder / "config.yaml")
    if last is not None:
        checkpoint.check(last)  # before anything is made of its weights
    trainer = Trainer(config, progress=progress, weights=weights)
    if last is not None:
        trainer.restore(last)
    files: RunFiles | None = None
    if processes.first:
        files = RunFiles(folder, tensorboard=config.tensorboard, after=trainer.done if resume and last else -1)
    bar = tqdm(total=trainer.total_rollouts, initial=trainer.rollouts, unit="rollout", disable=not progress)
    begun = time.perf_counter()
    scores: dict[str, float] = {}
    measured = False  # the same on all processes, as scores are not

    def measure() -> dict[str, float]:
        nonlocal measured
        measured = True
        with processes.gathered(trainer.policy.model):
            if files is None or not trainer.task.heldout:
                return {}
            evaluation = evaluate(trainer.policy, trainer.task, config)
        files.evaluation(trainer.done, evaluation)
        return evaluation.metrics()

    def save() -> Path | None:
        path = trainer.save(folder / "checkpoints")
        processes.wait()
        return path

    try:
        with Interruption(shown=processes.first) as interruption:
            if trainer.done == 0 and (scores := measure()) and files is not None:
                files.log({"step": 0, "rollouts": 0, **scores})
            while not trainer.finished and not processes.any(interruption.asked, trainer.policy.device):
                if config.stop_after and trainer.done >= config.stop_after:
                    break
                batch, metrics = trainer.step()
                if trainer.finished or (config.eval_every and trainer.done % config.eval_every == 0):
                    scores = measure()
                    metrics |= scores
                if files is not None:
                    files.log(metrics, batch)
                bar.update(trainer.rollouts - bar.n)
                bar.set_postfix_str(_postfix(metrics, scores))
                if config.checkpoint_every and trainer.done % config.checkpoint_every == 0 and not trainer.finished:
                    save()
            if trainer.finished and not measured:  # a finished run taken up again
                scores = measure()
            saved_to = save()
    finally:
        bar.close()
        if files is not None:
            files.close()
    if not trainer.finished and processes.first:
        print(f"saved {saved_to}; go on with: coba-core train --resume {folder}", file=sys.stderr)
    summary = {
        "finished": trainer.finished, "interrupted": processes.any(interruption.asked, trainer.policy.device),
        "steps": trainer.done, "rollouts": trainer.rollouts,
        "seconds": round(time.perf_counter() - begun, 3), "allocator_seconds": round(trainer.allocator_seconds, 6),
        **{key: _rounded(value) for key, value in scores.items()},
    }  # fmt: skip
    if processes.first:
        partial = folder / ".summary.json.partial"
        partial.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        partial.replace(folder / "summary.json")
    return summary


def _postfix(metrics: dict[str, float], scores: dict[str, float]) -> str:
    parts = [f"reward {metrics['reward']:.3f}", f"mixed {metrics['mixed_groups']:.2f}"]
    if "alpha" in metrics:
        parts.append(f"alpha {metrics['alpha']:.2f}")
    parts.append(f"budget {metrics['budget_min']:.0f}/{metrics['budget_mean']:.0f}/{metrics['budget_max']:.0f}")
    average = next((value for key, value in scores.items() if key.startswith("eval/avg@")), None)
    return ", ".join(parts if average is None else [*parts, f"held-out {average:.3f}"])
