"""The reference GRPO loop: small enough to read in one sitting, and it runs for real.

Read loop.py first; config.py names every setting; rollouts.py and loss.py hold what unequal groups change; run.py adds
files, evaluation and interruption.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .config import TrainConfig, load_config

if TYPE_CHECKING:
    from .loop import Trainer
    from .run import train

__all__ = ["TrainConfig", "Trainer", "load_config", "train"]


def __getattr__(name: str) -> Any:
    if name in ("Trainer", "train"):  # these need torch and transformers
        from . import loop, run

        return loop.Trainer if name == "Trainer" else run.train
    raise AttributeError(name)
