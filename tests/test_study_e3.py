"""The E3 study end to end, on a policy that has barely been warmed up."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parents[1] / "studies" / "e3.py"


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    spec = importlib.util.spec_from_file_location("study_e3", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore::coba_core.BudgetWarning")
def test_cells_are_kept_and_spend_the_same(study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--output", str(tmp_path / "e3"), "--seeds", "2", "--steps", "2", "--final-samples", "4"]
    methods = ["GRPO", "all (E3)", "DAPO filtering"]
    arguments += ["--policy-args", '{"steps": 20, "hidden": 32, "batch": 32}', "--methods", *methods]
    assert study.main(arguments) == 0
    cells = {path.name: json.loads(path.read_text()) for path in (tmp_path / "e3" / "cells").iterdir()}
    assert len(cells) == 2 * len(methods)
    for cell in cells.values():
        assert cell["rollouts"] == 2 * 256
        assert len(cell["correct"]) == 256 and cell["evaluations"][-1]["rollouts"] == 2 * 256
        assert np.isfinite([x for curve in cell["curves"].values() for x in curve]).all()
    starts = {(cell["seed"], json.dumps(cell["evaluations"][0])) for cell in cells.values()}
    assert len(starts) == 2, "methods of a seed start alike"
    text = capsys.readouterr().out
    assert all(f"| {method} |" in text for method in methods)
    assert (tmp_path / "e3" / "curves.png").read_bytes().startswith(b"\x89PNG")

    kept = tmp_path / "e3" / "cells" / "GRPO-0.json"
    times = {path: path.stat().st_mtime_ns for path in kept.parent.iterdir()}
    (kept.parent / "all_E3-1.json").unlink()
    assert study.main(arguments) == 0
    again = {path: path.stat().st_mtime_ns for path in kept.parent.iterdir()}
    assert {path.name for path in again if again[path] != times[path]} == {"all_E3-1.json"}
    assert json.loads((kept.parent / "all_E3-1.json").read_text())["correct"] == cells["all_E3-1.json"]["correct"]
