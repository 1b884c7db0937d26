"""Fixtures for the core's tests: every solver on every CPU backend and instruction set, the vectors, Hypothesis."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings

from coba_core import allocate, kernels

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("fuzz", deadline=None, max_examples=12_500)  # test_adversarial_floats takes eight times that
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def targets() -> list[str]:
    """The instruction sets that the compiled kernels can use here, the plainest first."""
    if not kernels.available()["cython"][0]:
        return []
    module = kernels.load("coba_core.kernels.cython_backend")
    usable, best = [], module.target
    for name in ("baseline", "avx2", "avx512"):
        try:
            module.use(name)
        except ValueError:
            continue
        usable.append(name)
    module.use(best)
    return usable


@dataclass(frozen=True)
class Implementation:
    """A backend, and for the compiled one the instruction set that it is held to."""

    backend: str
    target: str | None = None

    def __str__(self) -> str:
        return self.backend if self.target is None else f"{self.backend}-{self.target}"

    @contextmanager
    def module(self) -> Iterator[Any]:
        """The kernels' module; the instruction set is put back afterwards."""
        module = kernels.load(f"coba_core.kernels.{self.backend}_backend")
        if self.target is None:
            yield module
            return
        before = module.target
        module.use(self.target)
        try:
            yield module
        finally:
            module.use(before)


@dataclass(frozen=True)
class Solver:
    """One solver of one implementation, called like `allocate`."""

    implementation: Implementation
    name: str

    def __str__(self) -> str:
        return f"{self.implementation}-{self.name}"

    def __call__(self, pass_rates: Any, total_budget: int, **options: Any) -> np.ndarray:
        with self.implementation.module():
            return allocate(
                pass_rates, total_budget, solver=self.name, backend=self.implementation.backend, **options
            )


IMPLEMENTATIONS = [
    Implementation(backend.name, target)
    for backend in kernels.BACKENDS
    if "cpu" in backend.devices and backend.usable()[0]
    for target in (targets() if backend.name == "cython" else [None])
]
SOLVERS = [
    Solver(implementation, name)
    for implementation in IMPLEMENTATIONS
    for name in kernels.SOLVERS
    if name in next(b.solvers for b in kernels.BACKENDS if b.name == implementation.backend)
]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test runs once for each: `solver`, `large_solver` (no table of gains), `implementation`, `compiled`."""
    for name, choices in (
        ("solver", SOLVERS),
        ("large_solver", [solver for solver in SOLVERS if solver.name in ("threshold", "heap")]),
        ("implementation", IMPLEMENTATIONS),
        ("compiled", [x for x in IMPLEMENTATIONS if x.backend != "numpy"]),
    ):
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, choices, ids=str)


@pytest.fixture(scope="session")
def exact_solvers() -> list[Solver]:
    """The solvers that compare gains one by one: from the same floating-point gains the same budgets."""
    return [solver for solver in SOLVERS if solver.name in ("threshold", "heap")]


@pytest.fixture(scope="session")
def dp_solvers() -> list[Solver]:
    """The dynamic programmes, which add gains up."""
    return [solver for solver in SOLVERS if solver.name == "dp"]


@pytest.fixture(scope="session")
def vectors() -> Callable[[str], list[dict[str, Any]]]:
    """The cases of one file of tests/vectors, by its name."""
    folder = Path(__file__).parent / "vectors"

    def load(name: str) -> list[dict[str, Any]]:
        cases: list[dict[str, Any]] = json.loads((folder / f"{name}.json").read_text())
        return cases

    return load
