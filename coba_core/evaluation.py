"""Figures of merit from samples: pass@k, avg@k, maj@k, and bootstrap intervals over problems.

Every function takes counts per problem, [P], and returns one number a problem; the mean over problems is the figure
that tables print, and :func:`bootstrap_interval` says how far it may be trusted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from coba_core.kernels.numpy_backend import Floats, Ints
from coba_core.state import finite_number


def _checked_counts(samples: Any, correct: Any) -> tuple[Ints, Ints]:
    """Samples n >= 1 and correct ones 0 <= c <= n of each problem as int64 [P]; ValueError naming the first wrong."""
    n, c = np.asarray(samples), np.asarray(correct)
    if n.ndim != 1 or n.shape != c.shape:
        raise ValueError(f"samples has shape {n.shape} and correct {c.shape}: one number a problem is needed")
    for name, counts in (("samples", n), ("correct", c)):
        if counts.size and counts.dtype.kind not in "iu":
            raise ValueError(f"{name} has dtype {counts.dtype}, not an integer one")
    n, c = n.astype(np.int64), c.astype(np.int64)
    for name, counts, wrong, need in (
        ("samples", n, n < 1, "at least 1"),
        ("correct", c, (c < 0) | (c > n), "from 0 to the samples of its problem"),
    ):
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(f"{name}[{i}] is {counts[i]}, not {need}")
    return n, c


def pass_at_k(
    samples: Sequence[int] | npt.NDArray[Any], correct: Sequence[int] | npt.NDArray[Any], max_k: int | None = None
) -> Floats:
    """1 - C(n-c, k)/C(n, k): the chance that k of a problem's n samples, drawn without return, hold a correct one.

    samples n, correct c: integers [P]. Returns float64 [P, K], column k-1 for k = 1 ... K; K = `max_k`, or the smallest
    n. Computed as the sum over j <= k of the chance that draw j is the first correct one,
    ∏_{i<j} (n-c-i+1)/(n-i+1) · c/(n-j+1): only products and sums of numbers in [0, 1], so that the relative error stays
    near k times the float's at any n, where binomials overflow and log-gammas cancel.

    ValueError names the first count that is out of range, or the first problem with fewer than `max_k` samples. The
    estimator is unbiased for k <= n (2107.03374 eq. 1), the metric of 2505.18573.

    >>> pass_at_k([4, 4], [1, 4])
    array([[0.25, 0.5 , 0.75, 1.  ],
           [1.  , 1.  , 1.  , 1.  ]])
    """
    n, c = _checked_counts(samples, correct)
    if max_k is None:
        max_k = int(n.min()) if n.size else 0
    elif max_k < 1:
        raise ValueError(f"max_k is {max_k}, not at least 1")
    elif (n < max_k).any():
        i = int((n < max_k).argmax())
        raise ValueError(f"samples[{i}] is {n[i]}, fewer than max_k = {max_k}")
    j = np.arange(max_k)
    left = n[:, None] - j  # samples not yet drawn, at least 1
    miss = np.maximum(left - c[:, None], 0) / left
    before = np.cumprod(np.concatenate([np.ones((len(n), 1)), miss], axis=1), axis=1)[:, :max_k]
    first = before * np.minimum(c[:, None] / left, 1.0)
    return np.asarray(np.minimum(np.cumsum(first, axis=1), 1.0), dtype=np.float64)


def avg_at_k(samples: Sequence[int] | npt.NDArray[Any], correct: Sequence[int] | npt.NDArray[Any]) -> Floats:
    """c/n, float64 [P]: the mean correctness. Over subsets of any size k its expectation is the same.

    >>> avg_at_k([4, 8], [1, 8])
    array([0.25, 1.  ])
    """
    n, c = _checked_counts(samples, correct)
    return np.asarray(c / n, dtype=np.float64)


def maj_at_k(
    answers: Sequence[Sequence[Hashable | None]],
    correct: Sequence[Sequence[bool]],
    k: int | None = None,
    *,
    draws: int = 1000,
    seed: int = 0,
) -> Floats:
    """The chance that the most frequent answer among k of a problem's samples is correct, float64 [P].

    answers[p][j]: the answer of sample j of problem p, None where none was found: such a sample has no vote.
    correct[p][j]: whether it is right; all right answers count as one, however written, as they equal the reference.
    Ties are broken at random, so m tied answers with the right one among them count 1/m.

    k = None takes all of a problem's samples and is exact, as is k = 1; any other k is the mean over `draws` random
    subsets. ValueError names a problem with fewer than k samples, or an answer marked both right and wrong.

    >>> maj_at_k([["7", "7", "8"], ["1", "2", "2", None]], [[True, True, False], [True, False, False, False]])
    array([1., 0.])
    """
    if len(answers) != len(correct):
        raise ValueError(f"answers has {len(answers)} problems and correct {len(correct)}")
    if draws < 1:
        raise ValueError(f"draws is {draws}, not at least 1")
    if k is not None and k < 1:
        raise ValueError(f"k is {k}, not at least 1")
    rng = np.random.default_rng(seed)
    result = np.empty(len(answers))
    for p, (given, right) in enumerate(zip(answers, correct, strict=True)):
        votes = _votes(p, given, right)
        size = int(votes.sum())
        if k is not None and size < k:
            raise ValueError(f"answers[{p}] has {size} samples, fewer than k = {k}")
        if k == 1:
            result[p] = votes[1] / size
            continue
        whole = k is None or k == size
        drawn = votes[None, :] if whole else rng.multivariate_hypergeometric(votes, int(k or 0), size=draws)
        top = drawn[:, 1:].max(axis=1)
        tied = (drawn[:, 1:] == top[:, None]).sum(axis=1)
        result[p] = np.where((drawn[:, 1] == top) & (top > 0), 1.0 / tied, 0.0).mean()
    return result


def _votes(p: int, answers: Sequence[Hashable | None], correct: Sequence[bool]) -> Ints:
    """Samples without an answer, right samples, then the samples of each wrong answer, int64 [2 + wrong answers]."""
    if len(answers) != len(correct) or not len(answers):
        raise ValueError(f"answers[{p}] has {len(answers)} samples and correct[{p}] {len(correct)}: one each is needed")
    right = {answer for answer, ok in zip(answers, correct, strict=True) if ok}
    if None in right:
        raise ValueError(f"answers[{p}] holds a sample that is right and has no answer")
    wrong = Counter(answer for answer, ok in zip(answers, correct, strict=True) if not ok)
    silent = wrong.pop(None, 0)
    if both := right & wrong.keys():
        raise ValueError(f"answers[{p}] holds {next(iter(both))!r} both as right and as wrong")
    return np.array([silent, sum(map(bool, correct)), *wrong.values()], dtype=np.int64)


def bootstrap_interval(
    values: Sequence[float] | npt.NDArray[Any], *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[Floats, Floats]:
    """Percentile bootstrap interval of the mean over problems (axis 0).

    values: float [P] or [P, K], finite. Returns (low, high), float64 scalars or [K]: the quantiles (1 ± confidence)/2
    of the means of `resamples` samples of P problems drawn with return. The columns share their resamples. One problem
    has an interval of no width: there is no second one to tell how they vary.

    >>> low, high = bootstrap_interval([0.0, 1.0] * 50)
    >>> print(low.round(1), high.round(1))
    0.4 0.6
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim not in (1, 2) or not len(x):
        raise ValueError(f"values has shape {x.shape}, not [problems] or [problems, K] with a problem at least")
    if not np.isfinite(x).all():
        place = np.argwhere(~np.isfinite(x))[0].tolist()
        raise ValueError(f"values{place} is {x[tuple(place)]}, not a finite number")
    finite_number("confidence", confidence, above=0.0, below=1.0)
    if resamples < 1:
        raise ValueError(f"resamples is {resamples}, not at least 1")
    rng = np.random.default_rng(seed)
    problems = len(x)
    means = []
    block = max(1, 2**22 // problems)  # bounds the memory of the weights
    for start in range(0, resamples, block):
        size = min(block, resamples - start)
        weights = rng.multinomial(problems, np.full(problems, 1.0 / problems), size=size)
        means.append(weights @ x / problems)
    low, high = np.quantile(np.concatenate(means), [0.5 - confidence / 2, 0.5 + confidence / 2], axis=0)
    return low, high
