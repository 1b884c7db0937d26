"""Studies from their file to their report, and what goes wrong on the way."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from coba_core.integrations.grpo import report
from coba_core.integrations.grpo.study import load_study, run_study, select

from coba_core.cli import main

STUDIES = Path(__file__).parents[3] / "studies"

STUDY = """
name: small
seeds: 2
settings: {eval_samples: 4, prompts_per_step: 4, rollouts_per_prompt: 4, budget_high: 12, lr: 1e-3}
pools:
  one:
    policy_args: {steps: 20, hidden: 32, layers: 2, batch: 32}
    task_args: {train: 12, heldout: 8, mix: {"+1": 1}}
batches:
  short: {steps: 2}
methods:
  uniform: {}
  uniform_half: {rollouts_factor: 0.5}
  uniform_double: {rollouts_factor: 2}
  coba: {allocator: coba}
ablations:
  pool: one
  batch: short
  seeds: 1
  methods:
    tau1: {allocator: coba, allocator_args: {saturation: {name: exponential, tau: 1}}}
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "study.yaml"
    path.write_text(STUDY)
    return path


def test_cells_are_what_the_file_says(study, tmp_path):
    cells = load_study(study, tmp_path / "out").cells
    methods = ["uniform", "uniform_half", "uniform_double", "coba", "tau1"]
    assert [c.method for c in cells] == [*methods, *methods[:4]]
    assert [c.seed for c in cells] == [0] * 5 + [1] * 4
    assert [c.config.rollouts_per_prompt for c in cells[:3]] == [4, 2, 8]
    assert cells[4].config.allocator_args == {"saturation": {"name": "exponential", "tau": 1}}
    assert len({c.identity for c in cells}) == len({c.name for c in cells}) == 9
    assert {c.config.lr for c in cells} == {1e-3}


def test_the_committed_studies_are_sound(tmp_path):
    main_cells = load_study(STUDIES / "main.yaml", tmp_path).cells
    assert len(main_cells) == 27 * 3 * 2 * 8 + 26 * 5
    assert {(c.pool, c.batch) for c in main_cells} == {
        (pool, batch) for pool in ("even", "extremes", "skills") for batch in ("small", "large")
    }
    quick = {c.name: c for c in load_study(STUDIES / "quick.yaml", tmp_path).cells}
    assert len(quick) == 45
    shared = [c for c in main_cells if c.name in quick]
    assert len(shared) == 45
    assert all(c.identity == quick[c.name].identity for c in shared), "quick is a part of main"


def test_select_keeps_whole_what_is_not_named(study, tmp_path):
    whole = load_study(study, tmp_path)
    assert len(select(whole, []).cells) == 9
    assert [c.method for c in select(whole, ["coba", "one"]).cells] == ["coba", "coba"]
    with pytest.raises(ValueError, match="--only: 'cobra' is no pool, batch or method"):
        select(whole, ["cobra"])


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("name: small", "nome: small", "nome: no such entry"),
        ("seeds: 2", "seeds: none", "seeds: expected a number"),
        ("lr: 1e-3", "lr: fast", "one, short, uniform: lr: expected float"),
        ("lr: 1e-3", "learning: 1", "learning: no such field"),
        ("coba: {allocator: coba}", "coba: {steps: 3}", "coba: spends 48 rollouts where the others spend 32"),
        ("coba: {allocator: coba}", "co-ba: {}", "the label 'co-ba'"),
        ("coba: {allocator: coba}", "coba: 7", "coba: expected settings"),
        ("uniform_half: {rollouts_factor: 0.5}", "h: {rollouts_factor: 0.3}", "rollouts_factor: 0.3 leaves 1.2"),
        ("  pool: one", "  pool: two", "pool 'two' or batch 'short' is not in the study"),
        ("    tau1:", "    coba:", "'coba' is also a method"),
        ("batches:\n  short: {steps: 2}", "batches: {}", "batches: expected at least one label"),
        ("name: small", "name: small\nreference: best", "reference: 'best' is none of the methods"),
    ],
)
def test_a_wrong_study_is_refused_with_the_place(old, new, text, tmp_path):
    assert old in STUDY
    path = tmp_path / "study.yaml"
    path.write_text(STUDY.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(str(path)) + ".*" + re.escape(text)):
        load_study(path, tmp_path)


