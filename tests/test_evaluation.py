"""pass@k, avg@k, maj@k, their intervals, and the command that prints them."""

from __future__ import annotations

import argparse
import itertools
import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coba_core.evaluate_cli import (
    PICTURE_FILE,
    TABLE_FILE,
    Fields,
    add_evaluate_command,
    evaluate,
    format_table,
    read_samples,
)
from coba_core.evaluation import avg_at_k, bootstrap_interval, maj_at_k, pass_at_k

counts = st.integers(1, 60).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))


@given(counts)
def test_pass_at_k_is_the_ratio_of_binomials(problem: tuple[int, int]) -> None:
    n, c = problem
    exact = [float(1 - Fraction(math.comb(n - c, k), math.comb(n, k))) for k in range(1, n + 1)]
    assert np.allclose(pass_at_k([n], [c])[0], exact, rtol=1e-13, atol=0)


def test_pass_at_k_is_the_share_of_subsets_with_a_success() -> None:
    right = [True, False, False, True, False]
    for k in range(1, 6):
        subsets = list(itertools.combinations(right, k))
        assert pass_at_k([5], [2])[0, k - 1] == pytest.approx(sum(map(any, subsets)) / len(subsets), rel=1e-14)


@given(st.lists(counts, min_size=1, max_size=8))
def test_pass_at_k_rises_with_k_from_the_mean_within_bounds(problems: list[tuple[int, int]]) -> None:
    n, c = zip(*problems, strict=True)
    found = pass_at_k(n, c)
    assert found.shape == (len(n), min(n))
    assert np.array_equal(found[:, 0], avg_at_k(n, c))
    assert (np.diff(found, axis=1) >= 0).all() and found.min() >= 0 and found.max() <= 1


def test_pass_at_k_keeps_its_digits_where_binomials_overflow() -> None:
    n, c = 100_000, 3
    found = pass_at_k([n], [c], 5000)[0]
    for k in (1, 7, 5000):
        exact = 1 - math.prod(Fraction(n - k - i, n - i) for i in range(c))
        assert found[k - 1] == pytest.approx(float(exact), rel=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    rng = np.random.default_rng(0)
    p, n = 0.1, 20
    found = pass_at_k(np.full(40_000, n), rng.binomial(n, p, 40_000)).mean(axis=0)
    assert np.allclose(found, 1 - (1 - p) ** np.arange(1, n + 1), atol=0.006)


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        ([4, 0], [1, 0], None, r"samples\[1\] is 0"),
        ([4, 4], [1, 5], None, r"correct\[1\] is 5"),
        ([4, 4], [-1, 0], None, r"correct\[0\] is -1"),
        ([4, 3], [1, 1], 4, r"samples\[1\] is 3, fewer than max_k = 4"),
        ([4], [1], 0, "max_k is 0"),
        ([4], [1, 2], None, "one number a problem"),
        ([4.0], [1.0], None, "samples has dtype float64"),
    ],
)
def test_pass_at_k_refuses(n: list, c: list, k: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)


def test_no_problems() -> None:
    assert pass_at_k([], []).shape == (0, 0)
    assert avg_at_k([], []).shape == (0,)
    assert maj_at_k([], []).shape == (0,)


def brute_majority(answers: list, correct: list, k: int) -> float:
    """By every subset; right answers are one class, ties count their share."""
    total = 0.0
    subsets = list(itertools.combinations(range(len(answers)), k))
    for subset in subsets:
        votes: dict = {}
        for j in subset:
            label = "right" if correct[j] else answers[j]
            if label is not None:
                votes[label] = votes.get(label, 0) + 1
        best = [label for label, count in votes.items() if count == max(votes.values())]
        total += ("right" in best) / len(best) if best else 0.0
    return total / len(subsets)


