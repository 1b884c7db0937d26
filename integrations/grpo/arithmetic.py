"""Fixed-width arithmetic, least significant digit first: ``750000+860000=5210000`` is 57+68=125.

Graded difficulty is the number of significant digits (1 to 6) and the operation (+ or -): twelve kinds. Whether a
problem is held out is a property of the problem itself, so that neither warm-up nor training can ever meet one.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

WIDTH = 6  # digits of an operand; an answer has one more, so that every sum fits
LEVELS = (1, 2, 3, 4, 5, 6)
OPERATIONS = ("+", "-")
KINDS = tuple(f"{op}{level}" for level in LEVELS for op in OPERATIONS)  # easiest first
VOCABULARY = ("<pad>", "<eos>", "<unk>", *"0123456789", "+", "-", "*", "=")
DIGIT_0 = VOCABULARY.index("0")
PROMPT_LENGTH = 2 * WIDTH + 2
ANSWER_LENGTH = WIDTH + 1

Integers = npt.NDArray[np.int64]


def held_out(a: Integers, b: Integers, subtract: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """One problem in five, by a hash of the problem (SplitMix64's finaliser): a, b, subtract ``[n]`` -> ``[n]``."""
    x = (a.astype(np.uint64) * np.uint64(1_000_003) + b.astype(np.uint64)) * np.uint64(2) + subtract.astype(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((x ^ (x >> np.uint64(31))) % np.uint64(5) == 0)


def draw(rng: np.random.Generator, kinds: Integers) -> tuple[Integers, Integers, npt.NDArray[np.bool_]]:
    """A random problem for each index into KINDS ``[n]``: operands a >= b of exactly that many digits, and the sign."""
    level = kinds // 2 + 1
    low = np.where(level == 1, 0, 10 ** (level - 1))
    x, y = rng.integers(low, 10**level), rng.integers(low, 10**level)
    return np.maximum(x, y), np.minimum(x, y), kinds % 2 == 1


def digits(values: Integers, width: int) -> Integers:
    """Decimal digits, least significant first: ``[n]`` -> ``[n, width]``."""
    return values[:, None] // 10 ** np.arange(width) % 10


def encode(a: Integers, b: Integers, subtract: npt.NDArray[np.bool_]) -> tuple[Integers, Integers]:
    """Token ids of the prompts ``[n, PROMPT_LENGTH]`` and the digits of their answers ``[n, ANSWER_LENGTH]``."""
    n = len(a)
    sign = np.where(subtract, VOCABULARY.index("-"), VOCABULARY.index("+"))[:, None]
    equals = np.full((n, 1), VOCABULARY.index("="))
    prompt = np.concatenate([DIGIT_0 + digits(a, WIDTH), sign, DIGIT_0 + digits(b, WIDTH), equals], axis=1)
    return prompt, digits(np.where(subtract, a - b, a + b), ANSWER_LENGTH)


def problems(rng: np.random.Generator, counts: dict[str, int], *, hold_out: bool) -> list[tuple[str, str, str]]:
    """Distinct problems (kind, prompt, answer), as many of each kind as ``counts`` says or as exist on that side."""
    found: list[tuple[str, str, str]] = []
    for kind, wanted in counts.items():
        if kind not in KINDS:
            raise ValueError(f"mix: unknown kind {kind!r}, expected some of {', '.join(KINDS)}")
        a, b, subtract = draw(rng, np.full(64 * wanted + 512, KINDS.index(kind)))
        keep = held_out(a, b, subtract) == hold_out
        pairs = list(dict.fromkeys(zip(a[keep].tolist(), b[keep].tolist(), strict=True)))[:wanted]
        if pairs:
            a, b = np.array(pairs).T
            prompts, answers = encode(a, b, np.full(len(a), kind[0] == "-"))
            for prompt, answer in zip(prompts.tolist(), answers.tolist(), strict=True):
                found.append((kind, "".join(VOCABULARY[t] for t in prompt), "".join(map(str, answer))))
    return found
