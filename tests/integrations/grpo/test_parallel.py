"""torchrun with two processes against one: the same budgets, gradients and weights; resume; failures and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import safetensors.torch
import torch
from coba_core.integrations.grpo import checkpoint, parallel
from coba_core.integrations.grpo.config import dump_config
from coba_core.integrations.grpo.run import resumed_config, train


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def weights(folder):
    last = sorted((Path(folder) / "checkpoints").glob("step-*"))[-1]
    return safetensors.torch.load_file(next((last / "model").glob("*.safetensors")))


def command(processes, *arguments):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    return [*torchrun, "-m", "coba_core.cli", "train", "--quiet", *map(str, arguments)]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(processes, *arguments, **options):
    return subprocess.run(
        command(processes, *arguments), capture_output=True, text=True, timeout=120, env=environment(), **options
    )


def start(config, tmp_path, processes, **changes):
    """A run in a folder of its own; the folder. One process needs no torchrun."""
    folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
    config = config.replace(output=str(folder), eval_every=0, **changes)
    if processes == 1:
        train(config, progress=False)
        return folder
    file = tmp_path / f"{folder.name}.yaml"
    file.write_text(dump_config(config))
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


LORA = {"lora": {"r": 2, "target_modules": ["q_proj", "v_proj"]}}
EVERYTHING = {
    "kl_coef": 0.01, "minibatches": 2, "passes": 2, "filter_zero_spread": True, "micro_batch_tokens": 200,
    "gradient_checkpointing": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [{"parallel": "ddp", **LORA, **EVERYTHING}, {"parallel": "fsdp2", "micro_batch_tokens": 200}],
    ids=["ddp with LoRA and all options", "fsdp2"],
)
def test_two_processes_train_as_one_and_resume_as_one(small, tmp_path, options):
    one = start(small, tmp_path, 1, steps=3, **options)
    two = start(small, tmp_path, 2, steps=3, stop_after=1, **options)
    resumed = resumed_config(two, ["stop_after=0"])
    assert train(resumed, resume=True, progress=False)["finished"]  # the rest by one process
    same(one, two)
    found = weights(two)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(found.pop(name), tensor, rtol=1e-5, atol=1e-5)
    assert not found


def test_two_processes_resume_as_two(small, tmp_path):
    """To the last bit: dropout draws from a state of each process."""
    lora = {**LORA["lora"], "lora_dropout": 0.2}
    options = {"parallel": "fsdp2", "kl_coef": 0.01, "minibatches": 2, "filter_zero_spread": True, "lora": lora}
    whole = start(small, tmp_path, 2, steps=4, checkpoint_every=1, **options)
    killed = tmp_path / "killed"
    shutil.copytree(whole, killed)
    before, last = sorted((killed / "checkpoints").iterdir())
    shutil.rmtree(last)
    done = torchrun(2, "--resume", killed)
    assert done.returncode == 0, done.stderr
    assert before.is_dir() and last.is_dir()
    for name in ("metrics.jsonl", "allocations.jsonl"):
        both = [
            [{k: v for k, v in line.items() if "seconds" not in k} for line in lines(f / name)] for f in (whole, killed)
        ]
        assert both[0] == both[1]
    for name, tensor in weights(whole).items():
        assert torch.equal(weights(killed)[name], tensor)
    assert any("lora" in name for name in weights(whole))


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits on Windows")
def test_a_failure_of_any_process_ends_the_run(small, tmp_path):
    """The first process cannot write its checkpoint; the other does not wait for ever, and says why it ends."""
    import resource

    output = tmp_path / "run"
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(small.replace(output=str(output), parallel="ddp", checkpoint_every=2)))
    start(small, tmp_path, 1, steps=1)  # the policy is in the cache then, which may not grow either
    limit = 48 * 1024
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    done = torchrun(2, "--config", file, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard)))
    assert done.returncode != 0
    failure = r"checkpoint \S+/step-000002: not written .*the ones before it are untouched"
    assert re.search(f"train: error: {failure}", done.stderr), done.stderr
    assert re.search(f"train: error: process 1 ends, as process 0 failed: {failure}", done.stderr), done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no signals to torchrun on Windows")
def test_an_interruption_saves(small, tmp_path):
    """Ctrl-C, which torchrun passes on: the step is finished, the checkpoint written, and the run can go on."""
    output = tmp_path / "run"
    config = small.replace(output=str(output), parallel="fsdp2", steps=100_000, eval_every=0)
    file = tmp_path / "run.yaml"
    file.write_text(dump_config(config))
    running = subprocess.Popen(command(2, "--config", file), stderr=subprocess.PIPE, text=True, env=environment())
    try:
        while running.poll() is None and not (output / "allocations.jsonl").exists():
            time.sleep(0.05)
        running.send_signal(signal.SIGINT)
        error = running.communicate(timeout=60)[1]
    finally:
        running.kill()
    assert error.count("stopping after this step, then saving") == 1, error
    *_, saved = sorted((output / "checkpoints").glob("step-*"))
    assert f"saved {saved}; go on with: coba-core train --resume {output}" in error
    checkpoint.check(saved)
    assert lines(output / "metrics.jsonl")[-1]["step"] == int(saved.name.removeprefix("step-"))


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
