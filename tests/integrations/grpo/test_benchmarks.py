"""Benchmark files of the published layouts (with made-up problems), and the check of answers."""

from __future__ import annotations

import argparse
import json
import threading
from pathlib import Path

import pytest

pytest.importorskip("math_verify")

from coba_core.integrations.grpo.benchmarks import BenchmarkProblem, check_answer, grader, load_benchmark

from coba_core.evaluate_cli import add_evaluate_command

LAYOUTS = {
    "maxwell-jia": (
        "aime2024",
        [{"ID": "2024-I-1", "Problem": "What is 2+2?", "Solution": "Add.", "Answer": 4}],
        ("2024-I-1", "What is 2+2?", "4"),
    ),
    "huggingfaceh4-aime": (
        "aime2024",
        [{"id": 60, "problem": "What is 2+2?", "solution": "", "answer": "004", "url": "u", "year": "2024"}],
        ("60", "What is 2+2?", "004"),
    ),
    "math-ai-aime": (
        "aime2025",
        [{"problem": "What is 9*9?", "answer": "81", "id": "0"}],
        ("0", "What is 9*9?", "81"),
    ),
    "matharena": (
        "aime2025",
        [{"problem_idx": 1, "problem": "What is 9*9?", "answer": 81, "problem_type": ["Algebra"]}],
        ("1", "What is 9*9?", "81"),
    ),
    "opencompass": ("aime2025", [{"question": "What is 9*9?", "answer": "81"}], ("0", "What is 9*9?", "81")),
    "math-ai-amc": (
        "amc2023",
        [{"id": 0, "question": "What is 54/2?", "answer": "27.0", "url": "u"}],
        ("0", "What is 54/2?", "27.0"),
    ),
    "aimo-amc": (
        "amc2023",
        [{"id": 5, "problem": "What is 54/2?", "answer": 27.0, "url": "u"}],
        ("5", "What is 54/2?", "27"),
    ),
    "math500": (
        "math500",
        [
            {
                "problem": "Halve one.",
                "solution": "\\boxed{\\frac{1}{2}}",
                "answer": "\\frac{1}{2}",
                "subject": "Algebra",
                "level": 1,
                "unique_id": "test/algebra/1.json",
            }
        ],
        ("test/algebra/1.json", "Halve one.", "\\frac{1}{2}"),
    ),
    "olympiadbench": (
        "olympiadbench",
        [
            {
                "id": 1606,
                "question": "Solve $x^2=4$.",
                "solution": ["Take roots."],
                "final_answer": ["$2$, $-2$"],
                "context": None,
                "image_1": None,
                "modality": "Text-only",
                "difficulty": "Competition",
                "is_multiple_answer": True,
                "unit": None,
                "answer_type": "Numerical",
                "error": None,
                "question_type": "Open-ended",
                "subfield": "Algebra",
                "subject": "Math",
                "language": "English",
            }
        ],
        ("1606", "Solve $x^2=4$.", "2, -2"),
    ),
}


def write(folder: Path, suffix: str, records: list[dict]) -> Path:
    path = folder / f"problems{suffix}"
    if suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif suffix == ".json":
        path.write_text(json.dumps(records))
    else:
        path.write_text("\n".join(map(json.dumps, records)))
    return path


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts(layout: str, suffix: str, tmp_path: Path) -> None:
    name, records, expected = LAYOUTS[layout]
    (problem,) = load_benchmark(name, write(tmp_path, suffix, records))
    assert (problem.key, problem.question, problem.answer) == expected
    assert check_answer(problem, f"So the answer is $\\boxed{{{problem.answer}}}$.")[1]
    assert not check_answer(problem, "So the answer is $\\boxed{12345}$.")[1]


def test_olympiadbench_context_tolerance_several_answers_and_proofs(tmp_path: Path) -> None:
    base = {"question": "How many?", "context": "A box.", "error": "1e-1"}
    records = [
        {**base, "id": 1, "final_answer": ["1.5"]},
        {**base, "id": 2, "final_answer": None},
        {**base, "id": 3, "final_answer": ["$1$", "$2$"], "error": "1e-2,1e-1"},
    ]
    one, several = load_benchmark("olympiadbench", write(tmp_path, ".jsonl", records))
    assert one == BenchmarkProblem("1", "A box.\nHow many?", "1.5", 0.1)
    assert several == BenchmarkProblem("3", "A box.\nHow many?", "1, 2", 0.1)


