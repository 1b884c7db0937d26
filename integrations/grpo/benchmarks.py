"""Files of published mathematics benchmarks in their own column layouts, and answers checked by math-verify."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class BenchmarkProblem:
    """One problem. `tolerance`: how far a numerical answer may lie from the published one; None where it must equal."""

    key: str
    question: str
    answer: str
    tolerance: float | None = None


@dataclasses.dataclass(frozen=True)
class Layout:
    """The names that a benchmark's published files give their columns; the first that a file has is taken."""

    question: tuple[str, ...]
    answer: tuple[str, ...]
    key: tuple[str, ...]


LAYOUTS = {
    # Maxwell-Jia/AIME_2024: ID, Problem, Solution, Answer. HuggingFaceH4/aime_2024: id, problem, solution, answer, ...
    "aime2024": Layout(("Problem", "problem"), ("Answer", "answer"), ("ID", "id")),
    # math-ai/aime25: problem, answer, id. MathArena/aime_2025: problem_idx, problem, answer, problem_type.
    # opencompass/AIME2025: question, answer.
    "aime2025": Layout(("problem", "question"), ("answer",), ("id", "problem_idx")),
    # math-ai/amc23: id, question, answer, url. AI-MO/aimo-validation-amc: id, problem, answer, url.
    "amc2023": Layout(("question", "problem"), ("answer",), ("id",)),
    # HuggingFaceH4/MATH-500: problem, solution, answer, subject, level, unique_id.
    "math500": Layout(("problem",), ("answer",), ("unique_id",)),
    # OlympiadBench: id, question, context, final_answer (a list), is_multiple_answer, answer_type, error, ...
    "olympiadbench": Layout(("question",), ("final_answer",), ("id",)),
}


def load_benchmark(name: str, path: str | os.PathLike[str]) -> list[BenchmarkProblem]:
    """The problems of a benchmark's file: JSONL, a JSON list, or Parquet, by its suffix.

    Problems without an id in the file are numbered from 0. OlympiadBench's proofs, which have no final answer, are left
    out; of several final answers all are asked for, in any order; a context goes in front of its question.

    ValueError names the file and the line (or row) of the first problem that does not fit the layout.
    """
    if name not in LAYOUTS:
        raise ValueError(f"benchmark: {name!r} is none of {', '.join(LAYOUTS)}")
    layout = LAYOUTS[name]
    problems: list[BenchmarkProblem] = []
    seen: dict[str, str] = {}
    for i, (where, record) in enumerate(_records(Path(path))):
        if name == "olympiadbench" and record.get("final_answer", "") is None:
            continue
        question = _column(record, layout.question, where)
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{where}: the question is {question!r}, not text")
        if record.get("context"):
            question = f"{record['context']}\n{question}"
        key = str(next((record[column] for column in layout.key if record.get(column) is not None), i))
        if key in seen:
            raise ValueError(f"{where}: the same id {key!r} as {seen[key]}")
        seen[key] = where
        answer = _answer(_column(record, layout.answer, where), where)
        problems.append(BenchmarkProblem(key, question, answer, _tolerance(record.get("error"), where)))
    if not problems:
        raise ValueError(f"{os.fspath(path)}: holds no problem")
    return problems


