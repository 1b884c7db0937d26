"""Allocations: every solver of ours, and every peer, on the same pass rates. Each must reach the same total value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import coba_core
from benches import peers
from benches.conftest import ALPHA, BETA, HIGH, LOW, QUICK, TAU, pass_rates, sizes
from coba_core.kernels import cython_backend, numba_backend, numpy_backend

VALUE = coba_core.CapabilityValue(ALPHA, BETA, TAU)
FORM = VALUE.form

Solver = Callable[[np.ndarray, int, int], np.ndarray]

OURS: dict[str, Solver] = {
    "threshold, Cython": lambda p, high, total: cython_backend.threshold(p, FORM, LOW, high, total),
    "threshold, Numba": lambda p, high, total: numba_backend.threshold(p, FORM, LOW, high, total),
    "threshold, NumPy": lambda p, high, total: numpy_backend.threshold(p, FORM, LOW, high, total),
    "heap, Cython": lambda p, high, total: cython_backend.heap(p, FORM, LOW, high, total),
    "heap, Numba": lambda p, high, total: numba_backend.heap(p, FORM, LOW, high, total),
    "reference, NumPy sort": lambda p, high, total: numpy_backend.reference(p, FORM, LOW, high, total),
    "DP, Numba": lambda p, high, total: numba_backend.dp(p, FORM, LOW, high, total),
}
PEERS: dict[str, Any] = {
    "heapq, Numba": peers.numba_heap,
    "heapq, Python (paper)": peers.python_heap,
    "heapq, Python (released)": peers.released_heap,
    "argpartition, NumPy": peers.argpartition,
    "linear program, SciPy": peers.linear_program,
    "DP, Python": peers.python_dp,
}
LARGEST = {  # what still ends within seconds
    "threshold, NumPy": 4096,
    "heap, Numba": 10**5,
    "heap, Cython": 10**5,
    "heapq, Numba": 10**5,
    "reference, NumPy sort": 10**5,
    "DP, Numba": 512,
    "heapq, Python (paper)": 4096,
    "heapq, Python (released)": 4096,
    "argpartition, NumPy": 10**5,
    "linear program, SciPy": 64,
    "DP, Python": 8,
}
PLAN = [
    (name, prompts)
    for name in (*OURS, *PEERS)
    for prompts in sizes(8, 64, 512, 4096, 10**4, 10**5, 10**6, 10**7)
    if prompts <= LARGEST.get(name, 10**7) and (prompts > 8) == (name != "DP, Python")
]


def solve(name: str) -> Solver:
    if name in OURS:
        return OURS[name]
    return lambda p, high, total: PEERS[name](p, ALPHA, BETA, TAU, LOW, high, total)


def check(p: np.ndarray, budgets: np.ndarray, high: int, total: int) -> None:
    assert budgets.sum() == total and budgets.min() >= LOW and budgets.max() <= high
    best = coba_core.allocate(p, total, low=LOW, high=high, value=VALUE)
    np.testing.assert_allclose(VALUE.total(p, budgets), VALUE.total(p, best), rtol=1e-12)


@pytest.mark.parametrize(("name", "prompts"), PLAN)
def test_size(measure: Any, name: str, prompts: int) -> None:
    p, total = pass_rates(prompts), 16 * prompts
    slow = name.startswith("DP") or (prompts >= 10**5 and "threshold" not in name)
    budgets = measure("size", name, solve(name), p, HIGH, total, slow=slow, prompts=prompts, total=total)
    check(p, budgets, HIGH, total)


@pytest.mark.parametrize("mean", [16, 64, 250, 1000])
@pytest.mark.parametrize("name", ["threshold, Cython", "threshold, Numba", "heap, Cython", "argpartition, NumPy"])
def test_total(measure: Any, name: str, mean: int) -> None:
    prompts = 64 if QUICK else 10**4
    p, total = pass_rates(prompts), mean * prompts
    budgets = measure(
        "total", name, solve(name), p, 4000, total, slow="threshold" not in name, prompts=prompts, total=total
    )
    check(p, budgets, 4000, total)


@pytest.mark.parametrize("prompts", sizes(64, 512, 4096, 10**6))
@pytest.mark.parametrize("kind", ["uniform", "counts"])
def test_public(measure: Any, prompts: int, kind: str) -> None:
    p, total = pass_rates(prompts, kind), 16 * prompts
    budgets = measure(
        "public",
        f"allocate(), {kind} pass rates",
        lambda: coba_core.allocate(p, total, value=VALUE),
        prompts=prompts,
        total=total,
    )
    assert budgets.sum() == total


@pytest.mark.parametrize("threads", [1, 2])
def test_threads(measure: Any, threads: int) -> None:
    prompts = 512 if QUICK else 10**6
    p, total = pass_rates(prompts), 16 * prompts
    budgets = measure(
        "threads",
        f"allocate(), threads={threads}",
        lambda: coba_core.allocate(p, total, value=VALUE, threads=threads),
        prompts=prompts,
        total=total,
    )
    np.testing.assert_array_equal(budgets, coba_core.allocate(p, total, value=VALUE))


VALUES = {
    "Beta × Exponential (CoBA)": VALUE,
    "Power(1, 2) × MixedGroup (Knapsack-RL)": coba_core.KnapsackValue(),
    "Power(0, 1) × FirstSuccess": coba_core.PowerPreference(0, 1) * coba_core.FirstSuccess(),
    "Power(0, 0) × InverseVariance (Neyman)": coba_core.PowerPreference(0, 0) * coba_core.InverseVariance(),
}


@pytest.mark.parametrize("solver", ["threshold", "dp"])
@pytest.mark.parametrize("name", VALUES)
def test_value(measure: Any, name: str, solver: str) -> None:
    prompts = 64 if QUICK else 1024
    p, total, value = pass_rates(prompts), 8 * prompts, VALUES[name]
    budgets = measure(
        "value",
        f"{solver}, {name}",
        lambda: coba_core.allocate(p, total, value=value, solver=solver),
        slow=solver == "dp",
        prompts=prompts,
        total=total,
    )
    best = coba_core.allocate(p, total, value=value)
    np.testing.assert_allclose(value.total(p, budgets), value.total(p, best), rtol=1e-12)


def test_evaluation(measure: Any) -> None:
    """The floor that a vectorised program pays before it decides anything."""
    for_check = pass_rates(512)
    np.testing.assert_allclose(
        peers.marginal_gains(for_check, ALPHA, BETA, TAU, 16), VALUE.gains(for_check, np.full(512, 16)), rtol=1e-9
    )
    prompts = 512 if QUICK else 10**6
    p, budgets = pass_rates(prompts), np.full(prompts, 16)
    measure(
        "size",
        "one NumPy evaluation of the gains",
        lambda: peers.marginal_gains(p, ALPHA, BETA, TAU, budgets),
        prompts=prompts,
        total=16 * prompts,
    )