def test_majority_against_every_subset() -> None:
    answers = ["7", "7.0", "8", "8", "9", None, "8"]
    correct = [True, True, False, False, False, False, False]
    assert maj_at_k([answers], [correct])[0] == brute_majority(answers, correct, 7) == 0.0
    assert maj_at_k([answers], [correct], 1)[0] == pytest.approx(2 / 7)
    for k in (2, 3, 4, 6):
        found = maj_at_k([answers], [correct], k, draws=40_000)[0]
        assert found == pytest.approx(brute_majority(answers, correct, k), abs=0.01)
    assert maj_at_k([answers], [correct], 3, seed=1) == maj_at_k([answers], [correct], 3, seed=1)


def test_majority_of_ties_and_of_silence() -> None:
    assert maj_at_k([["a", "b"]], [[True, False]]).tolist() == [0.5]
    assert maj_at_k([["a", "b", "c"]], [[True, False, False]]).tolist() == pytest.approx([1 / 3])
    assert maj_at_k([[None, None]], [[False, False]]).tolist() == [0.0]
    assert maj_at_k([["a", None, None]], [[True, False, False]]).tolist() == [1.0]


@pytest.mark.parametrize(
    ("answers", "correct", "k", "message"),
    [
        ([["a", "a"]], [[True, False]], None, "both as right and as wrong"),
        ([[None]], [[True]], None, "no answer"),
        ([["a"]], [[True, False]], None, "one each"),
        ([[]], [[]], None, "one each"),
        ([["a"]], [], None, "1 problems and correct 0"),
        ([["a"]], [[True]], 2, "fewer than k = 2"),
        ([["a"]], [[True]], 0, "k is 0"),
    ],
)
def test_majority_refuses(answers: list, correct: list, k: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        maj_at_k(answers, correct, k)


def test_interval_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.random.default_rng(0).beta(0.5, 0.5, 200)
    low, high = bootstrap_interval(values, resamples=20_000)
    theirs = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=20_000, rng=1).confidence_interval
    assert (low, high) == pytest.approx((theirs.low, theirs.high), abs=2e-3)


def test_interval_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    inside = 0
    for seed in range(300):
        low, high = bootstrap_interval(rng.binomial(1, 0.4, 80).astype(float), resamples=400, seed=seed)
        inside += low <= 0.4 <= high
    assert 0.90 <= inside / 300 <= 0.98


