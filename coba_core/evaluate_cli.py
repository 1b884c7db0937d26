"""``coba-core evaluate``: files of samples in, a table of pass@k, avg@k and maj@k out, with a picture and JSON."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coba_core.evaluation import avg_at_k, bootstrap_interval, maj_at_k, pass_at_k

TABLE_FILE, PICTURE_FILE = "evaluation.json", "pass_at_k.png"
Grade = Callable[[str, str], tuple[str | None, bool]]
"""(prompt id, text of a sample) -> (the answer in it, whether that is right)."""


@dataclass(frozen=True)
class Fields:
    """The names of a sample's fields, which other programs may call otherwise."""

    prompt: str = "prompt_id"
    correct: str = "correct"
    answer: str = "answer"
    text: str = "text"


@dataclass
class Samples:
    """The samples of one file by problem: answers[i][j] and correct[i][j] are of sample j of prompt_ids[i]."""

    name: str
    prompt_ids: list[str] = field(default_factory=list)
    answers: list[list[str | None]] = field(default_factory=list)
    correct: list[list[bool]] = field(default_factory=list)

    @property
    def has_answers(self) -> bool:
        return any(answer is not None for given in self.answers for answer in given)


def read_samples(path: str | os.PathLike[str], fields: Fields | None = None, grade: Grade | None = None) -> Samples:
    """The samples in a JSONL file, one a line: ``{"prompt_id": 7, "correct": true, "answer": "42"}``.

    prompt_id: text or an integer. correct: true, false, 1 or 0. answer: text or a number, for maj@k; null or missing
    where none was found. With `grade`, answer and correctness come from the sample's "text" instead. A line with a
    field "samples" stands for that many, of which the number "correct" is right: what a training run writes. Other
    fields are left alone, blank lines too.

    ValueError names file and line of the first that is malformed, that contradicts an earlier line on whether an answer
    is right, or that is right without an answer in a file that has answers.
    """
    fields = fields or Fields()
    samples = Samples(Path(path).stem)
    place: dict[str, int] = {}
    verdicts: dict[tuple[str, str], tuple[bool, int]] = {}
    unanswered = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            where = f"{os.fspath(path)}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: not JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{where}: {type(record).__name__}, not an object with fields")
            key = str(_field(record, fields.prompt, (str, int), where))
            count, answer = 1, None
            if grade is None and "samples" in record:
                count = _field(record, "samples", (int,), where)
                right = _field(record, fields.correct, (int,), where)
                if not 0 <= right <= count or not count:
                    raise ValueError(f"{where}: {right} right samples of {count}")
            elif grade is None:
                right = bool(_field(record, fields.correct, (bool, 0, 1), where))
                answer = record.get(fields.answer)
                if answer is not None:
                    answer = str(_field(record, fields.answer, (str, int, float), where))
            else:
                try:
                    answer, right = grade(key, str(_field(record, fields.text, (str,), where)))
                except ValueError as error:
                    raise ValueError(f"{where}: {error}") from error
            if answer is not None:
                before, line_before = verdicts.setdefault((key, answer), (right, number))
                if before != right:
                    raise ValueError(f"{where}: {answer!r} is {right} here and {before} on line {line_before}")
            elif right and unanswered == 0:
                unanswered = number
            i = place.setdefault(key, len(place))
            if i == len(samples.prompt_ids):
                samples.prompt_ids.append(key)
                samples.answers.append([])
                samples.correct.append([])
            samples.answers[i] += [answer] * count
            samples.correct[i] += [j < int(right) for j in range(count)]
    if not place:
        raise ValueError(f"{os.fspath(path)}: holds no sample")
    if unanswered and samples.has_answers:
        raise ValueError(f"{os.fspath(path)}:{unanswered}: right, but without the answer that other lines have")
    return samples


def _field(record: dict[str, Any], name: str, kinds: tuple[Any, ...], where: str) -> Any:
    """record[name], of one of these types or equal to one of these values; ValueError otherwise."""
    if name not in record:
        raise ValueError(f"{where}: no field {name!r}")
    value = record[name]
    types = [kind for kind in kinds if isinstance(kind, type)]
    values = [kind for kind in kinds if not isinstance(kind, type)]
    if type(value) in types or (isinstance(value, (int, float)) and value in values):
        return value
    wanted = ", ".join([kind.__name__ for kind in types] + [str(kind) for kind in values])
    raise ValueError(f"{where}: {name!r} is {value!r}, not one of {wanted}")


def evaluate(samples: Samples, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0) -> dict[str, Any]:
    """All figures of a file as a JSON-able mapping.

    "pass_at_k" holds "k", "mean", "low" and "high" as lists for k = 1 ... the smallest number of samples; "avg" and
    "maj" (over all samples of a problem; only where answers are given) one "mean", "low" and "high".
    """
    n = [len(given) for given in samples.correct]
    c = [sum(given) for given in samples.correct]

    def figure(values: Any) -> dict[str, Any]:
        low, high = bootstrap_interval(values, confidence=confidence, resamples=resamples, seed=seed)
        return {"mean": values.mean(axis=0).tolist(), "low": low.tolist(), "high": high.tolist()}

    passes = pass_at_k(n, c)
    result = {
        "name": samples.name,
        "problems": len(n),
        "samples": {"min": min(n), "max": max(n), "total": sum(n)},
        "confidence": confidence,
        "avg": figure(avg_at_k(n, c)),
        "pass_at_k": {"k": list(range(1, passes.shape[1] + 1)), **figure(passes)},
    }
    if samples.has_answers:
        result["maj"] = figure(maj_at_k(samples.answers, samples.correct))
    return result


