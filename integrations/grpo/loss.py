"""GRPO's clipped loss over groups of unequal size, in micro-batches bounded by their number of tokens."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch
from torch.utils.checkpoint import checkpoint

from coba_core import prompt_weights

from .model import Policy
from .parallel import Processes
from .rollouts import Rollouts

LOGITS_AT_A_TIME = 2**27  # of which float32 copies are made: half a gigabyte each


@dataclasses.dataclass(frozen=True)
class LossSettings:
    """Fields of TrainConfig by the same names."""

    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coef: float = 0.0
    entropy_coef: float = 0.0
    weighting: str = "token"
    micro_batch_tokens: int = 16384


def token_weights(rollouts: Rollouts, weighting: str) -> torch.Tensor:
    """Weight of each sampled token in the loss, float32 ``[R, T]``, adding up to 1.

    "token": the same for every token of the batch; "sequence": 1/(R length), every rollout the same in total;
    "prompt": 1/(M Bᵢ length), every prompt the same in total.
    """
    mask = rollouts.completion_mask.double()
    if weighting == "token":
        return (mask / mask.sum().clamp(min=1)).float()
    each: torch.Tensor = prompt_weights(rollouts.rows, weighting="prompt" if weighting == "prompt" else "rollout")
    return (mask / mask.sum(1, keepdim=True).clamp(min=1) * each[:, None]).float()


def micro_batches(rollouts: Rollouts, chosen: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Indices of ``chosen`` rollouts in packs of at most ``limit`` tokens, padding included (one rollout at least).

    Rollouts of like length go together, so that little of a pack is padding.
    """
    prompt_width = rollouts.tokens.shape[1] - rollouts.completion_mask.shape[1]
    prompts = rollouts.mask[chosen, :prompt_width].sum(1)
    lengths = rollouts.lengths[chosen]
    order = torch.argsort(prompts + lengths, descending=True, stable=True)
    pack: list[int] = []
    widest = (0, 0)
    shape = torch.stack([prompts, lengths], dim=1)[order].tolist()
    for i, (prompt, length) in zip(chosen[order].tolist(), shape, strict=True):
        wider = (max(widest[0], prompt), max(widest[1], length))
        if pack and (len(pack) + 1) * sum(wider) > limit:
            yield torch.tensor(pack, device=chosen.device)
            pack, wider = [], (prompt, length)
        pack.append(i)
        widest = wider
    if pack:
        yield torch.tensor(pack, device=chosen.device)