def test_interval_of_columns_blocks_and_one_problem() -> None:
    values = np.random.default_rng(0).random((30, 4))
    low, high = bootstrap_interval(values)
    assert low.shape == high.shape == (4,) and (low < values.mean(0)).all() and (values.mean(0) < high).all()
    assert bootstrap_interval([0.25]) == (0.25, 0.25)
    wide = bootstrap_interval(np.tile(values, (20_000, 1)), resamples=20)  # 7 resamples a block
    assert np.abs(np.array(wide) - values.mean(0)).max() < 2e-3


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([], {}, "shape"),
        ([0.0, math.nan], {}, r"values\[1\] is nan"),
        ([0.0], {"confidence": 1.0}, "confidence is 1"),
        ([0.0], {"resamples": 0}, "resamples is 0"),
    ],
)
def test_interval_refuses(values: list, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(values, **options)


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_evaluate_command(parser.add_subparsers(required=True))
    parsed = parser.parse_args(["evaluate", *map(str, arguments)])
    return int(parsed.run(parsed))


def write(path: Path, lines: list) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


@pytest.fixture
def samples(tmp_path: Path) -> Path:
    """Three problems with 1, 2 and 4 right samples of 4."""
    lines = [
        {"prompt_id": p, "correct": j < c, "answer": "42" if j < c else f"wrong {j}"}
        for p, c in (("a", 1), ("b", 2), ("c", 4))
        for j in range(4)
    ]
    return write(tmp_path / "e3.jsonl", lines)


def test_table_picture_and_json(samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write(tmp_path / "grpo.jsonl", [{"prompt_id": i, "correct": i % 2} for i in range(4) for _ in range(3)])
    assert run(samples, other, "--output", tmp_path / "out") == 0
    table = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert table["avg@n"].split()[1] == "0.5833" and table["avg@n"].split()[4] == "0.5000"
    assert table["maj@n"].split()[1] == "0.7500" and table["maj@n"].split()[-1] == "-"
    assert table["pass@4"].split()[1] == "1.0000" and table["pass@4"].split()[-1] == "-"
    assert "pass@3" in table, "the largest k of the second file"
    written = json.loads((tmp_path / "out" / TABLE_FILE).read_text())
    first = written["results"][0]
    assert first["pass_at_k"]["k"] == [1, 2, 3, 4]
    assert first["pass_at_k"]["mean"] == pytest.approx(pass_at_k([4] * 3, [1, 2, 4]).mean(0))
    assert first["avg"]["low"] <= first["avg"]["mean"] <= first["avg"]["high"]
    assert (tmp_path / "out" / PICTURE_FILE).read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted([TABLE_FILE, PICTURE_FILE])


def test_an_output_folder_in_use_is_left_alone(samples: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(samples, "--output", out) == 0
    kept = write(out / "notes.txt", ["mine"])
    before = (out / TABLE_FILE).read_bytes()
    with pytest.raises(ValueError, match="--overwrite"):
        run(samples, "--output", out, "--seed", 7)
    assert (out / TABLE_FILE).read_bytes() == before
    assert run(samples, "--output", out, "--seed", 7, "--overwrite") == 0
    assert (out / TABLE_FILE).read_bytes() != before and kept.read_text() == "mine\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("\udcff", "not JSON"),
        ("[1]", "list, not an object"),
        ({"correct": True}, "no field 'prompt_id'"),
        ({"prompt_id": "a"}, "no field 'correct'"),
        ({"prompt_id": None, "correct": True}, "'prompt_id' is None"),
        ({"prompt_id": True, "correct": True}, "'prompt_id' is True"),
        ({"prompt_id": "a", "correct": "yes"}, "'correct' is 'yes'"),
        ({"prompt_id": "a", "correct": 0.5}, "'correct' is 0.5"),
        ({"prompt_id": "a", "correct": None}, "'correct' is None"),
        ({"prompt_id": "a", "correct": True, "answer": []}, r"'answer' is \[\]"),
        ({"prompt_id": "a", "correct": False, "answer": "42"}, "'42' is False here and True on line 1"),
        ({"prompt_id": "a", "correct": True}, "right, but without the answer"),
        ({"prompt_id": "a", "samples": 4, "correct": 5}, "5 right samples of 4"),
        ({"prompt_id": "a", "samples": 0, "correct": 0}, "0 right samples of 0"),
    ],
)
def test_a_malformed_line_is_named(line: str | dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    good = json.dumps({"prompt_id": "a", "correct": True, "answer": "42"})
    text = line if isinstance(line, str) else json.dumps(line)
    path.write_bytes(f"{good}\n\n{text}\n".encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=rf"samples\.jsonl:3: .*{message}"):
        read_samples(path)


def test_an_empty_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty\.jsonl: holds no sample"):
        read_samples(write(tmp_path / "empty.jsonl", [""]))


def test_other_names_numbers_and_counts(tmp_path: Path) -> None:
    named = write(tmp_path / "named.jsonl", [{"id": 3, "ok": 1, "out": 5}, {"id": "3", "ok": 0.0, "out": 6.5}])
    found = read_samples(named, Fields(prompt="id", correct="ok", answer="out"))
    assert (found.prompt_ids, found.answers, found.correct) == (["3"], [["5", "6.5"]], [[True, False]])
    lines = [{"id": "x", "samples": 4, "correct": 1}, {"id": "y", "samples": 4, "correct": 0}]
    run_file = write(tmp_path / "step.jsonl", lines)
    counted = read_samples(run_file, Fields(prompt="id"))
    assert counted.correct == [[True, False, False, False], [False] * 4] and not counted.has_answers
    assert "maj@n" not in format_table([evaluate(counted)])


def test_benchmark_needs_its_problems(samples: Path) -> None:
    with pytest.raises(ValueError, match="--benchmark and --problems"):
        run(samples, "--benchmark", "math500")
