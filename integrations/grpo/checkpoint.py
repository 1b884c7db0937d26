"""Checkpoints: a folder that appears by one rename, with all that an exact continuation needs.

model/ (safetensors and tokenizer, loadable by transformers or peft), training.pt (optimiser and random states, read
with weights_only=True), allocator.json and progress.json (JSON with a checksum). progress.json holds the SHA-256 of
every other file, so that a damaged one is found before it is used.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from coba_core.state import read_state, write_state

VERSION = 2  # 1 had no digests
PREFIX = "step-"
PARTIAL = ".partial-"


def save(
    parent: Path, step: int, *, model: Callable[[Path], None], training: dict[str, Any], allocator: dict[str, Any],
    progress: dict[str, Any], keep: int,
) -> Path:  # fmt: skip
    """Writes ``parent/step-000123`` and then removes all but the last ``keep`` checkpoints, and what a crash left."""
    parent.mkdir(parents=True, exist_ok=True)
    final = parent / f"{PREFIX}{step:06d}"
    if not final.exists():
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=parent))
        try:
            model(partial / "model")
            torch.save(training, partial / "training.pt")
            write_state(partial / "allocator.json", allocator)
            files = {path.relative_to(partial).as_posix(): _digest(path) for path in _files(partial)}
            write_state(partial / "progress.json", {"kind": "grpo", "version": VERSION, "files": files, **progress})
            for path in _files(partial):
                with path.open("rb") as file:
                    os.fsync(file.fileno())
            partial.rename(final)
        except (OSError, RuntimeError, SafetensorError) as error:  # the last two are how torch and safetensors say it
            raise OSError(f"checkpoint {final}: not written ({error}); the ones before it are untouched") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    for old in checkpoints(parent)[:-keep]:
        old.rename(parent / f"{PARTIAL}{old.name}")  # at no moment is there half a checkpoint
    for left in parent.glob(f"{PARTIAL}*"):
        shutil.rmtree(left)
    return final


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def checkpoints(parent: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(p for p in parent.glob(f"{PREFIX}*") if p.is_dir())


def check(folder: Path) -> None:
    """A ValueError names the file of a checkpoint that is not as it was written."""
    for name, digest in _progress(folder).get("files", {}).items():
        try:
            found = _digest(folder / name)
        except OSError as error:
            raise ValueError(f"{folder / name}: not readable ({error.strerror}); {_advice(folder)}") from error
        if found != digest:
            raise ValueError(
                f"{folder / name}: its checksum does not match, it was edited or damaged; {_advice(folder)}"
            )


def _advice(folder: Path) -> str:
    return f"remove {folder} to go on from before it"


def _progress(folder: Path) -> dict[str, Any]:
    try:
        progress = read_state(folder / "progress.json")
    except (ValueError, OSError) as error:
        raise ValueError(f"{error}; {_advice(folder)}") from error
    if progress.get("kind") != "grpo" or progress.get("version", 0) > VERSION:
        raise ValueError(
            f"{folder / 'progress.json'}: not of this program, or of a newer version; {_advice(folder)}"
        )
    return progress


def load(folder: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(training, allocator, progress) of a checkpoint; a ValueError names what cannot be read."""
    progress = _progress(folder)
    try:
        training = torch.load(folder / "training.pt", map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder / 'training.pt'}: not readable ({error}); {_advice(folder)}") from error
    return training, read_state(folder / "allocator.json"), progress
