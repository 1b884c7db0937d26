"""Groups of unequal size: which rollout belongs to which prompt, advantages, weights, padding.

Groups are by id, never by position. Functions take NumPy arrays (or sequences) and torch tensors alike, and return
the same kind on the same device; on a tensor nothing waits for the device except where said.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import numpy as np
import numpy.typing as npt

from coba_core import kernels
from coba_core.history import checked_rows
from coba_core.kernels.numpy_backend import Floats

Scale = Literal["group", "none", "batch"]
Weighting = Literal["prompt", "rollout"]


def is_tensor(x: Any) -> bool:
    """Whether x is a torch tensor, without importing torch."""
    return type(x).__module__.partition(".")[0] == "torch" or any(
        base.__module__.partition(".")[0] == "torch" for base in type(x).__mro__[:-1]
    )


def repeat_index(budgets: Any, total: int | None = None) -> Any:
    """Which prompt each rollout belongs to: [0]*B₀ + [1]*B₁ + ..., int64 [ΣB].

    budgets: integers of at least 0, [M]; ValueError names the first that is not. total: their sum, ValueError if it is
    not. A tensor's device is waited for once, as the length of the result depends on its values; with `total`, which
    then must be right, it is not.

    >>> repeat_index([2, 0, 3])
    array([0, 0, 2, 2, 2])
    """
    if is_tensor(budgets):
        import torch

        if budgets.ndim != 1 or budgets.dtype.is_floating_point:
            raise ValueError(f"budgets has shape {tuple(budgets.shape)} and dtype {budgets.dtype}, not integers [M]")
        if total is None or budgets.device.type == "cpu":
            rows = torch.repeat_interleave(budgets)
            if total is not None and rows.numel() != total:
                raise ValueError(f"total is {total}, the budgets' sum {rows.numel()}")
            return rows
        if (module := kernels.for_gpu()) is not None:
            return module.repeat_index(budgets, total)
        return torch.repeat_interleave(budgets, output_size=total)
    counts = np.asarray(budgets)
    if counts.ndim != 1 or (counts.size and counts.dtype.kind not in "iu"):
        raise ValueError(f"budgets has shape {counts.shape} and dtype {counts.dtype}, not integers [M]")
    if counts.size and counts.min() < 0:
        i = int((counts < 0).argmax())
        raise ValueError(f"budgets[{i}] is {counts[i]}, which must not be negative")
    if total is not None and int(counts.sum()) != total:
        raise ValueError(f"total is {total}, the budgets' sum {int(counts.sum())}")
    return np.repeat(np.arange(len(counts), dtype=np.int64), counts.astype(np.int64))


@overload
def group_advantages(rewards: npt.NDArray[Any], rows: Any, *, scale: Scale = "group", eps: float = 1e-4) -> Floats: ...
@overload
def group_advantages(rewards: Any, rows: Any, *, scale: Scale = "group", eps: float = 1e-4) -> Any: ...
def group_advantages(rewards: Any, rows: Any, *, scale: Scale = "group", eps: float = 1e-4) -> Any:
    """Aⱼ = rⱼ - mean of j's group, divided by (std + eps) of the group ("group"), of the batch ("batch") or by 1.

    rewards: [R]; NaN is left out of every mean and gets advantage 0. rows: group ids, integers of at least 0, [R], in
    any order. Standard deviations have ddof 1. A group of one, or of equal rewards, has advantage 0. Result: float64
    for NumPy, the rewards' floating dtype for a tensor. ValueError for lengths that differ or a negative id (on a
    tensor, ids are not checked: that would wait for the device).

    >>> group_advantages([1, 2, 3, 4, 10, 12], [0, 0, 0, 0, 1, 1], scale="none")
    array([-1.5, -0.5,  0.5,  1.5, -1. ,  1. ])
    """
    if scale not in ("group", "none", "batch"):
        raise ValueError(f"scale is {scale!r}, not 'group', 'none' or 'batch'")
    if is_tensor(rewards):
        return _tensor_advantages(rewards, rows, scale, eps)
    reward, row = checked_rows(rewards, rows, None)
    known = ~np.isnan(reward)
    complete = bool(known.all())
    kept, kept_row = (reward, row) if complete else (reward[known], row[known])
    if not len(kept):
        return np.zeros_like(reward)
    if len(kept_row) and int(kept_row.max()) > 4 * len(kept_row) + 1024:
        kept_row = np.unique(kept_row, return_inverse=True)[1]  # sparse ids: memory by rows, not by the largest id
    count = np.bincount(kept_row)
    size = np.maximum(count, 1)
    first = np.empty(len(count))
    first[kept_row] = kept  # one reward of the group: equal rewards centre to exact zeros
    shifted = kept - first.take(kept_row)
    centred = shifted - (np.bincount(kept_row, shifted) / size).take(kept_row)
    if scale == "group":
        variance = np.bincount(kept_row, centred * centred) / np.maximum(count - 1, 1)
        spread = np.sqrt(variance) + eps
        centred /= (spread if eps > 0.0 else np.where(spread > 0.0, spread, 1.0)).take(kept_row)
    elif scale == "batch":
        batch_spread = (float(np.std(kept, ddof=1)) if len(kept) > 1 else 0.0) + eps
        centred = centred / (batch_spread if batch_spread > 0.0 else 1.0)
    if complete:
        return centred
    result = np.zeros_like(reward)
    result[known] = centred
    return result


def _tensor_advantages(rewards: Any, rows: Any, scale: Scale, eps: float) -> Any:
    import torch

    if not is_tensor(rows):
        rows = torch.as_tensor(np.asarray(rows), device=rewards.device)
    if rewards.ndim != 1 or rows.shape != rewards.shape:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)} and rows {tuple(rows.shape)}: one row a reward is needed"
        )
    if not rewards.numel():
        return rewards.clone()
    if rewards.device.type == "cuda" and (module := kernels.for_gpu()) is not None:
        return module.group_advantages(rewards, rows, scale, eps)
    return torch_advantages(rewards, rows, scale, eps)


def torch_advantages(rewards: Any, rows: Any, scale: Scale, eps: float) -> Any:
    """Advantages by torch's own operations, none of which waits for the device; rewards and rows [R], R > 0."""
    import torch

    dtype = rewards.dtype if rewards.dtype.is_floating_point else torch.float32
    reward = rewards.double()
    known = ~torch.isnan(reward)
    weight = known.double()
    order, row = torch.sort(rows, stable=True)
    group = torch.cumsum(torch.cat([order.new_zeros(1), (order[1:] != order[:-1]).to(order.dtype)]), 0)
    ids = torch.empty_like(group).scatter_(0, row, group)  # dense ids below R, found without asking for the largest
    bins = rewards.numel()

    def total(x: Any) -> Any:
        return torch.zeros(bins, dtype=torch.float64, device=x.device).scatter_add_(0, ids, x)

    value = torch.where(known, reward, torch.zeros_like(reward))
    count = total(weight)
    big = torch.full((bins,), -math.inf, dtype=torch.float64, device=reward.device)
    first = big.scatter_reduce(0, ids, torch.where(known, reward, -math.inf), "amax")
    shifted = torch.where(known, value - torch.where(torch.isinf(first), 0.0, first)[ids], 0.0)
    centred = torch.where(known, shifted - (total(shifted) / count.clamp(min=1.0))[ids], 0.0)
    if scale == "group":
        variance = total(centred * centred) / (count - 1.0).clamp(min=1.0)
        spread = variance.sqrt() + eps
        centred = centred / torch.where(spread > 0.0, spread, 1.0)[ids]
    elif scale == "batch":
        n = weight.sum()
        mean = value.sum() / n.clamp(min=1.0)
        square = (torch.where(known, value - mean, 0.0) ** 2).sum() / (n - 1.0).clamp(min=1.0)
        spread = square.sqrt() + eps
        centred = centred / torch.where(spread > 0.0, spread, 1.0)
    return centred.to(dtype)


