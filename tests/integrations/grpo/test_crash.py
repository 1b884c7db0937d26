"""A run that is killed by SIGKILL, again and again, ends as if it had not been. More moments: studies/crash.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from studies.crash import CrashError, compare, crash

if sys.platform == "win32":
    pytest.skip("no SIGKILL on Windows", allow_module_level=True)


def test_killed_runs_end_as_the_undisturbed(tmp_path: Path) -> None:
    *_, done = crash(tmp_path, 4)
    assert done.kills == 4
    assert done.runs >= 1
    assert done.while_saving >= 1
    # and what they were compared by would have noticed
    weights = next((tmp_path / "undisturbed").rglob("*.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(CrashError, match="safetensors is not what an undisturbed run writes"):
        compare(tmp_path / "undisturbed", tmp_path / "killed-0")