def test_a_study_runs_goes_on_and_reports(study, tmp_path, capsys):
    output = tmp_path / "out"
    command = ["compare", str(study), "--output", str(output), "--quiet"]
    assert main([*command, "--only", "uniform", "coba", "--jobs", "2"]) == 0
    cells = sorted((output / "cells").iterdir())
    assert [p.name for p in cells] == [f"one-short-{m}-{s}.json" for m in ("coba", "uniform") for s in (0, 1)]
    assert "4 of 9 cells are finished" in capsys.readouterr().out

    times = {p: p.stat().st_mtime_ns for p in cells}
    cells[0].unlink()
    assert main(command) == 0
    again = {p: p.stat().st_mtime_ns for p in (output / "cells").iterdir()}
    assert len(again) == 9
    assert [p for p in cells if again[p] == times[p]] == cells[1:], "finished cells are not run again"
    text = capsys.readouterr().out
    assert "9 of 9 cells are finished" in text
    assert (output / "report.md").read_text().strip() in text

    lines = [json.loads(line) for line in (output / "cells.jsonl").read_text().splitlines()]
    assert len(lines) == 9
    mean = np.mean([line["final"] for line in lines if line["method"] == "coba"])
    row = next(line for line in text.splitlines() if line.startswith("| coba |"))
    assert row.split(" | ")[1:3] == ["2", f"{mean:.3f}"]
    page = (output / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page and "<script" not in page, "it needs no network"

    assert main([*command, "--report", "--seeds", "1"]) == 0
    assert "5 of 5 cells are finished" in capsys.readouterr().out


def test_a_failed_cell_is_reported_and_the_rest_finished(study, tmp_path, capsys):
    bad = '    broken: {allocator: coba, allocator_args: {kapa: 3}}\n    late: {lr: 1e-4}\n'
    study.write_text(STUDY + bad)
    output = tmp_path / "out"
    command = ["compare", str(study), "--output", str(output), "--quiet", "--seeds", "1"]
    assert main([*command, "--only", "broken", "late"]) == 1
    captured = capsys.readouterr()
    assert "failed: one-short-broken-0" in captured.err and "kapa" in captured.err
    assert [p.name for p in (output / "cells").iterdir()] == ["one-short-late-0.json"]


def test_no_cell_is_begun_after_its_time(study, tmp_path):
    chosen = load_study(study, tmp_path / "out")
    assert run_study(chosen, progress=False, until=0.0) == {}
    assert not (tmp_path / "out").exists()


def test_a_damaged_cell_is_named(study, tmp_path, capsys):
    chosen = load_study(study, tmp_path / "out")
    chosen.cells[0].path.parent.mkdir(parents=True)
    chosen.cells[0].path.write_text("{")
    assert main(["compare", str(study), "--output", str(tmp_path / "out"), "--report"]) == 2
    assert f"{chosen.cells[0].path}: not valid JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["compare", "STUDY", "--lr", "1"], "a study holds settings and methods in its file"),
        (["compare", "STUDY", "--method", "coba"], "a study holds settings and methods in its file"),
        (["compare", "STUDY", "--seeds", "0"], "--seeds: must be at least 1"),
        (["compare", "--only", "coba"], "--only: goes with the file of a study"),
        (["compare", "--report"], "--report: goes with the file of a study"),
    ],
)
def test_options_that_do_not_fit(arguments, text, study, capsys):
    assert main([str(study) if a == "STUDY" else a for a in arguments]) == 2
    assert text in capsys.readouterr().err


def test_bootstrap_covers_the_truth_and_sees_what_is_there():
    rng = np.random.default_rng(0)
    covered, found = 0, 0
    for trial in range(100):
        truth = 0.1 + 0.05 * rng.standard_normal((8, 1)) + 0.2 * rng.standard_normal((1, 40))
        mean, low, high, p = report.paired_bootstrap(truth + 0.1 * rng.standard_normal((8, 40)), seed=trial)
        assert low <= mean <= high
        covered += low <= 0.1 <= high
        found += p < 0.05
    assert covered >= 85
    assert found >= 50
    assert report.paired_bootstrap(rng.standard_normal((8, 40)))[3] > 0.01
    with pytest.raises(ValueError, match="shape"):
        report.paired_bootstrap([0.1, 0.2])


def test_holm_is_that_of_the_textbook():
    assert report.holm({"a": 0.01, "b": 0.02, "c": 0.9}) == {"a": 0.03, "b": 0.04, "c": 0.9}
    assert report.holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert report.holm({}) == {}


def test_gradient_variance_is_measured_beside_its_prediction(study, tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("gradient_variance", STUDIES / "gradient_variance.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    study.write_text(STUDY.replace("{steps: 20,", "{steps: 300, lr: 1e-2, batch: 64,").replace(", batch: 32}", "}"))
    output = tmp_path / "variance"
    options = ["--prompts", "6", "--samples", "60", "--rollouts", "64", "--mean", "6", "--high", "12"]
    assert module.main(["--study", str(study), "--output", str(output), *options]) == 0
    found = json.loads((output / "summary.json").read_text())["pools"]["one"]
    assert found["rules"]["uniform"]["known"]["ratio"] == 1
    for rule in found["rules"].values():
        assert sum(rule["budgets"]) == 36
        assert rule["known"]["ratio"] == pytest.approx(rule["known"]["predicted"], rel=0.5)
        assert rule["leave_one_out"]["variance"] > 0
    capsys.readouterr()
    assert main(["headroom", str(output / "rates-one.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["headroom"] == pytest.approx(found["headroom_of_pool"])


def test_a_killed_process_fails_its_cell_and_no_other(study, tmp_path):
    chosen = select(load_study(study, tmp_path / "out", seeds=1), ["uniform", "uniform_half"])
    found: dict[str, str] = {}
    thread = threading.Thread(target=lambda: found.update(run_study(chosen, progress=False)))
    thread.start()
    while thread.is_alive() and not (children := multiprocessing.active_children()):
        time.sleep(0.01)
    os.kill(children[0].pid, signal.SIGKILL)
    thread.join()
    assert list(found) == ["one-short-uniform-0"] and "killed" in found["one-short-uniform-0"]
    assert [p.name for p in (tmp_path / "out" / "cells").iterdir()] == ["one-short-uniform_half-0.json"]
    assert run_study(chosen, progress=False) == {}, "the next run makes up for it"
    assert len(list((tmp_path / "out" / "cells").iterdir())) == 2
