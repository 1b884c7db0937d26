"""The console script, as a user runs it: in a process of its own, with right and wrong input."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import coba_core
from coba_core.cli import main

SMALL = [
    "--set", "policy_args={steps: 300, hidden: 32, layers: 2, batch: 64, lr: 1e-2}",
    "--set", "task_args={train: 24, heldout: 12, mix: {'+1': 1, '-1': 1}}",
    "--steps", "4", "--prompts-per-step", "8", "--rollouts-per-prompt", "6", "--budget-high", "9", "--lr", "1e-3",
    "--eval-samples", "4", "--eval-every", "2", "--tensorboard", "false", "--threads", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    return {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache")), "HF_HUB_OFFLINE": "1"}


def run(*arguments, environment=None):
    return subprocess.run(
        [sys.executable, "-m", "coba_core.cli", *map(str, arguments)], capture_output=True, text=True, timeout=300,
        env=environment,
    )  # fmt: skip


def test_version_info_and_help():
    found = run("info")
    assert found.returncode == 0
    assert f"coba_core {coba_core.__version__}" in found.stdout
    assert "backend numpy    yes" in found.stdout
    helped = run("--help")
    assert helped.returncode == 0
    for command in ("train", "compare", "allocate", "evaluate", "info"):
        assert command in helped.stdout
    assert run().returncode == 2


def test_help_is_quick_because_it_imports_no_framework():
    code = "import sys, coba_core.cli as c; c._parser(); print([m for m in ('torch', 'numba') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_missing_package_says_what_to_install(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["train", "--steps", "1"]) == 1
    assert "pip install 'coba-core[train]'" in capsys.readouterr().err


def test_allocate_csv(tmp_path):
    source = tmp_path / "rates.csv"
    source.write_text("prompt,pass_rate\na,0.1\nb,0.5\nc,0.9\n")
    found = run("allocate", source, "--total", 24)
    assert found.returncode == 0, found.stderr
    rows = list(csv.DictReader(found.stdout.splitlines()))
    assert [row["prompt"] for row in rows] == ["a", "b", "c"]
    assert [int(row["budget"]) for row in rows] == coba_core.allocate([0.1, 0.5, 0.9], 24).tolist()


def test_allocate_jsonl_to_a_file(tmp_path, capsys):
    source, target = tmp_path / "rates.jsonl", tmp_path / "budgets.jsonl"
    source.write_text('{"id": 1, "p": 0.4}\n\n{"id": 2, "p": 0.1}\n')
    options = ["--column", "p", "--mean", "3", "--high", "16", "--value", "knapsack", "--output", str(target)]
    assert main(["allocate", str(source), *options]) == 0
    assert [json.loads(line) for line in target.read_text().splitlines()] == [
        {"id": 1, "p": 0.4, "budget": 4}, {"id": 2, "p": 0.1, "budget": 2},
    ]  # fmt: skip
    source.write_text("0.4\n0.1\n")
    assert main(["allocate", str(source), "--total", "6", "--high", "16", "--value", "knapsack"]) == 0
    assert [json.loads(line)["budget"] for line in capsys.readouterr().out.splitlines()] == [4, 2]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.csv", "prompt,rate\na,0.1\n", "a.csv:1: no column 'pass_rate'"),
        ("a.csv", "pass_rate\n0.5\nhalf\n", "a.csv:3: 'pass_rate' is 'half', not a number"),
        ("a.csv", "pass_rate\n1.5\n", "a.csv:2: 'pass_rate' is 1.5, not within [0, 1]"),
        ("a.csv", "pass_rate\n0.5,7\n", "a.csv:2: more fields than the header has"),
        ("a.csv", "pass_rate\n", "a.csv: holds no pass rates"),
        ("a.csv", "", "a.csv:1: no column"),
        ("a.jsonl", '{"pass_rate": 0.5}\n{"pass_rate": nan}\n', "a.jsonl:2: not valid JSON"),
        ("a.jsonl", '{"pass_rate": 0.5}\n{"pass_rate": NaN}\n', "a.jsonl:2: 'pass_rate' is nan, not within [0, 1]"),
        ("a.jsonl", '\n{"rate": 0.5}\n', "a.jsonl:2: no 'pass_rate'"),
        ("a.jsonl", "[0.5]\n", "a.jsonl:1: no 'pass_rate'"),
        ("a.jsonl", "0.5\n0.5\n", "total_budget is 3; 2 prompts"),
    ],
)
def test_allocate_names_what_is_wrong(tmp_path, capsys, name, content, match):
    (tmp_path / name).write_text(content)
    assert main(["allocate", str(tmp_path / name), "--total", "3"]) == 2
    assert match in capsys.readouterr().err


def test_a_missing_file_is_one_line(tmp_path, capsys):
    assert main(["allocate", str(tmp_path / "none.csv"), "--total", "3"]) == 2
    assert main(["train", "--config", str(tmp_path / "none.yaml")]) == 2
    assert main(["train", "--steps", "none"]) == 2
    assert main(["train", "--resume", str(tmp_path)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4


def test_train_resume_evaluate(tmp_path, environment):
    pytest.importorskip("transformers")
    output = tmp_path / "run"
    found = run("train", *SMALL, "--stop-after", 2, "--output", output, environment=environment)
    assert found.returncode == 0, found.stderr
    assert "budget" in found.stderr  # the progress bar
    assert f"coba-core train --resume {output}" in found.stderr
    found = run("train", "--resume", output, "--stop-after", 0, "--quiet", environment=environment)
    assert found.returncode == 0, found.stderr
    summary = json.loads(found.stdout)
    assert (summary["finished"], summary["steps"], summary["rollouts"]) == (True, 4, 192)
    found = run("train", *SMALL, "--output", output, environment=environment)
    assert found.returncode == 2
    assert "--overwrite" in found.stderr
    found = run("evaluate", *sorted((output / "evaluations").glob("*.jsonl")))
    assert found.returncode == 0, found.stderr
    assert "pass@4" in found.stdout


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path, environment):
    pytest.importorskip("transformers")
    output = tmp_path / "run"
    command = [sys.executable, "-m", "coba_core.cli", "train", *SMALL, "--steps", "5000", "--output", str(output)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stderr is not None
    text = ""
    while "reward" not in text:  # the bar of the first step
        read = process.stderr.read(40)
        assert read, text
        text += read
    process.send_signal(signal.SIGINT)
    _, rest = process.communicate(timeout=120)
    assert process.returncode == 130
    assert f"go on with: coba-core train --resume {output}" in rest
    done = json.loads((output / "summary.json").read_text())["steps"]
    assert 0 < done < 5000
    found = run("train", "--resume", output, "--stop-after", done + 1, "--quiet", environment=environment)
    assert json.loads(found.stdout)["steps"] == done + 1


def test_compare_is_restartable(tmp_path, environment):
    pytest.importorskip("matplotlib")
    output = tmp_path / "compare"
    methods = ["--method", "uniform", "--method", "sharp allocator=coba allocator_args.kappa=21"]
    command = ["compare", *SMALL, *methods, "--output", output, "--seeds", 2]
    found = run(*command, environment=environment)
    assert found.returncode == 0, found.stderr
    table = (output / "table.md").read_text()
    assert table in found.stdout
    assert "| uniform | 2 | 0." in table
    assert "| sharp | 2 | 0." in table
    assert (output / "picture.png").read_bytes().startswith(b"\x89PNG")
    cells = sorted((output / "cells").iterdir())
    assert [c.name for c in cells] == [f"{m}-seed{s}.json" for m in ("sharp", "uniform") for s in (0, 1)]
    assert {json.loads(c.read_text())["rollouts"] for c in cells} == {192}
    cells[1].unlink()
    before = {c: c.stat().st_mtime_ns for c in cells if c.exists()}
    found = run(*command, environment=environment)
    assert found.returncode == 0, found.stderr
    assert "3 of 4 runs are there, 1 to go" in found.stdout
    again = (output / "table.md").read_text()
    for old, new in zip(table.splitlines(), again.splitlines(), strict=True):
        assert old.rsplit("|", 3)[0] == new.rsplit("|", 3)[0]  # all but the times
    assert {c: c.stat().st_mtime_ns for c in before} == before
    cells[0].write_text("{")
    assert f"{cells[0]}: not valid JSON" in run(*command, environment=environment).stderr


@pytest.mark.parametrize("method", ["greedy", "x/y allocator=coba", "", "long steps=9"])
def test_compare_names_a_wrong_method(method, tmp_path, capsys):
    pytest.importorskip("tqdm")
    assert main(["compare", *SMALL, "--method", method, "--output", str(tmp_path / "c")]) == 2
    assert "method: " in capsys.readouterr().err
    assert not Path(tmp_path / "c").exists()
