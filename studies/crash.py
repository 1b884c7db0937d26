"""Kills a training run at random moments and compares what it ends with: ``python studies/crash.py --moments 50``.

A run is killed by SIGKILL, taken up again, killed again, and so on to its end; then the next run begins, until the
moments are used up. Every run has to end with the weights of an undisturbed one, bit by bit, and with its metrics,
allocations and evaluations.

A moment is the n-th file operation of the process in the output folder (opening, renaming, removing, making a folder),
counted by an audit hook. Every other kill is exactly before that operation; the rest come from outside, up to 30 ms
after it: within a write, an optimiser step, a rollout. With a checkpoint at every step most kills hit its writing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from coba_core.integrations.grpo.config import TrainConfig

CONFIG: dict[str, Any] = {
    "policy_args": {"steps": 300, "hidden": 32, "layers": 2, "batch": 64, "lr": 1e-2},
    "task_args": {"train": 24, "heldout": 12, "mix": {"+1": 1, "-1": 1}},
    "steps": 4, "prompts_per_step": 8, "rollouts_per_prompt": 6, "budget_high": 9, "lr": 1e-3,
    "eval_every": 2, "eval_samples": 2, "checkpoint_every": 1, "tensorboard": False, "threads": 1,
    "allocator": "coba", "allocator_args": {"noise": 0.05}, "entropy_temperature": {}, "minibatches": 2,
}  # fmt: skip
"""A run of a second in which everything that has a state has one: noise, optimiser, temperature, order of rows."""

PRELOADED = [
    "coba_core.integrations.grpo.run", "accelerate", "numba", "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2", "transformers.models.qwen2.tokenization_qwen2",
]  # fmt: skip
"""What a run imports, most of it lazily: seconds in each life otherwise."""

AFTER = 0.03
OPERATIONS = ("open", "os.mkdir", "os.remove", "os.rename", "os.rmdir")


class CrashError(AssertionError):
    """A run that was killed and taken up again did not end as the undisturbed one."""


@dataclasses.dataclass
class Crashes:
    """What was done: kills in all, those while a checkpoint was being written, and runs brought to their end."""

    kills: int = 0
    while_saving: int = 0
    runs: int = 0


def live(config: dict[str, Any], at: int, exact: bool, connection: Connection) -> None:
    """One life of a run, in a process of its own: from the start or the last checkpoint, until it ends or is killed.

    Sends "now" before file operation ``at`` (or, if exact, dies there), and the number of operations at the end.
    """
    from coba_core.integrations.grpo.run import resumed_config, train

    folder = config["output"]
    seen = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if event not in OPERATIONS:
            return
        inside = str(arguments[0]).startswith(folder) or event in ("os.remove", "os.rmdir")  # these may be relative
        if not inside:
            return
        seen += 1
        if seen == at:
            if exact:
                os.kill(os.getpid(), signal.SIGKILL)
            connection.send("now")

    begun = (Path(folder) / "config.yaml").is_file()
    sys.addaudithook(hook)
    if begun:
        train(resumed_config(folder, []), resume=True, progress=False)
    else:
        train(TrainConfig(**config), progress=False)
    connection.send(seen)


def start(config: dict[str, Any], at: int, exact: bool) -> tuple[Any, Connection]:
    """A process that lives, forked from a server which has imported what it needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=live, args=(config, at, exact, theirs))
    process.start()
    theirs.close()
    return process, ours


def undisturbed(config: dict[str, Any]) -> int:
    """Runs to the end; the number of its file operations."""
    process, connection = start(config, 0, False)
    operations = connection.recv()
    process.join()
    return int(operations)


def killed(config: dict[str, Any], at: int, after: float | None) -> bool:
    """One life, killed ``after`` seconds behind operation ``at`` (None: exactly there); False if it ended before."""
    process, connection = start(config, at, after is None)
    try:
        message = connection.recv()
    except EOFError:  # it died
        message = "now"
    if message == "now":
        process.join(after)
        process.kill()
    process.join()
    if process.exitcode not in (0, -signal.SIGKILL):
        raise CrashError(f"a run in {config['output']} failed with exit status {process.exitcode}")
    return process.exitcode != 0


def crash(folder: Path, moments: int, *, seed: int = 0) -> Iterator[Crashes]:
    """Kills at so many moments, yielding after each; CrashError where a run ends otherwise than the undisturbed one."""
    rng = np.random.default_rng(seed)
    reference = folder / "undisturbed"
    operations = undisturbed({**CONFIG, "output": str(reference)})
    done = Crashes()
    while done.kills < moments:
        config = {**CONFIG, "output": str(folder / f"killed-{done.runs}")}
        partial = Path(config["output"]) / "checkpoints"
        while done.kills < moments:
            after = None if done.kills % 2 == 0 else float(rng.uniform(0.0, AFTER))
            if not killed(config, int(rng.integers(1, operations + 1)), after):
                break
            done.kills += 1
            done.while_saving += any(partial.glob(".partial-*"))
            yield done
        if not (Path(config["output"]) / "summary.json").is_file() or done.kills == moments:
            undisturbed(config)
        compare(reference, Path(config["output"]))
        done.runs += 1
    yield done


def compare(reference: Path, found: Path) -> None:
    """CrashError unless both folders hold the same files, weights and records (but for times)."""
    import torch

    names = {p.relative_to(reference).as_posix() for p in reference.rglob("*")}
    others = {p.relative_to(found).as_posix() for p in found.rglob("*")}
    if names != others:
        raise CrashError(f"{found}: missing {sorted(names - others)}, left over {sorted(others - names)}")
    for name in sorted(names):
        mine, theirs = reference / name, found / name
        if name.endswith(".pt"):
            same = equal(torch.load(mine, weights_only=True), torch.load(theirs, weights_only=True))
        elif name.endswith((".json", ".jsonl")) and "/model/" not in name:
            same = records(mine) == records(theirs)
        elif name == "config.yaml":
            same = mine.read_text().replace(str(reference), str(found)) == theirs.read_text()
        else:
            same = mine.is_dir() or mine.read_bytes() == theirs.read_bytes()
        if not same:
            raise CrashError(f"{theirs} is not what an undisturbed run writes")


def equal(a: Any, b: Any) -> bool:
    """Whether two nested structures with tensors are the same to the last bit."""
    import torch

    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b)


def records(path: Path) -> list[Any]:
    """The lines of a file of JSON (one value, or one a line), without times, checksums over times, and digests."""
    text = path.read_text()
    values = [json.loads(text)] if path.suffix == ".json" else [json.loads(line) for line in text.splitlines()]

    def without(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {k: without(v) for k, v in value.items() if "seconds" not in k and "sha256" not in k}

    return [without(value) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    begun = time.perf_counter()
    done = Crashes()
    with tempfile.TemporaryDirectory() as folder:
        for done in crash(Path(folder), arguments.moments, seed=arguments.seed):
            print(f"\r{done.kills} kills", end="", file=sys.stderr, flush=True)
    print(
        f"\r{done.kills} kills, {done.while_saving} of them while a checkpoint was being written; {done.runs} runs "
        f"ended as the undisturbed one; {time.perf_counter() - begun:.0f} s"
    )


if __name__ == "__main__":
    main()
