"""Kernels called from eight threads at once give what they give to one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from coba_core import CapabilityAllocator, CapabilityValue, FirstSuccess, GainTable, KnapsackValue, PowerPreference
from coba_core.allocate import BudgetError, allocate

THREADS = 8


def at_once(work: Callable[[int], Any]) -> list[Any]:
    """work(0) … work(7), each in a thread of its own, all let go at the same moment."""
    gate = threading.Barrier(THREADS)

    def one(number: int) -> Any:
        gate.wait()
        return work(number)

    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(one, range(THREADS)))


def calls(implementation: Any, module: Any, seed: int) -> list[Any]:
    """Every kernel of a backend, on inputs of this seed that take its different ways."""
    random = np.random.default_rng(seed)
    found: list[Any] = []
    sizes = (1, 65, 700) if implementation.backend == "numpy" else (1, 65, 700, 40_000)
    for size in sizes:
        for p in (random.uniform(0, 1, size), random.binomial(8, 0.4, size) / 8.0):
            found.append(module.first_invalid(np.append(p, np.nan)))
            for value in (CapabilityValue(7.26, 3.74), KnapsackValue(), PowerPreference(0, 2) * FirstSuccess()):
                budgets = np.full(size, 3)
                found.append(module.log_gains(p, value.form, budgets).tobytes())
                found.append(module.gains(p, value.form, budgets).tobytes())
                found.append(module.log_gain_table(p, value.form, 2, 5).tobytes())
                for solver in ("heap", "threshold"):
                    found.append(getattr(module, solver)(p, value.form, 2, 60, size * 9 + 1).tobytes())
            if size == 65:
                table = GainTable(-np.sort(-random.integers(0, 5, (size, 12)).astype(float), axis=1))
                found.append(module.threshold(p, table.table, 0, 12, size * 5).tobytes())
            if size == 1:
                continue
            if size == 65 and hasattr(module, "dp"):
                found.append(module.dp(p, KnapsackValue().form, 2, 9, size * 4).tobytes())
            try:  # an error in one thread leaves the others alone
                allocate(p, 10**9, backend=implementation.backend)
            except BudgetError as error:
                found.append(str(error))
    return found


def test_eight_threads_give_what_one_gives(implementation: Any) -> None:
    with implementation.module() as module:
        alone = [calls(implementation, module, seed) for seed in range(THREADS)]
        together = at_once(lambda number: [calls(implementation, module, number) for _ in range(2)])
    assert together == [[one, one] for one in alone]


def test_threads_of_the_compiled_solver_in_threads(compiled: Any) -> None:
    """OpenMP's threads within Python's."""
    if compiled.backend != "cython":
        return
    p = np.random.default_rng(8).uniform(0, 1, 70_000)
    with compiled.module():
        expected = allocate(p, 700_001, backend="cython")
        for found in at_once(lambda number: allocate(p, 700_001, backend="cython", threads=1 + number % 3)):
            assert np.array_equal(found, expected)


def steps(seed: int) -> tuple[list[list[int]], Any]:
    """Some steps of an allocator of its own: the budgets of each, and its state at the end."""
    allocator, random = CapabilityAllocator(noise=0.02, seed=seed), np.random.default_rng(seed)
    budgets = []
    for _ in range(20):
        ids = [f"prompt {n}" for n in random.choice(400, 64, replace=False)]
        budgets.append(allocator.allocate(ids, 1024))
        rows = np.repeat(np.arange(64), budgets[-1])
        allocator.update(ids, random.binomial(1, 0.4, len(rows)), rows)
    return [b.tolist() for b in budgets], allocator.state_dict()


def test_allocators_of_their_own_in_eight_threads() -> None:
    """An allocator belongs to one thread at a time; several, each in its own, do not disturb one another."""
    assert at_once(steps) == [steps(number) for number in range(THREADS)]
