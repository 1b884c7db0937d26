"""Real TRL on the CPU, with a policy of a few thousand parameters."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What third parties warn of, and that a step of four prompts is small."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for ignored in (
                "ignore::DeprecationWarning",
                "ignore::FutureWarning",
                "ignore::UserWarning:torch.*",
                "ignore::UserWarning:transformers.*",
                "ignore::UserWarning:trl.*",
                "ignore:You are using 'rollout_func':UserWarning",
                "ignore::UserWarning:peft.*",
                "ignore::UserWarning:accelerate.*",
                "ignore::ResourceWarning",
                "ignore::coba_core.BudgetWarning",
            ):
                item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)  # sums this small gain nothing from a second


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-architecture model with random weights, and the embedded task's tokenizer."""
    from small_trl import save_policy

    folder = tmp_path_factory.mktemp("policy")
    save_policy(folder)
    return folder
