"""What is asked and how answers are scored: problems with stable ids, some to train on and some held out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from . import arithmetic
from .benchmarks import BenchmarkProblem, check_answer

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class Problem:
    """One prompt. ``key`` stays the same over epochs and restarts; ``kind`` is what tables group by."""

    key: str
    prompt: str | tuple[Message, ...]
    answer: str
    kind: str = ""
    entry: Any = None  # what the task's own scorer needs

    @property
    def text(self) -> str:
        return self.prompt if isinstance(self.prompt, str) else json.dumps(self.prompt)


@dataclasses.dataclass(frozen=True)
class Task:
    """Problems to train on, problems held out, and ``score(problem, completion) -> reward``."""

    train: list[Problem]
    heldout: list[Problem]
    score: Callable[[Problem, str], float]

    def __post_init__(self) -> None:
        if not self.train:
            raise ValueError("task_args: no problem to train on")
        keys = [p.key for p in self.train] + [p.key for p in self.heldout]
        if len(set(keys)) != len(keys):
            twice = next(key for key, times in Counter(keys).items() if times > 1)
            raise ValueError(f"task_args: two problems have the id {twice!r}")
        leaked = {p.text for p in self.heldout} & {p.text for p in self.train}
        if leaked:
            raise ValueError(f"task_args: held-out problem {min(leaked)!r} is also trained on")


def exact_match(problem: Problem, completion: str) -> float:
    """1 if completion and answer agree, spaces at the ends aside."""
    return float(completion.strip() == problem.answer.strip())


def math_match(problem: Problem, completion: str) -> float:
    """1 if the answer that math-verify finds in the completion equals the problem's."""
    return float(check_answer(BenchmarkProblem(problem.key, "", problem.answer.strip("$ ")), completion)[1])


def final_answer(completion: str) -> str:
    """The text in the last ``<answer>`` tags or ``\\boxed{}``, or after the last "Answer:", or the last line.

    >>> final_answer("2+2 is 4, so\\nAnswer: 4\\n")
    '4'
    """
    patterns = (r"<answer>(.*?)</answer>", r"\\boxed\{([^{}]*)\}", r"[Aa]nswer(?: is)?:\s*(.*)")
    for pattern in patterns:
        if found := re.findall(pattern, completion, flags=re.DOTALL if "<" in pattern else 0):
            return str(found[-1]).strip()
    return completion.strip().rsplit("\n", 1)[-1].strip()


def arithmetic_task(
    *, train: int = 256, heldout: int = 256, mix: dict[str, float] | None = None, seed: int = 0
) -> Task:
    """Fixed-width arithmetic for the embedded policy; see arithmetic.py, and embedded.py for what it can show.

    ``mix`` weighs the kinds (``+1`` to ``-6``); kinds that have too few problems leave theirs to the harder ones.
    """
    weights = dict.fromkeys(arithmetic.KINDS, 1.0) if mix is None else {k: float(w) for k, w in mix.items() if w}

    def pool(size: int, stream: int, hold_out: bool) -> list[Problem]:
        rng = np.random.default_rng([seed, stream])
        found: list[tuple[str, str, str]] = []
        left = dict(weights)
        for kind in weights:  # easiest first: the short ones run out
            wanted = round((size - len(found)) * left[kind] / sum(left.values()))
            found += arithmetic.problems(rng, {kind: wanted}, hold_out=hold_out)
            del left[kind]
        return [Problem(prompt, prompt, answer, kind) for kind, prompt, answer in found]

    return Task(pool(train, 0, False), pool(heldout, 1, True), exact_match)


def skills_task(
    *, train: int = 256, heldout: int = 256, mix: dict[int, float] | None = None, seed: int = 0, maps_seed: int = 0
) -> Task:
    """Prerequisite skills for the skills policy, see skills.py. ``mix`` weighs the levels, 1 to 6.

    ``seed`` chooses the problems; ``maps_seed``, the policy's own seed, what is right.
    """
    from . import skills  # which loads torch

    weights = dict.fromkeys(range(1, skills.SKILLS + 1), 1.0) if mix is None else mix

    def pool(size: int, stream: int, hold_out: bool) -> list[Problem]:
        rng = np.random.default_rng([seed, stream])
        found = skills.problems(rng, size, weights, hold_out=hold_out, seed=maps_seed)
        return [Problem(prompt, prompt, answer, kind) for kind, prompt, answer in found]

    return Task(pool(train, 0, False), pool(heldout, 1, True), exact_match)


def reasoning_gym_task(
    *,
    name: str,
    train: int = 1000,
    heldout: int = 200,
    seed: int = 0,
    config: dict[str, Any] | None = None,
    instruction: str = "Think step by step, then write the final answer after 'Answer:'.",
    partial_credit: bool = False,
) -> Task:
    """A reasoning_gym data set by name, scored by its own scorer on the extracted answer.

    Its scores are not binary: below 0.99 is no success, unless ``partial_credit`` keeps them as rewards.
    """
    import reasoning_gym

    def pool(size: int, stream: int, known: set[str]) -> Iterator[Problem]:
        dataset = reasoning_gym.create_dataset(name, seed=2 * seed + stream, size=4 * size, **(config or {}))
        for i, entry in enumerate(dataset):
            if size and entry["question"] not in known:
                known.add(entry["question"])
                prompt = f"{entry['question']}\n{instruction}\n"
                yield Problem(f"{name}/{seed}/{stream}/{i}", prompt, str(entry["answer"]), name, (dataset, entry))
                size -= 1

    def score(problem: Problem, completion: str) -> float:
        dataset, entry = problem.entry
        credit = float(dataset.score_answer(final_answer(completion), entry))
        return credit if partial_credit else float(credit >= 0.99)

    known: set[str] = set()
    held = list(pool(heldout, 1, known))
    return Task(list(pool(train, 0, known)), held, score)