@pytest.mark.parametrize(
    ("answer", "completion", "right"),
    [
        ("4", "2+2 is 4", True),
        ("033", "\\boxed{33}", True),
        ("27.0", "\\boxed{27}", True),
        ("1,000", "\\boxed{1000}", True),
        ("\\frac{1}{2}", "$0.5$", True),
        ("\\$18.90", "\\boxed{18.90}", True),
        ("\\text{Evelyn}", "\\boxed{\\text{Evelyn}}", True),
        ("\\text{(C)}", "\\boxed{C}", True),
        ("(3, \\frac{\\pi}{2})", "\\boxed{(3, \\pi/2)}", True),
        ("90^\\circ", "\\boxed{90}", True),
        ("p - q", "\\boxed{-q+p}", True),
        ("204", "\\boxed{203}, no: \\boxed{204}", True),
        ("203", "\\boxed{203}, no: \\boxed{204}", False),
        ("1, 2", "\\boxed{2, 1}", True),
        ("1, 2", "$\\boxed{1}$ or $\\boxed{2}$", True),
        ("1, 2", "\\boxed{2}", False),
        ("3.14", "\\boxed{\\pi}", False),
    ],
)
def test_answers(answer: str, completion: str, right: bool) -> None:
    assert check_answer(BenchmarkProblem("a", "?", answer), completion)[1] is right


def test_tolerance() -> None:
    for answer, completion, tolerance, right in (
        ("3.14", "\\boxed{\\pi}", 0.01, True),
        ("3.14", "\\boxed{\\pi}", 0.001, False),
        ("1, 2.5", "\\boxed{2.45, 1.05}", 0.1, True),
        ("1, 2.5", "\\boxed{2.45}", 0.1, False),
        ("x", "\\boxed{y}", 0.1, False),
    ):
        assert check_answer(BenchmarkProblem("a", "?", answer, tolerance), completion)[1] is right


def test_no_answer_is_none() -> None:
    assert check_answer(BenchmarkProblem("a", "?", "4"), "I give up") == (None, False)
    assert check_answer(BenchmarkProblem("a", "?", "4"), "") == (None, False)


def test_checks_in_another_thread() -> None:
    found = []
    thread = threading.Thread(target=lambda: found.append(check_answer(BenchmarkProblem("a", "?", "4"), "\\boxed{4}")))
    thread.start()
    thread.join()
    assert found == [("4", True)]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "1", "unique_id": "b"}, "no column 'problem'"),
        ({"problem": "?", "unique_id": "b"}, "no column 'answer'"),
        ({"problem": "  ", "answer": "1"}, "the question is"),
        ({"problem": 3, "answer": "1"}, "the question is 3"),
        ({"problem": "?", "answer": {}}, "the answer is {}"),
        ({"problem": "?", "answer": [None]}, r"the answer is \[None\]"),
        ({"problem": "?", "answer": " $$ "}, "the answer is empty"),
        ({"problem": "?", "answer": "1", "unique_id": "a"}, "the same id 'a'"),
        ({"problem": "?", "answer": "1", "error": "about"}, "error is 'about'"),
        ({"problem": "?", "answer": "1", "error": "-1"}, "error is '-1'"),
    ],
)
def test_a_malformed_problem_is_named(record: dict, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, ".jsonl", [{"problem": "?", "answer": "1", "unique_id": "a"}, record])
    with pytest.raises(ValueError, match=rf"problems\.jsonl:2: .*{message}"):
        load_benchmark("math500", path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"{\n", r"a\.jsonl: line 1 is not JSON"),
        ("a.jsonl", b"[1]\n", r"a\.jsonl:1: list"),
        ("a.jsonl", b"\n", "holds no problem"),
        ("a.json", b"{}", "dict, not a list"),
        ("a.json", b"[", r"a\.json: "),
        ("a.parquet", b"PAR1", r"a\.parquet: "),
        ("a.csv", b"", "suffix '.csv'"),
    ],
)
def test_a_broken_file_is_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_benchmark("math500", tmp_path / name)


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="'gsm8k' is none of aime2024"):
        load_benchmark("gsm8k", "x.jsonl")
    with pytest.raises(ValueError, match="problem 'z' is not in"):
        grader([BenchmarkProblem("a", "?", "4")])("z", "4")


def test_evaluate_command_grades_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problems = write(tmp_path, ".jsonl", LAYOUTS["math500"][1])
    texts = ["$\\boxed{0.5}$", "\\boxed{\\frac12}", "\\boxed{2}", "no idea"]
    samples = tmp_path / "samples.jsonl"
    key = "test/algebra/1.json"
    samples.write_text("".join(json.dumps({"prompt_id": key, "text": text}) + "\n" for text in texts))
    parser = argparse.ArgumentParser()
    add_evaluate_command(parser.add_subparsers())
    arguments = parser.parse_args(["evaluate", str(samples), "--benchmark", "math500", "--problems", str(problems)])
    assert arguments.run(arguments) == 0
    lines = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines() if " " in line.strip()}
    assert lines["avg@n"] == "0.5000" and lines["maj@n"] == "1.0000"
    samples.write_text(json.dumps({"prompt_id": "other", "text": "4"}))
    with pytest.raises(ValueError, match=r"samples\.jsonl:1: problem 'other'"):
        arguments.run(arguments)
