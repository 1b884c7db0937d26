"""Which backend runs, what each of them offers, and how they refuse."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from coba_core import KnapsackValue, kernels
from coba_core.kernels import Backend
from coba_core.kernels.numpy_backend import FIRST_SUCCESS, Form


def test_every_backend_has_what_it_says(implementation: Any) -> None:
    backend = next(b for b in kernels.BACKENDS if b.name == implementation.backend)
    with implementation.module() as module:
        for name in ("log_gains", "gains", "log_gain_table", "first_invalid", *backend.solvers):
            assert getattr(module, name).__doc__, name


def test_numpy_is_always_there_and_last() -> None:
    assert kernels.available()["numpy"] == (True, "")
    cpu = [b for b in kernels.BACKENDS if "cpu" in b.devices]
    assert cpu[-1].name == "numpy" and cpu[-1].solvers == set(kernels.SOLVERS)
    assert len({b.name for b in kernels.BACKENDS}) == len(kernels.BACKENDS)


def test_automatic_is_the_first_that_can() -> None:
    usable = [b for b in kernels.BACKENDS if "cpu" in b.devices and b.usable()[0]]
    for solver in kernels.SOLVERS:
        for custom in (False, True):
            first = next(b for b in usable if solver in b.solvers and (b.custom_values or not custom))
            assert kernels.select("auto", solver, custom) is kernels.load(first.module)


def test_a_backend_that_is_not_installed_says_what_to_do() -> None:
    missing = Backend("x", "coba_core.kernels.x", "no_such_package", frozenset(), frozenset(), False, "pip install x")
    assert missing.usable() == (False, "no_such_package is not installed: pip install x")
    broken = Backend("x", "coba_core.kernels.no_such_module", None, frozenset(), frozenset(), False, "build it")
    usable, reason = broken.usable()
    assert not usable and re.fullmatch(r"No module named 'coba_core\.kernels\.no_such_module': build it", reason)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 65, 1000])
def test_first_invalid(implementation: Any, size: int) -> None:
    with implementation.module() as module:
        assert module.first_invalid(np.empty(0)) == -1
        for good in (0.0, -0.0, 1.0, 0.5, 5e-324):
            assert module.first_invalid(np.full(size, good)) == -1
        for wrong in (np.nan, -np.nan, np.inf, -np.inf, -5e-324, np.nextafter(1.0, 2.0)):
            for place in {0, size // 2, size - 1}:
                p = np.full(size, 0.5)
                p[place:] = wrong
                assert module.first_invalid(p) == place


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if not k.startswith("COBA_CORE_")} | environment
    return subprocess.run([sys.executable, "-c", code], env=variables, capture_output=True, text=True)


def test_the_instruction_set_can_be_forced(implementation: Any) -> None:
    if implementation.target is None:
        return
    code = "from coba_core.kernels import cython_backend; print(cython_backend.target)"
    assert run(code, COBA_CORE_CPU=implementation.target).stdout.strip() == implementation.target
    failed = run(code, COBA_CORE_CPU="mmx")
    assert failed.returncode != 0 and "COBA_CORE_CPU is 'mmx', not one that this processor" in failed.stderr


def test_arrays_that_do_not_belong_together(implementation: Any) -> None:
    """The compiled kernels never read beyond an array."""
    if implementation.backend != "cython":
        return
    p, form = np.full(5, 0.5), KnapsackValue().form
    with implementation.module() as module:
        with pytest.raises(ValueError, match="4 numbers for 5 prompts"):
            module.log_gains(p, form, np.full(4, 2))
        with pytest.raises(ValueError, match="4 rows for 5 prompts"):
            module.threshold(p, np.ones((4, 9)), 0, 9, 20)
        with pytest.raises(ValueError, match="3 numbers for 5 prompts"):
            module.heap(p, Form(FIRST_SUCCESS, np.ones(3), 1.0, 0.0, 1.0), 0, 9, 20)
