"""Checkpoints that are damaged, foreign or cannot be written: a clear error, and the last good one goes on."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from coba_core.integrations.grpo import checkpoint
from coba_core.integrations.grpo.run import resumed_config, train

from coba_core import UniformAllocator
from coba_core.cli import main
from coba_core.state import read_state, write_state


class Opens:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


@pytest.fixture
def stopped(small):
    """A run of three steps that stopped after two, with a checkpoint of each."""
    train(small.replace(steps=3, stop_after=2, eval_every=0, checkpoint_every=1), progress=False)
    return resumed_config(small.output, ["stop_after=0"])


def test_every_file_damaged_in_every_way(stopped, tmp_path):
    parent = Path(stopped.output) / "checkpoints"
    last = parent / "step-000002"
    other = tmp_path / "other"
    shutil.copytree(parent / "step-000001", other)
    UniformAllocator().save(other / "progress.json")
    names = sorted(p.relative_to(last).as_posix() for p in last.rglob("*") if p.is_file())
    assert {"training.pt", "allocator.json", "progress.json", "model/model.safetensors"} < set(names)
    for name in names:
        path = last / name
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        damaged = {"truncated": whole[:-1], "empty": b"", "flipped": bytes(flipped), "of a pickle": pickle.dumps(1)}
        if (other / name).read_bytes() != whole:
            damaged["of another checkpoint"] = (other / name).read_bytes()
        for content in damaged.values():
            path.write_bytes(content)
            with pytest.raises(ValueError, match=re.escape(str(path))) as raised:
                checkpoint.check(last)
            assert f"remove {last} to go on from before it" in str(raised.value)
        path.unlink()
        with pytest.raises(ValueError, match=re.escape(str(path))):
            checkpoint.check(last)
        path.write_bytes(whole)
    checkpoint.check(last)


def test_the_one_before_goes_on(stopped, tmp_path, capsys):
    """By the advice of the error, and to the same end."""
    undamaged = tmp_path / "copy"
    shutil.copytree(stopped.output, undamaged)
    assert train(resumed_config(undamaged, ["stop_after=0"]), resume=True, progress=False)["finished"]
    last = Path(stopped.output) / "checkpoints" / "step-000002"
    weights = last / "model" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 64
    weights.write_bytes(content)
    files = {p: p.read_bytes() for p in Path(stopped.output).glob("*.jsonl")}
    assert main(["train", "--resume", stopped.output, "--quiet", "--set", "stop_after=0"]) == 2
    assert f"{weights}: its checksum does not match" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in files} == files
    shutil.rmtree(last)
    assert train(stopped, resume=True, progress=False)["finished"]
    name = "checkpoints/step-000003/model/model.safetensors"
    assert (Path(stopped.output) / name).read_bytes() == (undamaged / name).read_bytes()


def test_a_checkpoint_cannot_run_code(stopped, tmp_path):
    """Neither a pickle in training.pt, with a digest that fits, nor one in a state file."""
    last = Path(stopped.output) / "checkpoints" / "step-000002"
    victim = tmp_path / "ran"
    torch.save({"optimizer": Opens(victim)}, last / "training.pt")
    state = json.loads((last / "progress.json").read_text())["state"]
    state["files"]["training.pt"] = checkpoint._digest(last / "training.pt")
    write_state(last / "progress.json", state)
    checkpoint.check(last)
    with pytest.raises(ValueError, match=r"training\.pt: not readable"):
        train(stopped, resume=True, progress=False)
    for name in ("allocator.json", "progress.json"):
        (last / name).write_bytes(pickle.dumps(Opens(victim)))
        with pytest.raises(ValueError, match=name):
            read_state(last / name)
    assert not victim.exists()
    pickle.loads(pickle.dumps(Opens(victim))).close()
    assert victim.exists()  # it would have


@pytest.mark.skipif(sys.platform == "win32", reason="no resource limits on Windows")
def test_a_full_disk(stopped):
    """Files cannot grow beyond 48 KiB, and the weights are larger: the checkpoints stay, and go on with more room."""
    import resource

    parent = Path(stopped.output) / "checkpoints"
    before = {p: p.read_bytes() for p in parent.rglob("*") if p.is_file()}
    assert max(map(len, before.values())) > 48 * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (48 * 1024, hard))
    try:
        with pytest.raises(OSError, match=r"step-000003: not written .*; the ones before it are untouched"):
            train(stopped, resume=True, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert {p: p.read_bytes() for p in parent.rglob("*") if p.is_file()} == before
    assert train(stopped, resume=True, progress=False)["finished"]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system where nobody may write")
def test_a_folder_that_cannot_be_written(small, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for folder in ("/proc/run", str(tmp_path / "file" / "run")):
        assert main(["train", "--quiet", f"--output={folder}"]) == 2
        error = capsys.readouterr().err
        assert folder in error and error.count("\n") == 1
