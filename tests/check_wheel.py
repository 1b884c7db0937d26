"""Run by `make wheel` in an environment that holds the wheel and NumPy alone."""

import importlib
import sys
from pathlib import Path

import coba_core
import coba_core.kernels

importlib.import_module("coba_core.integrations")
here = Path(coba_core.__file__)
assert "site-packages" in here.parts, f"not the wheel: {here}"
assert (here.parent / "py.typed").is_file(), "py.typed is missing"
assert coba_core.kernels.available()["cython"] == (True, ""), coba_core.kernels.available()
heavy = {"numba", "torch", "triton", "transformers", "scipy"} & set(sys.modules)
assert not heavy, f"import coba_core brought in {heavy}"
budgets = coba_core.allocate([0.4, 0.1], 6, high=16, value=coba_core.KnapsackValue())
assert budgets.tolist() == [4, 2], budgets
print("the wheel works:", coba_core.__version__, coba_core.kernels.load("coba_core.kernels.cython_backend").target)
