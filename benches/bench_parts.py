"""Gains, history, groups, and a whole step of an allocator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import coba_core
from benches import peers
from benches.conftest import ALPHA, BETA, QUICK, TAU, pass_rates
from coba_core.kernels import cython_backend, numba_backend, numpy_backend

FORM = coba_core.CapabilityValue(ALPHA, BETA, TAU).form
PROMPTS = 512 if QUICK else 10**6
GAINS = {
    "gains, Cython": cython_backend.gains,
    "gains, Numba": numba_backend.gains,
    "gains, NumPy backend (same rounding)": numpy_backend.gains,
    "log gains, Cython": cython_backend.log_gains,
}


@pytest.mark.parametrize("name", GAINS)
def test_gains(measure: Any, name: str) -> None:
    p, budgets = pass_rates(PROMPTS), np.full(PROMPTS, 16)
    result = measure("gains", name, GAINS[name], p, FORM, budgets, prompts=PROMPTS)
    expected = peers.marginal_gains(p, ALPHA, BETA, TAU, budgets)
    np.testing.assert_allclose(np.exp(result) if name.startswith("log") else result, expected, rtol=1e-9)


def test_gains_in_numpy(measure: Any) -> None:
    p, budgets = pass_rates(PROMPTS), np.full(PROMPTS, 16)
    measure("gains", "gains, NumPy formula", peers.marginal_gains, p, ALPHA, BETA, TAU, budgets, prompts=PROMPTS)


def step(prompts: int, rollouts: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    rows = np.repeat(np.arange(prompts), rollouts // prompts)
    return (random.random(rollouts) < 0.5).astype(np.float64), rows


@pytest.mark.parametrize("seen", [256, 1000 if QUICK else 10**6])
def test_history(measure: Any, seen: int) -> None:
    history = coba_core.PassRateHistory()
    for first in range(0, seen, 10**5):
        ids = np.arange(first, min(first + 10**5, seen))
        history.update(ids, np.ones(len(ids)), np.arange(len(ids)))
    rewards, rows = step(256, 4096)
    ids = np.arange(256)
    measure("history", f"update, {seen:,} prompts seen", history.update, ids, rewards, rows, prompts=256)
    assert len(history) == seen


@pytest.mark.parametrize("kind", ["NumPy", "torch"])
def test_group_advantages(measure: Any, kind: str) -> None:
    rewards, rows = step(256, 4096)
    expected = coba_core.group_advantages(rewards, rows)
    given = (torch.from_numpy(rewards), torch.from_numpy(rows)) if kind == "torch" else (rewards, rows)
    result = measure("groups", f"group_advantages, 4,096 rows, {kind}", coba_core.group_advantages, *given, prompts=256)
    np.testing.assert_allclose(np.asarray(result), expected, atol=1e-12)


def test_repeat_index(measure: Any) -> None:
    budgets = coba_core.allocate(pass_rates(512), 8192)
    assert len(measure("groups", "repeat_index, 8,192 rows", coba_core.repeat_index, budgets, prompts=512)) == 8192


def test_allocator(measure: Any) -> None:
    prompts, total = 512, 8192
    allocator = coba_core.CapabilityAllocator()
    ids = np.arange(prompts)
    random = np.random.default_rng(0)
    p = pass_rates(prompts)

    def step() -> np.ndarray:
        budgets = allocator.allocate(ids, total)
        allocator.update(ids, rewards, rows)
        return budgets

    rows = coba_core.repeat_index(allocator.allocate(ids, total))
    rewards = (random.random(total) < p[rows]).astype(np.float64)
    assert measure("step", "CapabilityAllocator: allocate + update", step, prompts=prompts, total=total).sum() == total