def prompt_weights(rows: Any, *, weighting: Weighting = "prompt") -> Any:
    """Weight of each rollout in a batch mean, float64 [R], adding up to 1.

    "prompt": 1/(M Bᵢ), the same total for every prompt that has a rollout; "rollout": 1/R. For a trainer that averages
    over rollouts, multiply the advantages by R times this.

    >>> prompt_weights([0, 0, 0, 1])
    array([0.16666667, 0.16666667, 0.16666667, 0.5       ])
    """
    if weighting not in ("prompt", "rollout"):
        raise ValueError(f"weighting is {weighting!r}, not 'prompt' or 'rollout'")
    if is_tensor(rows):
        import torch

        if weighting == "rollout" or not rows.numel():
            return torch.full(rows.shape, 1.0 / max(rows.numel(), 1), dtype=torch.float64, device=rows.device)
        order, place = torch.sort(rows, stable=True)
        group = torch.cumsum(torch.cat([order.new_zeros(1), (order[1:] != order[:-1]).to(order.dtype)]), 0)
        ids = torch.empty_like(group).scatter_(0, place, group)
        ones = torch.ones(rows.shape, dtype=torch.float64, device=rows.device)
        count = torch.zeros_like(ones).scatter_add_(0, ids, ones)
        return 1.0 / (count[ids] * (group[-1] + 1))
    row = checked_rows(np.zeros(len(rows)), rows, None)[1]
    if weighting == "rollout" or not len(row):
        return np.full(len(row), 1.0 / max(len(row), 1))
    dense = np.unique(row, return_inverse=True)[1]
    sizes = np.bincount(dense)
    return 1.0 / (len(sizes) * sizes[dense])


def pad_to_multiple(rows: int, *multiples: int) -> int:
    """How many rows to add so that `rows` divides by every one of `multiples` (their least common multiple).

    >>> pad_to_multiple(3509, 640)
    331
    """
    if rows < 0:
        raise ValueError(f"rows is {rows}, which must not be negative")
    for i, multiple in enumerate(multiples):
        if multiple < 1:
            raise ValueError(f"multiples[{i}] is {multiple}, not at least 1")
    return -rows % math.lcm(*multiples)
