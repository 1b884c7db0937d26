"""Headroom: the bound, what rules keep of it, and the command."""

from __future__ import annotations

import io
import itertools
import json

import numpy as np
import pytest

from coba_core.cli import main
from coba_core.headroom import gradient_variance, headroom, kept_headroom, rule_budgets

RATES = [0.02, 0.1, 0.5, 0.9, 1.0, 0.0, 0.4]


def test_headroom_is_the_ratio_of_moments():
    p = np.random.default_rng(0).random(100)
    s = np.sqrt(p * (1 - p))
    assert headroom(p) == pytest.approx(np.mean(s**2) / np.mean(s) ** 2, rel=1e-14)
    assert headroom([0.3, 0.7, 0.3]) == pytest.approx(1, abs=1e-15)


def test_variance_is_that_of_sampled_gradients():
    """Rewards minus a baseline times a score of unit variance, averaged within and then over prompts."""
    rng = np.random.default_rng(1)
    rates, budgets, draws = [0.2, 0.5, 0.9], [3, 2, 5], 200_000
    estimates = {"known": np.zeros(draws), "leave_one_out": np.zeros(draws)}
    for p, b in zip(rates, budgets, strict=True):
        reward = (rng.random((draws, b)) < p).astype(float)
        score = rng.standard_normal((draws, b))
        others = (reward.sum(1, keepdims=True) - reward) / (b - 1)
        estimates["known"] += ((reward - p) * score).mean(1) / len(rates)
        estimates["leave_one_out"] += ((reward - others) * score).mean(1) / len(rates)
    for baseline, sample in estimates.items():
        assert gradient_variance(rates, budgets, baseline=baseline) == pytest.approx(sample.var(), rel=0.02)


def test_neyman_is_the_best_of_all_budgets_within_the_bounds():
    rates, low, high, total = [0.05, 0.5, 0.8, 1.0], 1, 7, 14
    best = min(
        gradient_variance(rates, np.array(b))
        for b in itertools.product(range(low, high + 1), repeat=len(rates))
        if sum(b) == total
    )
    chosen = rule_budgets(rates, total, low=low, high=high)["neyman"]
    assert gradient_variance(rates, chosen) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("mean", [2, 4, 16, 64])
def test_no_rule_beats_neyman_nor_the_bound(mean):
    rates = np.random.default_rng(2).beta(0.3, 0.4, 64)
    kept = kept_headroom(rates, mean * len(rates), low=2, high=128)
    assert kept["uniform"] == 1
    assert max(kept, key=kept.__getitem__) == "neyman" or mean == 2
    assert all(value <= min(kept["neyman"], headroom(rates)) + 1e-12 for value in kept.values())
    if mean == 2:
        assert all(value == 1 for value in kept.values())  # nothing to decide at the lower bound
    if mean == 64:
        assert kept["neyman"] > 0.95 * headroom(rates)
        assert kept["fixed_easy"] < 1


