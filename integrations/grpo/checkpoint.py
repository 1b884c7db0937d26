"""Checkpoints: a folder that appears by one rename, with all that an exact continuation needs.

model/ (safetensors and tokenizer, loadable by transformers or peft), training.pt (optimiser and random states, read
with weights_only=True), allocator.json and progress.json (JSON with a checksum).
"""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from coba_core.state import read_state, write_state

VERSION = 1
PREFIX = "step-"


def save(
    parent: Path, step: int, *, model: Callable[[Path], None], training: dict[str, Any], allocator: dict[str, Any],
    progress: dict[str, Any], keep: int,
) -> Path:  # fmt: skip
    """Writes ``parent/step-000123`` and then removes all but the last ``keep`` checkpoints."""
    parent.mkdir(parents=True, exist_ok=True)
    final = parent / f"{PREFIX}{step:06d}"
    if not final.exists():
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
        try:
            model(partial / "model")
            torch.save(training, partial / "training.pt")
            write_state(partial / "allocator.json", allocator)
            write_state(partial / "progress.json", {"kind": "grpo", "version": VERSION, **progress})
            for path in partial.rglob("*"):
                if path.is_file():
                    with path.open("rb") as file:
                        os.fsync(file.fileno())
            partial.rename(final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    for old in checkpoints(parent)[:-keep]:
        shutil.rmtree(old)
    return final


def checkpoints(parent: Path) -> list[Path]:
    """The complete checkpoints, oldest first."""
    return sorted(p for p in parent.glob(f"{PREFIX}*") if p.is_dir())


def load(folder: Path, device: torch.device) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(training, allocator, progress) of a checkpoint; a ValueError names what cannot be read."""
    try:
        training = torch.load(folder / "training.pt", map_location=device, weights_only=True)
    except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(
            f"{folder / 'training.pt'}: not readable ({error}); remove {folder} to go on from before it"
        ) from error
    progress = read_state(folder / "progress.json")
    if progress.get("kind") != "grpo" or progress.get("version", 0) > VERSION:
        raise ValueError(f"{folder / 'progress.json'}: not of this program, or of a newer version")
    return training, read_state(folder / "allocator.json"), progress
