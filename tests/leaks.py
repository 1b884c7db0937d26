"""Memory after many calls: ``python tests/leaks.py --calls 1000000``, or tests/test_leaks.py with a few thousand.

Every public kernel of every backend and the public calls, those that raise too, in turn. After a warm-up in which
caches fill, the process may not grow: neither by what malloc holds for it (glibc's mallinfo2), nor by Python's blocks,
nor, but for the pages that the allocator keeps, by its resident set.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import coba_core
from coba_core import kernels
from coba_core.kernels.numpy_backend import FIRST_SUCCESS, Form

PAGE = 4096


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """What the process holds: resident bytes, malloc's bytes in use (0 where glibc does not say), Python's blocks."""

    resident: int
    malloc: int
    blocks: int

    @classmethod
    def now(cls) -> Memory:
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
        malloc = 0
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallinfo2"):
            libc.mallinfo2.restype = MallInfo
            info = libc.mallinfo2()
            malloc = info.uordblks + info.hblkhd
        return cls(resident, malloc, sys.getallocatedblocks())


def refused(call: Callable[[], Any]) -> Callable[[], None]:
    """The call, which must raise ValueError or TypeError."""

    def one() -> None:
        try:
            call()
        except (ValueError, TypeError):
            return
        raise AssertionError("a call that must be refused returned")

    return one


def kernel_calls(module: Any, compiled: bool) -> list[Callable[[], Any]]:
    """Every kernel of a backend on eight prompts; the compiled one's refusals besides."""
    p, budgets = np.linspace(0.0, 1.0, 8), np.arange(8) + 2
    form, many = coba_core.KnapsackValue().form, Form(FIRST_SUCCESS, np.ones(8), np.ones(8), np.zeros(8), np.ones(8))
    table, classes = -np.sort(-np.outer(np.arange(8.0), np.arange(9.0)), axis=1), np.resize([0.0, 0.5, 0.7], 64)
    calls: list[Callable[[], Any]] = [
        lambda: module.first_invalid(p),
        lambda: module.log_gains(p, form, budgets),
        lambda: module.gains(p, many, budgets),
        lambda: module.log_gain_table(p, form, 2, 9),
        lambda: module.heap(p, many, 1, 9, 40),
        lambda: module.heap(p, table, 0, 9, 40),
        lambda: module.threshold(p, form, 2, 9, 40),
        lambda: module.threshold(p, many, 1, 9, 40),
        lambda: module.threshold(p, table, 0, 9, 40),
        lambda: module.threshold(classes, form, 2, 9, 300),
    ]
    if hasattr(module, "dp"):
        calls.append(lambda: module.dp(p, form, 2, 5, 24))
    if hasattr(module, "reference"):
        calls.append(lambda: module.reference(p, form, 2, 5, 24))
    if compiled:
        calls += [
            refused(lambda: module.log_gains(p, form, budgets[:4])),
            refused(lambda: module.heap(p, table[:4], 0, 9, 40)),
            refused(lambda: module.threshold(p, Form(FIRST_SUCCESS, np.ones(3), 1.0, 0.0, 1.0), 0, 9, 40)),
            refused(lambda: module.threshold(p, form, 2, 9, 400)),
            refused(lambda: module.threshold(p.astype(np.float32), form, 2, 9, 40)),
            refused(lambda: module.use("mmx")),
        ]
    return calls


def public_calls() -> list[Callable[[], Any]]:
    """What a trainer calls, and what it is refused."""
    rates, ids = [0.0, 0.1, 0.5, 0.9, 1.0, 0.3, 0.7, 0.2], list("abcdefgh")
    allocator = coba_core.CapabilityAllocator(high=12)
    rows = coba_core.repeat_index(np.full(8, 6))
    rewards = np.resize([1.0, 0.0, 0.0], 48)
    return [
        lambda: coba_core.allocate(rates, 64, high=12),
        lambda: coba_core.allocate(rates, 64, high=12, value=coba_core.KnapsackValue(), solver="heap"),
        lambda: coba_core.group_advantages(rewards, rows),
        lambda: allocator.allocate(ids, 64),
        lambda: allocator.update(ids, rewards, rows),
        lambda: allocator.load_state_dict(allocator.state_dict()),
        refused(lambda: coba_core.allocate(rates, 3)),
        refused(lambda: coba_core.allocate([0.5, float("nan")], 8, high=4)),
        refused(lambda: coba_core.allocate(rates, 64, backend="none")),
        refused(lambda: coba_core.allocate([["x"]], 8)),
        refused(lambda: allocator.load_state_dict({})),
    ]


def everything(backends: list[str]) -> dict[str, list[Callable[[], Any]]]:
    """The calls by whose they are."""
    found = {"public": public_calls()}
    for backend in kernels.BACKENDS:
        if backend.name in backends and backend.usable()[0]:
            found[backend.name] = kernel_calls(kernels.load(backend.module), backend.name == "cython")
    return found


def grown(calls: list[Callable[[], Any]], count: int, warm_up: int) -> tuple[Memory, Memory]:
    """Memory after the warm-up, and after `count` calls more."""
    turn = itertools.cycle(calls)
    for call in itertools.islice(turn, max(warm_up, 20 * len(calls))):
        call()
    before = Memory.now()
    for call in itertools.islice(turn, count):
        call()
    return before, Memory.now()


def main() -> int:
    """Prints how much each group of calls grew; exit status 1 if one of them leaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000, help="of each group [%(default)s]")
    parser.add_argument("--backends", nargs="*", default=["cython", "numba", "numpy"])
    arguments = parser.parse_args()
    failed = False
    print("| calls | | resident, KiB | malloc, bytes | Python's blocks |\n|---|---:|---:|---:|---:|")
    for name, calls in everything(arguments.backends).items():
        before, after = grown(calls, arguments.calls, arguments.calls // 20)
        resident, malloc = after.resident - before.resident, after.malloc - before.malloc
        blocks = after.blocks - before.blocks
        print(f"| {name} | {arguments.calls:,} | {resident / 1024:+.0f} | {malloc:+,} | {blocks:+} |", flush=True)
        # A leak of one object in each of these calls would be a thousand times as much.
        failed |= malloc > arguments.calls // 10 or blocks > arguments.calls // 1000 + 100 or resident > 4 << 20
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