def _records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place in the file, record), whatever the format."""
    rows: list[tuple[str, Any]]
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            table = pyarrow.parquet.read_table(path).to_pylist()
            rows = [(f"{path}: row {i}", record) for i, record in enumerate(table, 1)]
        elif path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(content, list):
                raise ValueError(f"{type(content).__name__}, not a list of problems")
            rows = [(f"{path}: problem {i}", record) for i, record in enumerate(content, 1)]
        elif path.suffix == ".jsonl":
            rows = []
            for number, line in enumerate(path.read_bytes().splitlines(), 1):
                if line.strip():
                    try:
                        rows.append((f"{path}:{number}", json.loads(line)))
                    except ValueError as error:
                        raise ValueError(f"line {number} is not JSON ({error})") from error
        else:
            raise ValueError(f"suffix {path.suffix!r} is none of .jsonl, .json, .parquet")
    except ValueError as error:  # pyarrow's errors are of this kind
        raise ValueError(f"{path}: {error}") from error
    for where, record in rows:
        if not isinstance(record, dict):
            raise ValueError(f"{where}: {type(record).__name__}, not an object with columns")
        yield where, record


def _column(record: dict[str, Any], names: tuple[str, ...], where: str) -> Any:
    for name in names:
        if record.get(name) is not None:
            return record[name]
    raise ValueError(f"{where}: no column {' or '.join(map(repr, names))}; there are {', '.join(map(repr, record))}")


def _answer(published: Any, where: str) -> str:
    """The answer as LaTeX without dollar signs: numbers without a trailing .0, several answers with commas between."""
    parts = published if isinstance(published, list) else [published]
    if not parts or any(isinstance(part, bool) or not isinstance(part, (str, int, float)) for part in parts):
        raise ValueError(f"{where}: the answer is {published!r}, not text or a number")
    texts = [str(int(part)) if isinstance(part, float) and part.is_integer() else str(part) for part in parts]
    answer = ", ".join(re.sub(r"(?<!\\)\$", "", text).strip() for text in texts)
    if not answer.strip(", "):
        raise ValueError(f"{where}: the answer is empty")
    return answer


def _tolerance(error: Any, where: str) -> float | None:
    """OlympiadBench's `error` column: a number as text, such as "1e-1"; of several with commas between, the largest."""
    if error is None or error == "":
        return None
    try:
        tolerance = max(float(part) for part in str(error).split(","))
    except (TypeError, ValueError) as failure:
        raise ValueError(f"{where}: error is {error!r}, not a number") from failure
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"{where}: error is {error!r}, not a finite number of at least 0")
    return tolerance


def check_answer(problem: BenchmarkProblem, completion: str) -> tuple[str | None, bool]:
    """(the answer found in the completion, whether it is right); (None, False) where none is found.

    math-verify reads and compares: LaTeX or plain expressions, equal up to rewriting; a number within the problem's
    tolerance is right too. The last ``\\boxed{}`` decides; where several answers are asked for, they may also stand in
    a box each. Without a box math-verify looks for the answer. ValueError if the published answer cannot be read.
    """
    from math_verify import parse, verify

    # math-verify bounds its time by signals, which only the main thread has
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    gold = parse(f"\\boxed{{{problem.answer}}}", parsing_timeout=seconds)
    if not gold:
        raise ValueError(f"problem {problem.key!r}: its answer {problem.answer!r} cannot be read")
    texts = [completion[max(completion.rfind("\\boxed"), 0) :]]
    if type(gold[0]).__name__ == "FiniteSet":
        texts.append(completion)
    answer = None
    for text in texts:
        found = parse(text, parsing_timeout=seconds)
        if not found:
            continue
        answer = str(found[0])
        if verify(gold, found, timeout_seconds=seconds):
            return answer, True
        if problem.tolerance is not None and _near(gold[0], found[0], problem.tolerance):
            return answer, True
    return answer, False


def _near(gold: Any, found: Any, tolerance: float) -> bool:
    """Whether two sympy objects are real numbers at most `tolerance` apart; sets number by number, in order."""
    pair = []
    for value in (gold, found):
        items = sorted(value.args, key=str) if type(value).__name__ == "FiniteSet" else [value]
        if not all(getattr(item, "is_number", False) and getattr(item, "is_real", False) for item in items):
            return False
        pair.append(sorted(float(item) for item in items))
    a, b = pair
    return len(a) == len(b) and all(abs(x - y) <= tolerance * (1 + 1e-9) for x, y in zip(a, b, strict=True))


def grader(problems: list[BenchmarkProblem]) -> Callable[[str, str], tuple[str | None, bool]]:
    """(problem id, completion) -> (answer, right), for files of samples; ValueError for an unknown id."""
    known = {problem.key: problem for problem in problems}

    def grade(key: str, completion: str) -> tuple[str | None, bool]:
        if key not in known:
            raise ValueError(f"problem {key!r} is not in the benchmark's file")
        return check_answer(known[key], completion)

    return grade