def shown_ks(largest: int) -> list[int]:
    """The k that a table has room for: powers of two, and the largest.

    >>> shown_ks(12)
    [1, 2, 4, 8, 12]
    """
    return sorted({2**i for i in range(largest.bit_length())} | {largest})


def format_table(results: list[dict[str, Any]]) -> str:
    """One column a file, one row a figure: mean [low, high]."""

    def cell(figure: dict[str, Any] | None, k: int | None = None) -> str:
        if figure is None or (k is not None and k > len(figure["k"])):
            return "-"
        mean, low, high = (figure[x] if k is None else figure[x][k - 1] for x in ("mean", "low", "high"))
        return f"{mean:.4f} [{low:.4f}, {high:.4f}]"

    def count(samples: dict[str, int]) -> str:
        return str(samples["min"]) if samples["min"] == samples["max"] else f"{samples['min']} to {samples['max']}"

    rows = [["", *(r["name"] for r in results)], ["problems", *(str(r["problems"]) for r in results)]]
    rows.append(["samples a problem", *(count(r["samples"]) for r in results)])
    rows.append(["avg@n", *(cell(r["avg"]) for r in results)])
    if any("maj" in r for r in results):
        rows.append(["maj@n", *(cell(r.get("maj")) for r in results)])
    for k in sorted({k for r in results for k in shown_ks(r["pass_at_k"]["k"][-1])}):
        rows.append([f"pass@{k}", *(cell(r["pass_at_k"], k) for r in results)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def draw_pass_at_k(results: list[dict[str, Any]], path: str | os.PathLike[str]) -> None:
    """pass@k over k, one line a file, its interval as a band; a PNG file, written whole or not at all."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError('the picture needs matplotlib: pip install "coba-core[train]"') from error
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for result in results:
        curve = result["pass_at_k"]
        (line,) = axes.plot(curve["k"], curve["mean"], marker="." if len(curve["k"]) < 33 else "", label=result["name"])
        axes.fill_between(curve["k"], curve["low"], curve["high"], color=line.get_color(), alpha=0.15, linewidth=0)
    largest = max(result["pass_at_k"]["k"][-1] for result in results)
    axes.set_xscale("log", base=2)
    axes.set_xticks(shown_ks(largest), [str(k) for k in shown_ks(largest)])
    axes.minorticks_off()
    axes.set(xlabel="k", ylabel="pass@k")
    axes.grid(alpha=0.3)
    axes.legend()
    _replace(Path(path), lambda temporary: figure.savefig(temporary, format="png", dpi=150))


def _replace(target: Path, write: Callable[[str], object]) -> None:
    """Writes a file under a temporary name beside it, then renames it."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        write(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def run_evaluate(arguments: argparse.Namespace) -> int:
    """The command: reads, computes, prints, and writes evaluation.json and pass_at_k.png where asked to."""
    output = None if arguments.output is None else Path(arguments.output)
    if output is not None and output.exists() and not output.is_dir():
        raise ValueError(f"{output}: is a file, not a folder")
    if output is not None and output.exists() and any(output.iterdir()) and not arguments.overwrite:
        raise ValueError(f"{output}: exists and is not empty; --overwrite replaces the evaluation in it")
    if (arguments.benchmark is None) != (arguments.problems is None):
        raise ValueError("--benchmark and --problems: one needs the other")
    grade = None
    if arguments.benchmark is not None:
        from coba_core.integrations.grpo.benchmarks import grader, load_benchmark

        grade = grader(load_benchmark(arguments.benchmark, arguments.problems))
    fields = Fields(arguments.prompt_field, arguments.correct_field, arguments.answer_field, arguments.text_field)
    options = {"confidence": arguments.confidence, "resamples": arguments.resamples, "seed": arguments.seed}
    results = [evaluate(read_samples(path, fields, grade), **options) for path in arguments.samples]
    names = [result["name"] for result in results]
    for result, path in zip(results, arguments.samples, strict=True):
        if names.count(result["name"]) > 1:
            result["name"] = path
    print(format_table(results))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"options": options, "results": results}, indent=1, allow_nan=False) + "\n"
        _replace(output / TABLE_FILE, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))
        draw_pass_at_k(results, output / PICTURE_FILE)
        print(f"written: {output / TABLE_FILE}, {output / PICTURE_FILE}")
    return 0


def add_evaluate_command(subparsers: Any) -> argparse.ArgumentParser:
    """Adds ``evaluate`` to what ``argparse.ArgumentParser.add_subparsers`` returned; its ``run`` is the command."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "evaluate",
        help="pass@k, avg@k and maj@k of files of samples, with bootstrap intervals over problems",
        description="One sample a line, as JSON with the fields prompt_id and correct, and answer for maj@k. "
        "With --benchmark and --problems, answers are read from the field text and checked by math-verify.",
    )
    parser.add_argument("samples", nargs="+", metavar="SAMPLES.jsonl", help="one file a method; several are compared")
    parser.add_argument("--output", metavar="FOLDER", help=f"where {TABLE_FILE} and {PICTURE_FILE} go")
    parser.add_argument("--overwrite", action="store_true", help="write into a folder that is not empty")
    parser.add_argument("--confidence", type=float, default=0.95, help="of the intervals (default 0.95)")
    parser.add_argument("--resamples", type=int, default=2000, help="of the bootstrap (default 2000)")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default 0)")
    for name, default in vars(Fields()).items():
        parser.add_argument(f"--{name}-field", default=default, metavar="NAME", help=f"default {default}")
    parser.add_argument("--benchmark", metavar="NAME", help="aime2024, aime2025, amc2023, math500 or olympiadbench")
    parser.add_argument("--problems", metavar="FILE", help="the benchmark's file, as published (JSONL, JSON, Parquet)")
    parser.set_defaults(run=run_evaluate)
    return parser