def completion_logprobs(
    policy: Policy,
    rollouts: Rollouts,
    index: torch.Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    model: torch.nn.Module | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of the sampled tokens of these rollouts at ``temperature``, ``[n, T]``; their entropies, if asked for.

    The batch is cut to the longest prompt and completion in it; T is that of the rollouts, 0 beyond.
    """
    total = rollouts.completion_mask.shape[1]
    prompt_width = rollouts.tokens.shape[1] - total
    longest = int(rollouts.lengths[index].max())
    first = int(rollouts.mask[index, :prompt_width].any(0).int().argmax())
    columns = slice(first, prompt_width + longest)
    tokens, mask = rollouts.tokens[index, columns], rollouts.mask[index, columns]
    logits = policy.forward(tokens[:, :-1], mask[:, :-1], keep=longest, model=model).flatten(0, 1)
    parts = max(1, math.ceil(logits.numel() / LOGITS_AT_A_TIME))
    pieces = []
    for piece, target in zip(
        logits.tensor_split(parts), tokens[:, -longest:].flatten().tensor_split(parts), strict=True
    ):
        if parts == 1:
            pieces.append(_logprobs(piece, target, temperature, entropy))
        else:  # float32 copies of one piece at a time, made again in the backward pass
            pieces.append(checkpoint(_logprobs, piece, target, temperature, entropy, use_reentrant=False))
    keep = rollouts.completion_mask[index, :longest]
    pad = (0, total - longest)
    chosen, spread = (
        torch.nn.functional.pad(torch.cat(x).view(keep.shape).where(keep, 0.0), pad) for x in zip(*pieces, strict=True)
    )
    return chosen, spread


def _logprobs(
    logits: torch.Tensor, target: torch.Tensor, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (logits.float() / temperature).log_softmax(-1)
    chosen = log_p.gather(-1, target[:, None])[:, 0]
    return chosen, -(log_p.exp() * log_p).sum(-1) if entropy else torch.zeros_like(chosen)


def backward(
    policy: Policy,
    rollouts: Rollouts,
    advantages: torch.Tensor,
    settings: LossSettings,
    temperature: float,
    *,
    chosen: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
    reference: torch.nn.Module | None = None,
    processes: Processes | None = None,
) -> dict[str, float]:
    """Adds the gradient of the loss to the parameters; returns its parts.

    loss = -Σ w min(ρ A, clip(ρ, 1-ε_low, 1+ε_high) A) + kl_coef Σ w (e^d - d - 1) - entropy_coef Σ w H over sampled
    tokens, w = token_weights, ρ = π/π_old at the sampling temperature, d = ln π_ref/π. advantages ``[R]``. ``chosen``
    (a mini-batch) are the rollouts to use, all by default; weights are brought to the sum 1 among them.

    Rollouts of advantage 0 add exactly nothing to loss and gradient unless kl_coef or entropy_coef is set, so they are
    left out; they still count in the weights. If none is left, no gradient is added and "rows" is 0.

    With ``processes``, each takes its share of the rollouts, balanced by tokens; gradients and parts are those of all.
    A sharded model is put together in every pass, so that all processes make the same number: one with fewer packs
    goes on with passes of weight 0.
    """
    weights = token_weights(rollouts, settings.weighting) if weights is None else weights
    chosen = torch.arange(len(advantages), device=advantages.device) if chosen is None else chosen
    weights = weights / weights[chosen].sum()
    extra = settings.kl_coef > 0 or settings.entropy_coef > 0
    active = chosen if extra else chosen[advantages[chosen] != 0]
    sums = torch.zeros(5, device=advantages.device)  # loss, kl, entropy, clipped, |ln rho|
    policy.model.train()
    mine = active
    if processes is not None:
        mine = active[processes.share(rollouts.mask[active].sum(1))]
    packs = [(index, 1.0) for index in micro_batches(rollouts, mine, settings.micro_batch_tokens)]
    sharded = processes is not None and processes.sharded
    if processes is not None and sharded:
        packs += [(active[:1], 0.0)] * (processes.largest(len(packs), active.device) - len(packs))
    for index, share in packs:
        w = weights[index] * share
        new, spread = completion_logprobs(policy, rollouts, index, temperature, entropy=settings.entropy_coef > 0)
        log_ratio = (new - rollouts.logprobs[index]).where(rollouts.completion_mask[index], 0.0)
        ratio, a = log_ratio.exp(), advantages[index, None]
        clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
        surrogate = torch.minimum(ratio * a, clipped * a)
        loss = -(w * surrogate).sum()
        kl = torch.zeros((), device=loss.device)
        if settings.kl_coef > 0:
            with torch.no_grad():
                ref, _ = completion_logprobs(policy, rollouts, index, temperature, model=reference)
            difference = ref - new
            kl = (w * (difference.exp() - difference - 1)).sum()
            loss = loss + settings.kl_coef * kl
        entropy = (w * spread).sum()
        loss = loss - settings.entropy_coef * entropy
        # fully_shard takes the mean of the processes' gradients where the sum is meant
        (loss * processes.size if processes is not None and sharded else loss).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            outside = ((ratio * a) > (clipped * a)).float()
            sums += torch.stack([loss, kl, entropy, (w * outside).sum(), (w * log_ratio.abs()).sum()])
    if processes is not None and len(active):
        processes.sum(sums)
        if not sharded:
            processes.sum_gradients([p for p in policy.model.parameters() if p.requires_grad])
    names = ("loss", "kl", "entropy_bonus", "clip_fraction", "log_ratio")
    return {**dict(zip(names, sums.tolist(), strict=True)), "rows": float(len(active))}
