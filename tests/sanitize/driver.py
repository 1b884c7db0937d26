"""Calls every compiled kernel at every size that has a path of its own, on each instruction set that runs here.

``make sanitize`` runs it with a checked build and in valgrind; a fault shows in their output, not here. Arrays end
where the memory block does, so that one element too far is seen. Answers are not looked at, save that every call
returns, or refuses with a ValueError: tests/kernels compares them.
"""

from __future__ import annotations

import argparse
from itertools import product

import numpy as np

from coba_core.kernels import cython_backend as kernels
from coba_core.kernels.numpy_backend import EXPONENTIAL, FIRST_SUCCESS, INVERSE_VARIANCE, MIXED_GROUP, Form

SIZES = (0, 1, 2, 3, 7, 8, 63, 64, 65, 200, 255, 256, 257, 511, 512, 513, 1000, 4097)
LARGE = (32_768, 33_001)  # past where coefficients are kept
BOUNDS = ((0, 0), (0, 1), (2, 3), (2, 128), (1, 700))
WRONG = (np.nan, np.inf, -np.inf, -1.0, 2.0, 1e308, -0.0, 5e-324)


def rates(random: np.random.Generator, size: int) -> dict[str, np.ndarray]:
    """Pass rates that take the solvers' different ways; the last kind is none at all, which must do no harm either."""
    return {
        "any": random.uniform(0.0, 1.0, size),
        "counted": random.binomial(8, 0.4, size) / 8.0,
        "many classes": np.resize(random.uniform(0.0, 1.0, 200), size),
        "alike": np.full(size, 0.5),
        "edges": np.resize([0.0, 1.0, 5e-324, 1.0 - 2.0**-53, 0.5], size),
        "hopeless": np.zeros(size),
        "wrong": np.resize(WRONG, size),
    }


def forms(random: np.random.Generator, size: int) -> list[Form]:
    """Every saturation, with parameters for all and one a prompt."""
    found = []
    for saturation in (EXPONENTIAL, FIRST_SUCCESS, MIXED_GROUP, INVERSE_VARIANCE):
        found.append(Form(saturation, 6.26, 2.74, 0.5, 0.2))
        many = [np.ascontiguousarray(x) for x in random.uniform(0.1, 9.0, (4, size))]
        if size != 1:
            found.append(Form(saturation, *many))
    found += [Form(EXPONENTIAL, 0.0, 0.0, 0.0, 40.0), Form(EXPONENTIAL, 2.0, 2.0, 0.0, 1e-300)]
    return found


def solve(p: np.ndarray, source: Form | np.ndarray, low: int, high: int, threads: tuple[int, ...]) -> int:
    """Both solvers at totals from the least to the most."""
    least, most = len(p) * low, len(p) * high
    totals = sorted({least, min(least + 1, most), least + (most - least) // 3, max(most - 1, least), most})
    for total in totals:
        kernels.heap(p, source, low, high, total)
        for count in threads:
            kernels.threshold(p, source, low, high, total, count)
    return len(totals) * (1 + len(threads))


def refusals(random: np.random.Generator) -> int:
    """Arguments that do not belong together: reading on would leave the arrays."""
    p, form = random.uniform(0.0, 1.0, 5), Form(EXPONENTIAL, 6.26, 2.74, 0.5, 0.2)
    calls = [
        lambda: kernels.log_gains(p, form, np.full(4, 2)),
        lambda: kernels.gains(p, form, np.full(6, 2)),
        lambda: kernels.log_gain_table(p, form, 3, 2),
        lambda: kernels.heap(p, Form(EXPONENTIAL, np.ones(3), 1.0, 0.0, 1.0), 0, 9, 20),
        lambda: kernels.heap(p, np.ones((4, 9)), 0, 9, 20),
        lambda: kernels.use("mmx"),
    ]
    for solver, source in product((kernels.heap, kernels.threshold), (form, np.ones((5, 9)))):
        for low, high, total in ((-1, 9, 20), (4, 3, 20), (0, 9, -1), (0, 9, 46), (2, 9, 9), (0, 2**31, 20)):
            calls.append(lambda s=solver, x=source, a=low, b=high, t=total: s(p, x, a, b, t))
    calls += [lambda s=solver: s(p, np.ones((5, 9)), 0, 10, 20) for solver in (kernels.heap, kernels.threshold)]
    calls += [lambda t=threads: kernels.threshold(p, form, 0, 9, 20, t) for threads in (0, -1)]
    for place, call in enumerate(calls):
        try:
            call()
        except ValueError:
            continue
        raise AssertionError(f"call {place} of those that must be refused returned")
    return len(calls)


def main() -> None:
    """Runs them all and says how many calls that were."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--targets", nargs="*", default=["baseline", "avx2", "avx512"])
    parser.add_argument("--quick", action="store_true", help="fewer sizes and bounds, for valgrind")
    arguments = parser.parse_args()
    sizes = tuple(s for s in SIZES if s not in (3, 7, 63, 255, 511, 513, 1000)) if arguments.quick else SIZES
    bounds = ((0, 1), (2, 128)) if arguments.quick else BOUNDS
    random = np.random.default_rng(1)
    for target in arguments.targets:
        try:
            kernels.use(target)
        except ValueError as error:
            print(f"left out: {error}")
            continue
        calls = refusals(random)
        for size in (*sizes, *LARGE):
            large = size in LARGE
            for kind, p in rates(random, size).items():
                kernels.first_invalid(p)
                for form in forms(random, size)[:: 3 if large else 1]:
                    budgets = random.integers(0, 300, size)
                    kernels.log_gains(p, form, budgets)
                    kernels.gains(p, form, budgets)
                    kernels.log_gain_table(p, form, 2, 2 if large else 11)
                    calls += 4
                    for low, high in ((2, 128),) if large else bounds:
                        if kind == "wrong" and size > 300:
                            continue  # no order to find: slow, and nothing new
                        calls += solve(p, form, low, high, (1, 2, 3) if large else (1,))
                if kind != "wrong" and not large:
                    table = -np.sort(-random.integers(0, 5, (size, 12)).astype(np.float64), axis=1)
                    calls += solve(p, table, 0, 12, (1,)) + solve(p, table, 3, 7, (1,))
        print(f"{target}: {calls} calls returned", flush=True)


if __name__ == "__main__":
    main()
