"""torchrun with two processes against one: the same budgets, rewards and weights; resume; a failure ends all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import safetensors.torch
import torch
from coba_core.integrations.grpo import parallel
from coba_core.integrations.grpo.config import dump_config


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def weights(folder):
    last = sorted((Path(folder) / "checkpoints").glob("step-*"))[-1]
    return safetensors.torch.load_file(next((last / "model").glob("*.safetensors")))


def torchrun(processes, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "coba_core.cli", "train", "--quiet", *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def start(config, tmp_path, processes, **changes):
    """A run in a folder of its own; the folder."""
    folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    file = tmp_path / f"{folder.name}.yaml"
    file.write_text(dump_config(config.replace(output=str(folder), parallel="ddp", eval_every=0, **changes)))
    done = torchrun(processes, "--config", file)
    assert done.returncode == 0, done.stderr
    return folder


def same(one, two):
    for a, b in zip(lines(one / "allocations.jsonl"), lines(two / "allocations.jsonl"), strict=True):
        assert a == b  # prompts, budgets, estimates and mean rewards
    steps = [[s for s in lines(f / "metrics.jsonl") if s["step"]] for f in (one, two)]
    for a, b in zip(*steps, strict=True):
        assert (a["rows"], a["length"]) == (b["rows"], b["length"])
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5, abs=1e-7)
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5, abs=1e-6)
    assert any(s["updates"] for s in steps[0])


def test_two_processes_train_as_one_and_resume_as_one(small, tmp_path):
    one = start(small, tmp_path, 1, steps=3)
    two = start(small, tmp_path, 2, steps=3, stop_after=2)
    done = torchrun(1, "--resume", two, "--stop-after", "0")  # the last step by one process
    assert done.returncode == 0, done.stderr
    same(one, two)
    found = weights(two)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


def test_a_failure_of_any_process_ends_the_run(small, tmp_path):
    """The output folder is in use: the first process refuses it, and the other does not wait for ever."""
    file = tmp_path / "run.yaml"  # in the folder that the run is to write
    file.write_text(dump_config(small.replace(output=str(tmp_path), parallel="ddp")))
    done = torchrun(2, "--config", file)
    assert done.returncode != 0
    assert "is not empty" in done.stderr


def test_several_processes_must_be_asked_for(small, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="set parallel: ddp"):
        parallel.join(small)
    with pytest.raises(ValueError, match="rollout_engine: 'vllm'"):
        parallel.join(small.replace(parallel="ddp", rollout_engine="vllm"))


def test_a_prompt_with_most_rollouts_is_shared_by_tokens():
    """128 rollouts of 600 tokens and 30 x 4 of 100: both processes get the same tokens, within one rollout."""
    costs = [600] * 128 + [100] * 120
    for size in (2, 3, 8):
        shares = parallel.deal(costs, size)
        assert sorted(i for share in shares for i in share) == list(range(len(costs)))
        loads = [sum(costs[i] for i in share) for share in shares]
        assert max(loads) / (sum(loads) / size) < 1.02
    assert parallel.deal([3], 2) == [[0], []]