def test_every_rule_spends_the_total_within_the_bounds():
    for name, budgets in rule_budgets(RATES, 50, low=3, high=20).items():
        assert budgets.sum() == 50, name
        assert budgets.min() >= 3 and budgets.max() <= 20, name


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: headroom([0.5, 1.2]), r"pass_rates\[1\] is 1\.2"),
        (lambda: headroom([float("nan")]), r"pass_rates\[0\] is nan"),
        (lambda: headroom([0, 1]), "no rollout carries a gradient"),
        (lambda: headroom([]), "at least one prompt"),
        (lambda: headroom([[0.5]]), "shape"),
        (lambda: gradient_variance([0.5, 0.5], [4, 0]), r"budgets\[1\] is 0"),
        (lambda: gradient_variance([0.5], [1], baseline="leave_one_out"), "not at least 2"),
        (lambda: gradient_variance([0.5], [1.5]), "dtype float64"),
        (lambda: gradient_variance([0.5], [1, 2]), "shape"),
        (lambda: gradient_variance([0.5], [1], baseline="mean"), "baseline is 'mean'"),
        (lambda: rule_budgets([0.5, 0.1], 8, low=0), "low is 0"),
        (lambda: rule_budgets([0.5, 0.1], 3), "total_budget is 3|total is 3"),
    ],
)
def test_bad_input_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def files(folder):
    """The same rates in every form the command takes."""
    (folder / "rates.csv").write_text("id,pass_rate\n" + "".join(f"{i},{p}\n" for i, p in enumerate(RATES)))
    (folder / "rates.jsonl").write_text("".join(json.dumps({"pass_rate": p}) + "\n" for p in RATES))
    (folder / "list.json").write_text(json.dumps(RATES))
    (folder / "named.json").write_text(json.dumps({f"q{i}": {"pass_rate": p} for i, p in enumerate(RATES)}))
    np.save(folder / "rates.npy", np.array(RATES))
    log = [
        {"ids": ["x"], "budgets": [10], "rewards": [0.5]},
        {"ids": [f"q{i}" for i in range(4)], "budgets": [50] * 4, "rewards": RATES[:4]},
        {"ids": [f"q{i}" for i in range(4, 7)], "budgets": [10] * 3, "rewards": RATES[4:]},
    ]
    (folder / "run").mkdir()
    (folder / "run" / "allocations.jsonl").write_text("".join(json.dumps(step) + "\n" for step in log) + '{"cut')
    return ["rates.csv", "rates.jsonl", "list.json", "named.json", "rates.npy", "run"]


def test_command_reads_every_form(tmp_path, capsys):
    for name in files(tmp_path):
        command = ["headroom", str(tmp_path / name), "--mean", "8", "--json"]
        assert main([*command, "--last", "2"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["headroom"] == pytest.approx(headroom(RATES), rel=1e-12), name
        assert found["kept"]["8"] == pytest.approx(kept_headroom(RATES, 8 * len(RATES)), rel=1e-12)
        assert (found["prompts"], found["never_right"], found["always_right"]) == (7, 1, 1)
        assert bool(found["remark"]) == (name == "run")


@pytest.mark.parametrize("text", [" ".join(map(str, RATES)), "\n".join(map(str, RATES)), json.dumps(RATES)])
def test_command_reads_standard_input_and_prints_a_table(text, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert main(["headroom", "-", "--mean", "4", "16"]) == 0
    shown = capsys.readouterr().out
    assert f"= {headroom(RATES):.3f}" in shown
    assert "| rule | mean 4 | mean 16 |" in shown
    kept = kept_headroom(RATES, 16 * len(RATES))["knapsack"]
    assert f" {kept:.3f} |" in next(line for line in shown.splitlines() if line.startswith("| knapsack"))


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.json", "[0.5, 2]", "a.json: item 2: 2 is not a pass rate"),
        ("a.json", "[0.5", "a.json: not valid JSON"),
        ("a.json", "3", "expected a list or an object"),
        ("a.json", '[{"rate": 0.5}]', "item 1: no 'pass_rate'"),
        ("a.jsonl", '{"pass_rate": "x"}\n', "a.jsonl:1"),
        ("allocations.jsonl", "{}\n", "allocations.jsonl:1: not a step"),
        ("allocations.jsonl", "", "holds no step"),
        ("a.npy", "nothing", "not a readable .npy file"),
    ],
)
def test_command_names_what_is_wrong(name, content, text, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    assert main(["headroom", str(tmp_path / name)]) == 2
    assert text in capsys.readouterr().err


def test_command_refuses_a_mean_outside_the_bounds(tmp_path, capsys):
    (tmp_path / "a.json").write_text("[0.5, 0.1]")
    assert main(["headroom", str(tmp_path / "a.json"), "--mean", "1"]) == 2
    assert "--mean: 1 is not within [2, 128]" in capsys.readouterr().err
