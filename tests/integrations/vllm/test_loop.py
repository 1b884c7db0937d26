"""The reference loop on the engine: it learns, and goes on after an interruption exactly where it was."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from coba_core.integrations.grpo import TrainConfig
from coba_core.integrations.grpo.loop import Trainer
from coba_core.integrations.grpo.run import resumed_config, train


def lines(folder, name):
    return [json.loads(line) for line in (Path(folder) / name).read_text().splitlines()]


def test_twenty_steps_raise_the_reward(config):
    config = config.replace(allocator="knapsack")
    summary = train(config, progress=False)
    assert (summary["finished"], summary["steps"], summary["rollouts"]) == (True, 20, 20 * 256)
    _, *steps = lines(config.output, "metrics.jsonl")
    for name in ("reward", "pass_rate"):  # by rollout, which the budgets shift, and by prompt, which they do not
        values = [step[name] for step in steps]
        assert np.mean(values[-5:]) > np.mean(values[:5]) + 0.05, name
    for step in steps:
        assert step["engine_gap"] < 1e-4  # the engine held that step's weights
        assert step["log_ratio"] < 1e-5  # log-probs are the policy's own
        assert step["entropy"] > 0
    for record in lines(config.output, "allocations.jsonl"):
        assert sum(record["budgets"]) == 256
        assert 2 <= min(record["budgets"]) <= max(record["budgets"]) <= 24
    assert len(set(record["budgets"])) > 1


@pytest.mark.parametrize("lora", [None, {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "down_proj"]}])
def test_resume_is_exact(config, tmp_path, lora):
    """Four steps, and two, a fresh engine from the files, and two more: the same budgets, rewards and weights."""
    at_once = config.replace(steps=4, lora=lora, entropy_temperature={}, minibatches=2)
    train(at_once, progress=False)
    first = at_once.replace(output=str(tmp_path / "parts"), stop_after=2)
    assert train(first, progress=False)["finished"] is False
    train(resumed_config(first.output, ["stop_after=0"]), resume=True, progress=False)
    assert lines(at_once.output, "allocations.jsonl") == lines(first.output, "allocations.jsonl")
    expected, found = (
        safetensors.torch.load_file(next((Path(c.output) / "checkpoints/step-000004/model").glob("*.safetensors")))
        for c in (at_once, first)
    )
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name


def test_groups_without_spread_are_refilled_from_the_engine(config):
    trainer = Trainer(config.replace(filter_zero_spread=True, temperature=0.3, budget_low=2), progress=False)
    batch, metrics = trainer.step()
    assert metrics["rounds"] > 1
    assert torch.equal(torch.bincount(batch.rollouts.rows), batch.budgets)


def test_configuration(config):
    with pytest.raises(ValueError, match=r"temperature: vLLM samples at 0\.01 to 2\.0, got 2\.5"):
        Trainer(config.replace(temperature=2.5), progress=False)
    with pytest.raises(ValueError, match=r"entropy_temperature\.high: vLLM samples at 0\.01 to 2\.0, got 3"):
        Trainer(config.replace(entropy_temperature={"high": 3}), progress=False)
    with pytest.raises(ValueError, match=r"rollout_engine_args: vLLM refuses them: .*max_seqs"):
        Trainer(config.replace(rollout_engine_args={"max_seqs": 3}), progress=False)
    with pytest.raises(ValueError, match="rollout_engine: 'sglang' is none of generate, vllm"):
        TrainConfig(rollout_engine="sglang")
    with pytest.raises(ValueError, match="rollout_engine_args: 'generate' takes none"):
        TrainConfig(rollout_engine_args={"max_num_seqs": 8})
