"""The problems of studies/smollm2.yaml: short few-shot completions in twelve kinds, from nearly solved to out of reach.

``python studies/smollm2_problems.py`` writes studies/smollm2/train.jsonl and heldout.jsonl, the same every time.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path

WORDS = ("cat dog sun red blue tree fish book hand door rain star moon ship lamp king gold frog table house "
         "apple green night water".split())  # fmt: skip
NUMBERS = ("one two four five six eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen "
           "nineteen twenty thirty forty".split())  # fmt: skip
VALUES = [1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 30, 40]


def _draw(rng: random.Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1), 10**digits)


def _two(sign: str, answer: Callable[[int, int], int], digits: int) -> Callable[[random.Random], tuple[str, str]]:
    def make(rng: random.Random) -> tuple[str, str]:
        a, b = _draw(rng, digits), _draw(rng, digits)
        a, b = (max(a, b), min(a, b)) if sign == "-" else (a, b)
        return f"{a}{sign}{b}=", str(answer(a, b))

    return make


def _copy(digits: int) -> Callable[[random.Random], tuple[str, str]]:
    def make(rng: random.Random) -> tuple[str, str]:
        a = _draw(rng, digits)
        return f"{a}:", str(a)

    return make


def _count(rng: random.Random) -> tuple[str, str]:
    a = rng.randrange(10, 90)
    return f"{a} {a + 1} {a + 2}", str(a + 3)


def _next(digits: int) -> Callable[[random.Random], tuple[str, str]]:
    def make(rng: random.Random) -> tuple[str, str]:
        a = _draw(rng, digits)
        return f"{a}>", str(a + 1)

    return make


def _largest(rng: random.Random) -> tuple[str, str]:
    a, b = rng.sample(range(10, 100), 2)
    return f"max {a} {b}:", str(max(a, b))


def _first(rng: random.Random) -> tuple[str, str]:
    word = rng.choice(WORDS)
    return f"{word}:", word[0]


def _number(rng: random.Random) -> tuple[str, str]:
    i = rng.randrange(len(NUMBERS))
    return f"{NUMBERS[i]}:", str(VALUES[i])


KINDS: dict[str, tuple[str, Callable[[random.Random], tuple[str, str]]]] = {
    "copy 4 digits": ("7204:7204\n9518:9518\n", _copy(4)),
    "copy 3 digits": ("720:720\n951:951\n", _copy(3)),
    "number word": ("three: 3\nseven: 7\n", _number),
    "count on": ("1 2 3 4\n5 6 7 8\n", _count),
    "one more, 2 digits": ("64>65\n17>18\n22>23\n", _next(2)),
    "times": ("6*7=42\n3*8=24\n", _two("*", lambda a, b: a * b, 1)),
    "larger": ("max 23 71: 71\nmax 86 40: 86\n", _largest),
    "one more, 3 digits": ("822>823\n325>326\n", _next(3)),
    "first letter": ("corn: c\nmilk: m\n", _first),
    "minus": ("9-4=5\n7-1=6\n", _two("-", lambda a, b: a - b, 1)),
    "plus": ("7+5=12\n4+2=6\n", _two("+", lambda a, b: a + b, 1)),
    "plus, 2 digits": ("42+17=59\n35+48=83\n", _two("+", lambda a, b: a + b, 2)),
}
"""What a kind's prompts begin with, and what draws a question and its answer."""


def problems(train: int = 6, heldout: int = 4, seed: int = 0) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """``train`` and ``heldout`` problems of each kind, all different: records with id, kind, prompt and answer.

    >>> [len(part) for part in problems()]
    [72, 48]
    """
    rng = random.Random(seed)
    parts: tuple[list[dict[str, str]], list[dict[str, str]]] = ([], [])
    for kind, (examples, draw) in KINDS.items():
        found: dict[str, str] = {}
        while len(found) < train + heldout:
            question, answer = draw(rng)
            if question not in examples:
                found.setdefault(question, answer)
        for i, (question, answer) in enumerate(found.items()):
            record = {"id": f"{kind}: {question}", "kind": kind, "prompt": examples + question, "answer": answer}
            parts[i >= train].append(record)
    return parts


def main() -> None:
    folder = Path(__file__).parent / "smollm2"
    folder.mkdir(exist_ok=True)
    for name, records in zip(("train", "heldout"), problems(), strict=True):
        partial = folder / f".{name}.jsonl.partial"
        partial.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        partial.replace(folder / f"{name}.jsonl")


if __name__ == "__main__":
    main()