def _records(path: Path) -> Iterator[tuple[int, Any]]:
    """(line or row number, record) of a .jsonl or .parquet file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:  # pyarrow's errors derive from these
            raise ValueError(f"{path}: not a readable Parquet file: {error}") from error
        yield from enumerate(rows, 1)
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield number, json.loads(line)
                except ValueError as error:
                    raise ValueError(f"{path}:{number}: not valid JSON: {error}") from error


def read_problems(
    path: str, prompt: str = "prompt", answer: str = "answer", key: str = "id", scorer: str = "math_verify"
) -> list[Problem]:
    """The problems in a file; a ValueError names the file and line of the first that is malformed.

    With math_verify as the scorer that includes answers which it cannot read.
    """
    problems: list[Problem] = []
    seen: dict[str, int] = {}
    for number, record in _records(Path(path)):
        where = f"{path}:{number}"
        if not isinstance(record, dict):
            raise ValueError(f"{where}: expected an object with {prompt!r} and {answer!r}")
        for name in (prompt, answer):
            if record.get(name) in (None, "", []):
                raise ValueError(f"{where}: {name!r} is missing or empty")
        text, right = record[prompt], record[answer]
        if isinstance(text, list):
            if not all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in text):
                raise ValueError(f"{where}: {prompt!r} must be text or messages with role and content")
            text = tuple({"role": str(m["role"]), "content": str(m["content"])} for m in text)
        elif not isinstance(text, str):
            raise ValueError(f"{where}: {prompt!r} must be text or a list of messages, got {text!r}")
        if isinstance(right, (dict, list, bool)):
            raise ValueError(f"{where}: {answer!r} must be text or a number, got {right!r}")
        identity = str(record.get(key, hashlib.sha256(json.dumps(text).encode()).hexdigest()[:16]))
        if identity in seen:
            raise ValueError(f"{where}: the same id {identity!r} as on line {seen[identity]}")
        seen[identity] = number
        problem = Problem(identity, text, str(right), str(record.get("kind", "")))
        if scorer == "math_verify":
            try:
                math_match(problem, "")
            except ValueError:
                raise ValueError(f"{where}: math-verify cannot read the {answer!r} {right!r}") from None
        problems.append(problem)
    if not problems:
        raise ValueError(f"{path}: holds no problem")
    return problems


def file_task(
    *,
    train: str,
    heldout: str | None = None,
    heldout_share: float = 0.1,
    scorer: str = "math_verify",
    prompt: str = "prompt",
    answer: str = "answer",
    key: str = "id",
) -> Task:
    """JSONL or Parquet files of prompts and answers. Without a ``heldout`` file, a share of ``train`` is held out."""
    scorers = {"math_verify": math_match, "exact": exact_match}
    if scorer not in scorers:
        raise ValueError(f"task_args: scorer: {scorer!r} is none of {', '.join(scorers)}")
    problems = read_problems(train, prompt, answer, key, scorer)
    if heldout is not None:
        return Task(problems, read_problems(heldout, prompt, answer, key, scorer), scorers[scorer])
    if not 0 <= heldout_share < 1:
        raise ValueError(f"task_args: heldout_share: must lie within [0, 1), got {heldout_share}")

    def held(p: Problem) -> bool:  # by the prompt, so that the same prompt under two ids falls on one side
        return int(hashlib.sha256(p.text.encode()).hexdigest()[:8], 16) < heldout_share * 16**8

    return Task([p for p in problems if not held(p)], [p for p in problems if held(p)], scorers[scorer])


TASKS: dict[str, Callable[..., Task]] = {
    "arithmetic": arithmetic_task,
    "skills": skills_task,
    "reasoning_gym": reasoning_gym_task,
    "file": file_task,
}


def make_task(name: str, arguments: dict[str, Any]) -> Task:
    """A task by the name and arguments that configurations use."""
    try:
        return TASKS[name](**arguments)
    except TypeError as error:
        raise ValueError(f"task_args: {error}") from error


class PromptStream:
    """Endless passes over ``size`` problems, each in its own order; ``position`` is all the state there is.

    >>> stream = PromptStream(3, seed=0)
    >>> sorted(stream.take(3)), stream.position
    ([0, 1, 2], 3)
    """

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed, self.position = size, seed, 0

    def take(self, count: int) -> list[int]:
        """The indices of the next ``count`` problems."""
        taken: list[int] = []
        while len(taken) < count:
            epoch, start = divmod(self.position, self.size)
            order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            order = order[start : start + count - len(taken)]
            taken += order.tolist()
            self.position += len(order)
        return taken
