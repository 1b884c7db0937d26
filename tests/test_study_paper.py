"""The paper's tables and figures from cells: their arithmetic on made-up cells, and the command on trained ones."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

SCRIPT = Path(__file__).parents[1] / "studies" / "paper.py"


@pytest.fixture(scope="module")
def paper() -> ModuleType:
    spec = importlib.util.spec_from_file_location("study_paper", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cell(right: int, *, alpha: tuple[float, ...] = (8.0, 6.0, 3.0), rollouts: int = 480) -> dict[str, Any]:
    """A run in which ``right`` of 4 samples of each of eight problems are right at the end, and none before."""
    table = np.zeros((5, 5), dtype=int)
    table[1, 1], table[2, 2], table[2, 3], table[2, 4] = 5, 4 - right, 1, right
    return {
        "final": right / 4, "correct": [right] * 8, "samples": 4, "area_by_problem": [right / 8] * 8,
        "rollouts": rollouts, "steps": 10, "seconds_in_steps": 1.0, "allocator_ms_per_step": 2.0, "config": {},
        "evaluations": [{"rollouts": 0, "avg@4": 0.0}, {"rollouts": rollouts, "avg@4": right / 4}],
        "curves": {"share": [0.1, 0.5, 0.9], "alpha": list(alpha), "beta": [11 - a for a in alpha]},
        "budget_by_rate": {
            "early": [[0.25, 2.0, 30], [0.75, 6.0, 10], [0.95, 50.0, 3]], "middle": [[0.25, 4.0, 40]],
            "late": [[0.25, 6.0, 30], [0.75, 2.0, 30]],
        },
        "transitions": table.tolist(),
    }  # fmt: skip


def made(**right: list[int]) -> dict[str, dict[int, dict[str, Any]]]:
    return {method: {seed: cell(r) for seed, r in enumerate(values)} for method, values in right.items()}


def test_only_common_seeds_are_compared(paper):
    results = {"uniform": {0: cell(1), 1: cell(1)}, "coba": {1: cell(3), 2: cell(2)}, "rank": {5: cell(1)}}
    groups = {("a", "small"): results, ("b", "small"): {"uniform": {0: cell(1)}}}
    held = paper.shared(groups, ["uniform", "coba"], ["coba"])
    assert held == {("a", "small"): {"uniform": {1: cell(1)}, "coba": {1: cell(3)}}}
    assert paper.shared({("a", "small"): results}, ["uniform", "rank"]) == {}
    item = paper.table_1({("a", "small"): results})
    assert "| a, small | 1 | 25.00 |  | 75.00 |" in item.body and "agrees in 0 of 1" in item.says


def test_an_order_agrees_only_where_its_interval_says_so(paper):
    results = made(uniform=[1, 1, 1], coba=[3, 3, 3], knapsack=[0, 2, 1])
    assert paper.verdict(*paper.compare(results, "coba", "uniform")) == "agrees"
    assert paper.verdict(*paper.compare(results, "uniform", "coba")) == "disagrees"
    assert paper.verdict(*paper.compare(results, "knapsack", "uniform")) == "open"
    assert paper.compare(results, "coba", "uniform")[0] == 0.5
    assert paper.compare(results, "rank", "uniform") is None
    few = made(uniform=[1, 1], coba=[3, 3])
    assert paper.verdict(*paper.compare(few, "coba", "uniform")) == "open"  # two seeds say nothing


def test_the_sentence_of_table_1_follows_the_cells(paper):
    up = made(uniform=[1] * 3, knapsack=[2] * 3, coba=[3] * 3)
    down = made(uniform=[3] * 3, knapsack=[2] * 3, coba=[1] * 3)
    both = paper.table_1({("a", "small"): up, ("b", "small"): down})
    assert "coba above uniform: agrees in 1 of 2, disagrees in 1, open in 0" in both.says
    assert "| a, small | 3 | 25.00 | 50.00 | 75.00 |" in both.body
    one = paper.table_1({("a", "small"): up})
    assert "coba above knapsack: agrees in 1 of 1" in one.says


def test_kappa_is_read_from_the_method_names(paper):
    results = made(uniform=[1] * 3, coba=[2] * 3, coba_k7=[1] * 3, coba_k21=[3] * 3)
    item = paper.table_3({("a", "small"): results, ("b", "small"): made(uniform=[1], coba=[1])})
    assert "a, small: best κ = 21, largest less smallest 50.00 points" in item.says
    assert "coba above coba_k7: agrees in 1 of 1" in item.says and "coba above coba_k21: agrees in 0 of 1" in item.says
    assert "b, small" not in item.body


def test_budgets_by_rate_weigh_prompts_and_leave_out_rare_rates(paper):
    runs = [cell(1), cell(1)]
    found = paper.by_rate(runs, "early")
    np.testing.assert_allclose(found, [[0.25, 2.0, 60], [0.75, 6.0, 20]])  # 6 prompts at 0.95 are too few
    assert paper.preferred_rate(runs, "early") == 0.75 and paper.preferred_rate(runs, "late") == 0.25
    assert np.isnan(paper.preferred_rate(runs, "middle"))  # all alike
    assert [paper.curve_mean(runs, "alpha", part) for part in paper.PARTS] == [8.0, 6.0, 3.0]


def test_alpha_falls_are_counted(paper):
    groups = {
        ("a", "small"): {"coba": {0: cell(1)}},
        ("b", "small"): {"coba": {0: cell(1, alpha=(3.0, 5.0, 8.0))}},
    }
    assert "in 1 of 2 places" in paper.figure_4(groups).says and "in 1 of 2 places" in paper.figure_5(groups).says
    assert "| a, small | 1 | 8.00 | 3.00 |" in paper.figure_5(groups).body


def test_transitions_are_shares_of_the_class_before(paper):
    results = made(uniform=[1] * 3, knapsack=[2] * 3, coba=[3] * 3)
    assert paper.share_solved(results["coba"][0]["transitions"], "medium") == 3 / 5
    assert paper.transition_order(results, "coba", "uniform", "medium") == "agrees"
    assert paper.transition_order(results, "uniform", "coba", "medium") == "disagrees"
    assert paper.transition_order(results, "coba", "uniform", "hard") == "open"  # nothing moved
    item = paper.figure_7({("a", "small"): results})
    assert "| a, small | 3; 15 | medium | solved | 20.0 | 40.0 | 60.0 |" in item.body
    assert "agrees in 1 of 2, disagrees in 0, open in 1" in item.says


def test_twice_the_rollouts_are_compared_seed_by_seed(paper):
    results = made(uniform=[1] * 3, uniform_double=[2, 2, 2], coba=[3, 3, 3], knapsack=[1, 3, 2])
    item = paper.figure_8({("a", "small"): results, ("b", "small"): made(uniform=[1], coba=[1])})
    assert "coba above uniform at twice its rollouts, with each seed: agrees in 1 of 1" in item.says
    assert "knapsack above uniform at twice its rollouts, with each seed: agrees in 0 of 1" in item.says
    assert "No cell runs CoBA-RL at half" in item.says and "b, small" not in item.body


def test_the_command_reads_finished_cells_of_the_study_only(paper, tmp_path, capsys):
    from coba_core.integrations.grpo.study import load_study

    study = load_study(SCRIPT.parent / "main.yaml", tmp_path / "main")
    even = [c for c in study.cells if (c.pool, c.batch) == ("even", "small") and c.seed < 3]
    chosen = [c for c in even if c.method in paper.METHODS]
    right = {"uniform": 1, "knapsack": 2, "coba": 3}
    assert len(chosen) == 9
    assert paper.main(["--all", "--results", str(tmp_path)]) == 1
    for c in chosen:
        c.path.parent.mkdir(parents=True, exist_ok=True)
        c.path.write_text(json.dumps({"identity": c.identity, **cell(right[c.method])}))
    stale = next(c for c in study.cells if c.pool == "skills")
    stale.path.write_text(json.dumps({"identity": "of other settings", **cell(1)}))
    assert paper.main(["--all", "--results", str(tmp_path)]) == 0
    output = tmp_path / "paper"
    assert {p.name for p in output.iterdir() if p.suffix == ".md"} == {f"{n}.md" for n in paper.ITEMS} | {"summary.md"}
    assert (output / "figure-7.png").read_bytes().startswith(b"\x89PNG")
    assert "from 9 cells" in (output / "summary.md").read_text() and "skills" not in (output / "table-1.md").read_text()
    shutil.rmtree(output)
    capsys.readouterr()
    assert paper.main(["--table", "1", "--results", str(tmp_path), "--output", str(tmp_path / "here")]) == 0
    assert [p.name for p in (tmp_path / "here").iterdir()] == ["table-1.md"]
    assert "25.00 | 50.00 | 75.00" in capsys.readouterr().out
