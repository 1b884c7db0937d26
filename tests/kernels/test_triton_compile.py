"""Every Triton kernel × dtype compiles for the GPUs that are supported, none of which need be there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "benches" / "gpu" / "compile_all.py"


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_compiles(target: str) -> None:
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--target", target], env=environment, capture_output=True, text=True
    )
    print(done.stdout, done.stderr)  # registers and spills: pytest -rP shows them
    assert done.returncode == 0, done.stdout + done.stderr
