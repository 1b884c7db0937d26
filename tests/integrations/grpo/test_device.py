"""The loop with history and budgets on the policy's device, in Triton's interpreter (`make triton`) or on a GPU."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")

from coba_core.integrations.grpo import loop, methods  # noqa: E402

INTERPRETED = bool(triton.knobs.runtime.interpret)


def run(config, steps=6):
    """Budgets and rewards of some steps, and the last metrics."""
    trainer = loop.Trainer(config, progress=False)
    seen = []
    for _ in range(steps):
        batch, metrics = trainer.step()
        seen.append((batch.budgets.tolist(), batch.rewards.tolist()))
    return seen, metrics, trainer


@pytest.mark.skipif(not INTERPRETED, reason="TRITON_INTERPRET=1 was not set (make triton sets it)")
def test_same_run_as_on_the_cpu(small, monkeypatch):
    config = small.replace(allocator="coba", allocator_args={"history": {"window": 2}}, device="cpu")
    expected, metrics, _ = run(config)
    cpu = torch.device("cpu")
    monkeypatch.setattr(
        loop,
        "make_allocator",
        lambda c, size, device: methods.on_device(
            size, methods.coba_core.Exponential(), methods.coba_core.CapabilitySchedule(), c, cpu
        ),
    )
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy what a card computes without a word
        found, on_device, trainer = run(config)
        state = trainer.allocator.state_dict()
    assert found == expected
    assert len(set(map(tuple, (b for b, _ in found)))) > 1  # in the second pass budgets follow the rewards
    for name in ("alpha", "beta", "failure_rate", "budget_max", "share_unseen"):
        assert on_device[name] == pytest.approx(metrics[name], rel=1e-9), name
    assert state["kind"] == "CapabilityAllocator"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_policy_on_a_gpu_keeps_its_allocator_there(small):
    seen, _, trainer = run(small.replace(allocator="coba", device="cuda"))
    assert type(trainer.allocator).__name__ == "DeviceCapabilityAllocator"
    assert all(sum(budgets) == 48 for budgets, _ in seen)
