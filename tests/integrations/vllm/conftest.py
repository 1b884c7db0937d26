"""Real vLLM on the CPU, and a policy small enough for it to start in seconds (its kernels need heads of 32 or 64)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", exc_type=ImportError)

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from coba_core.integrations.grpo import TrainConfig
from coba_core.integrations.grpo.arithmetic import VOCABULARY
from coba_core.integrations.grpo.embedded import build_tokenizer
from coba_core.integrations.grpo.model import Policy, load_policy
from coba_core.integrations.vllm import VLLMRollouts

SUMS = [(a, b) for a in range(10) for b in range(10 - a)]
HELD_OUT = SUMS[::4]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What vLLM's own modules warn of, and that eight prompts of a step are few."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            for ignored in ("ignore::Warning:vllm.*", "ignore::DeprecationWarning", "ignore::coba_core.BudgetWarning"):
                item.add_marker(pytest.mark.filterwarnings(ignored))


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        torch.set_num_threads(1)  # sums this small gain nothing from a second
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2-architecture model that adds digits ("3+4=" "7") and errs more often the larger the sum."""
    folder = tmp_path_factory.mktemp("policy")
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    pad, eos = VOCABULARY.index("<pad>"), VOCABULARY.index("<eos>")
    config = transformers.Qwen2Config(
        vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=96, tie_word_embeddings=True, pad_token_id=pad, eos_token_id=eos,
        bos_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.Qwen2ForCausalLM(config)
    tokenizer = build_tokenizer()
    prompts = torch.tensor(tokenizer([f"{a}+{b}=" for a, b in SUMS])["input_ids"])
    right = np.array([a + b for a, b in SUMS])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(500):
        wrong = (rng.random(len(right)) < right / 12) & (step >= 350)
        answers = np.where(wrong, rng.integers(0, 10, len(right)), right)
        targets = torch.tensor([[VOCABULARY.index(str(x)), eos] for x in answers])
        logits = model(torch.cat([prompts, targets], dim=1)).logits[:, 3:5]
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for name, sums in (("train", [x for x in SUMS if x not in HELD_OUT]), ("heldout", HELD_OUT)):
        lines = [json.dumps({"id": f"{a}+{b}", "prompt": f"{a}+{b}=", "answer": str(a + b)}) for a, b in sums]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture
def config(model_folder: Path, tmp_path: Path) -> TrainConfig:
    """Twenty steps of 32 of the 41 prompts, with 8 rollouts on average."""
    arguments: dict[str, Any] = {
        "train": str(model_folder / "train.jsonl"), "heldout": str(model_folder / "heldout.jsonl"), "scorer": "exact",
    }  # fmt: skip
    return TrainConfig(
        policy=str(model_folder), policy_args={"attn_implementation": "eager"}, task="file", task_args=arguments,
        steps=20, prompts_per_step=32, rollouts_per_prompt=8, budget_high=24, lr=1e-3, max_new_tokens=3,
        eval_every=0, eval_samples=16, checkpoint_every=0, tensorboard=False, rollout_engine="vllm",
        output=str(tmp_path / "run"),
    )  # fmt: skip


@pytest.fixture
def policy(config: TrainConfig) -> Policy:
    return load_policy(config, progress=False)


@pytest.fixture
def engine(policy: Policy) -> Iterator[VLLMRollouts]:
    """An engine on the policy, of prompts and completions of up to 24 tokens together."""
    found = VLLMRollouts(policy, max_model_len=24)
    yield found
    found.close()
