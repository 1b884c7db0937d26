"""Backends: one file each, the same functions with the same signatures, the same answers bit for bit.

`allocate` picks the one of highest priority that is there and supports the solver and the value. The environment
variable ``COBA_CORE_BACKEND`` names one for the whole process; a call's ``backend=`` goes before it.

>>> [name for name, (usable, _) in available().items() if usable][-1]
'numpy'
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from dataclasses import dataclass
from functools import cache
from types import ModuleType

logger = logging.getLogger("coba_core")


@dataclass(frozen=True)
class Backend:
    """One implementation of the kernels, in order of preference (see :data:`BACKENDS`)."""

    name: str
    module: str
    requires: str | None
    devices: frozenset[str]
    solvers: frozenset[str]
    custom_values: bool
    hint: str

    def usable(self) -> tuple[bool, str]:
        """(True, version or "") if it can run here, else (False, the reason and what to do)."""
        try:
            if self.requires is not None and importlib.util.find_spec(self.requires) is None:
                return False, f"{self.requires} is not installed: {self.hint}"
            module = load(self.module)
            if "cpu" not in self.devices:
                return module.usable()  # type: ignore[no-any-return]
        except ImportError as error:
            return False, f"{error}: {self.hint}"
        return True, ""


BACKENDS = (
    Backend(
        "cython",
        "coba_core.kernels.cython_backend",
        None,
        frozenset({"cpu"}),
        frozenset({"threshold", "heap"}),
        False,
        "install a wheel, or install with a C compiler present",
    ),
    Backend(
        "numba",
        "coba_core.kernels.numba_backend",
        "numba",
        frozenset({"cpu"}),
        frozenset({"threshold", "heap", "dp"}),
        True,
        "pip install coba-core[numba]",
    ),
    Backend(
        "numpy",
        "coba_core.kernels.numpy_backend",
        None,
        frozenset({"cpu"}),
        frozenset({"threshold", "heap", "dp", "reference"}),
        True,
        "",
    ),
    Backend(
        "triton",
        "coba_core.kernels.triton_backend",
        "triton",
        frozenset({"cuda"}),
        frozenset({"threshold"}),
        False,
        "pip install coba-core[gpu]",
    ),
)
SOLVERS = ("threshold", "heap", "dp", "reference")


@cache
def load(module: str) -> ModuleType:
    """The backend's module, imported once."""
    return importlib.import_module(module)


@cache
def _say_once(reason: str) -> None:
    logger.warning("the compiled kernels are not used (%s); falling back", reason)


def available() -> dict[str, tuple[bool, str]]:
    """For each backend whether it can run here, and if not why."""
    return {backend.name: backend.usable() for backend in BACKENDS}


DEFAULT = os.environ.get("COBA_CORE_BACKEND", "auto")


@cache
def select(backend: str, solver: str, custom: bool) -> ModuleType:
    """The module that will run: backend "auto" or a name; ValueError if a named one cannot."""
    name = DEFAULT if backend == "auto" else backend
    if solver not in SOLVERS:
        raise ValueError(f"solver is {solver!r}, not one of 'auto', {', '.join(map(repr, SOLVERS))}")
    names = [candidate.name for candidate in BACKENDS]
    if name != "auto" and name not in names:
        raise ValueError(f"backend is {name!r}, not one of 'auto', {', '.join(map(repr, names))}")
    for candidate in BACKENDS:
        if name not in ("auto", candidate.name):
            continue
        if "cpu" not in candidate.devices:
            usable, reason = False, "it takes tensors that lie on a GPU"
        else:
            usable, reason = candidate.usable()
        if usable and solver not in candidate.solvers:
            usable, reason = False, f"it has no solver {solver!r}"
        elif usable and custom and not candidate.custom_values:
            usable, reason = False, "it cannot inline a custom gain"
        elif not usable and name == "auto" and candidate.name == "cython":
            _say_once(reason)
        if usable:
            return load(candidate.module)
        if name != "auto":
            raise ValueError(f"backend {name!r} cannot run here: {reason}")
    raise AssertionError("unreachable: the NumPy backend supports every solver")


@cache
def for_gpu(backend: str = "auto", solver: str = "threshold", forms_only: bool = True) -> ModuleType | None:
    """The Triton kernels, for tensors that lie on a GPU; None where the CPU's are to be used.

    None if another backend or solver is asked for, if the value is no form (a table, a user's gain), or if Triton
    cannot run. ValueError if "triton" is asked for by name and cannot.
    """
    name = DEFAULT if backend == "auto" else backend
    if name not in ("auto", "triton"):
        return None
    triton = next(candidate for candidate in BACKENDS if candidate.name == "triton")
    usable, reason = triton.usable()
    if usable and solver not in triton.solvers:
        usable, reason = False, f"it has no solver {solver!r}"
    elif usable and not forms_only:
        usable, reason = False, "it has no tables and no custom gains"
    if usable:
        return load(triton.module)
    if name == "triton":
        raise ValueError(f"backend 'triton' cannot run here: {reason}")
    logger.warning("tensors on a GPU go through the CPU's kernels (%s)", reason)
    return None
