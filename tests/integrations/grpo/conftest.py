"""A small warmed-up policy for tests: seconds to make, a pass rate of about 0.15 on one-digit problems."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from coba_core.integrations.grpo import TrainConfig
from coba_core.integrations.grpo.model import Policy, load_policy

SMALL: dict[str, Any] = {
    "policy_args": {"steps": 300, "hidden": 32, "layers": 2, "batch": 64, "lr": 1e-2},
    "task_args": {"train": 24, "heldout": 12, "mix": {"+1": 1, "-1": 1}},
    "steps": 6, "prompts_per_step": 8, "rollouts_per_prompt": 6, "budget_high": 9, "lr": 1e-3,
    "eval_every": 3, "eval_samples": 4, "checkpoint_every": 0, "tensorboard": False, "threads": 1,
}  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A cache of the session's own, so that no test depends on what an earlier run left behind."""
    folder = str(tmp_path_factory.mktemp("cache"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield folder


@pytest.fixture
def small(tmp_path: Any) -> TrainConfig:
    """A run of six steps that takes about a second."""
    return TrainConfig(**SMALL, output=str(tmp_path / "run"))


@pytest.fixture(scope="session")
def policy(cache_folder: str) -> Policy:
    """The small policy; tests that change its weights load their own."""
    torch.set_num_threads(1)
    return load_policy(TrainConfig(**SMALL), progress=False)
