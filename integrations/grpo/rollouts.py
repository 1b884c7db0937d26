"""Sampling with unequal budgets: each prompt is read once, then its cache is repeated for its rollouts."""

from __future__ import annotations

import dataclasses
import math

import torch

from .model import Policy


@dataclasses.dataclass
class Rollouts:
    """R rollouts; prompts are padded on the left to P, completions on the right to T.

    tokens and mask ``[R, P+T]`` int64; completion_mask ``[R, T]`` bool, true from the first sampled token to the
    end-of-sequence token; logprobs ``[R, T]`` float32, of the sampled tokens at the sampling temperature; entropy
    ``[R, T]`` float32 in nats, of the distributions they were sampled from; both 0 where masked; rows ``[R]`` int64,
    the prompt of each rollout.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    completion_mask: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    rows: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        """Sampled tokens of each rollout, int64 ``[R]``."""
        return self.completion_mask.sum(1)

    def mean_entropy(self) -> torch.Tensor:
        """Mean token entropy over the sampled positions, a tensor of no dimension."""
        return self.entropy.sum() / self.completion_mask.sum().clamp(min=1)

    def completions(self) -> list[list[int]]:
        """The sampled token ids of each rollout."""
        sampled = self.tokens[:, -self.completion_mask.shape[1] :].tolist()
        return [row[:length] for row, length in zip(sampled, self.lengths.tolist(), strict=True)]

    @staticmethod
    def concatenate(parts: list[Rollouts], prompts: list[int]) -> Rollouts:
        """One batch of several; part i holds prompts[i] prompts, and its rows continue those of the parts before it."""
        widest = max(p.tokens.shape[1] - p.logprobs.shape[1] for p in parts)
        joined: dict[str, list[torch.Tensor]] = {field.name: [] for field in dataclasses.fields(Rollouts)}
        for i, part in enumerate(parts):
            pad = widest - (part.tokens.shape[1] - part.logprobs.shape[1])
            for name, column in joined.items():
                values = getattr(part, name)
                if name in ("tokens", "mask"):  # masked, so that any token will do
                    values = torch.nn.functional.pad(values, (pad, 0))
                column.append(values + sum(prompts[:i]) if name == "rows" else values)
        return Rollouts(**{name: torch.cat(column) for name, column in joined.items()})

    def select(self, keep: torch.Tensor) -> Rollouts:
        """The rollouts at these indices (or where a mask is true)."""
        return Rollouts(*(getattr(self, field.name)[keep] for field in dataclasses.fields(self)))


def pad_left(sequences: list[list[int]], pad_id: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and mask ``[n, longest]``, padding on the left."""
    width = max(map(len, sequences))
    tokens = torch.tensor([[pad_id] * (width - len(s)) + s for s in sequences], device=device)
    mask = torch.tensor([[0] * (width - len(s)) + [1] * len(s) for s in sequences], device=device)
    return tokens, mask


def restrict(logits: torch.Tensor, top_p: float, top_k: int) -> torch.Tensor:
    """-inf for tokens outside the top k and outside the smallest set whose probability reaches top p, ``[n, V]``."""
    if top_k and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1.0:
        ordered, index = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)  # the mass in front of each token
        logits = logits.masked_fill((before >= top_p).gather(-1, index.argsort(-1)), float("-inf"))
    return logits


@torch.no_grad()
def generate(
    policy: Policy,
    prompts: list[list[int]],
    budgets: torch.Tensor,
    *,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    top_p: float = 1.0,
    top_k: int = 0,
    greedy: bool = False,
    max_rows: int = 4096,
    uniform: torch.Tensor | None = None,
) -> Rollouts:
    """budgets[i] completions of prompts[i]; budgets int64 ``[M]``. Rollouts come in the order of the prompts.

    Log-probs and entropy are of the whole distribution at ``temperature``: the one that training differentiates. With
    top_p or top_k, samples come from its restriction. At most ``max_rows`` rollouts are generated at a time.
    ``uniform``, float64 ``[R, max_new_tokens]`` in [0, 1), takes the place of the generator: a rollout then depends on
    its own numbers, not on the others in the batch.
    """
    policy.model.eval()
    tokens, mask = pad_left(prompts, policy.tokenizer.pad_token_id or 0, policy.device)
    rows = torch.repeat_interleave(budgets.to(policy.device))
    options = (max_new_tokens, temperature, generator, top_p, top_k, greedy)
    numbers = [None] * math.ceil(len(rows) / max_rows) if uniform is None else torch.split(uniform, max_rows)
    chunks = torch.split(rows, max_rows)
    parts = [_generate(policy, tokens, mask, c, *options, u) for c, u in zip(chunks, numbers, strict=True)]
    if len(parts) == 1:
        return parts[0]
    return Rollouts.concatenate(parts, [0] * len(parts))


def _generate(
    policy: Policy,
    prompt_tokens: torch.Tensor,
    prompt_mask: torch.Tensor,
    rows: torch.Tensor,
    max_new_tokens: int,
    temperature: float,
    generator: torch.Generator,
    top_p: float,
    top_k: int,
    greedy: bool,
    uniform: torch.Tensor | None,
) -> Rollouts:
    asked, which = torch.unique(rows, return_inverse=True)
    logits, cache = policy.step(prompt_tokens[asked], prompt_mask[asked], None)  # every prompt once
    logits = logits[which]
    if hasattr(cache, "batch_select_indices"):
        cache.batch_select_indices(which)
    else:
        raise ValueError(f"policy: {type(policy.model).__name__} keeps no cache whose rows can be repeated")
    count, device = len(rows), policy.device
    sampled = torch.full((count, max_new_tokens), policy.tokenizer.pad_token_id or 0, device=device)
    alive = torch.zeros((count, max_new_tokens), dtype=torch.bool, device=device)
    logprobs = torch.zeros((count, max_new_tokens), device=device)
    entropy = torch.zeros((count, max_new_tokens), device=device)
    active = torch.arange(count, device=device)  # the rollouts in the batch
    ended = torch.zeros(count, dtype=torch.bool, device=device)  # which of them wait to leave it
    mask = prompt_mask[rows]
    for t in range(max_new_tokens):
        log_p = (logits / temperature).log_softmax(-1)
        if greedy:
            token = log_p.argmax(-1)
        elif uniform is not None:  # the inverse of the cumulative distribution
            mass = restrict(log_p, top_p, top_k).double().softmax(-1).cumsum(-1)
            token = torch.searchsorted(mass, uniform[active, t, None] * mass[:, -1:], right=True)[:, 0]
            token = token.clamp(max=mass.shape[-1] - 1)
        else:
            token = torch.multinomial(restrict(log_p, top_p, top_k).softmax(-1), 1, generator=generator)[:, 0]
        going = (~ended).nonzero()[:, 0]
        at = active[going]
        sampled[at, t], alive[at, t] = token[going], True
        logprobs[at, t] = log_p.gather(-1, token[:, None])[going, 0]
        entropy[at, t] = torch.special.entr(log_p.exp()).sum(-1)[going]
        ended |= torch.isin(token, policy.eos_ids)
        going = (~ended).nonzero()[:, 0]
        if t + 1 == max_new_tokens or not len(going):
            break
        if 4 * len(going) <= 3 * len(active):  # a quarter at a time, as leaving copies the cache
            active, token, mask, ended = active[going], token[going], mask[going], ended[going]
            cache.batch_select_indices(going)
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
        logits, cache = policy.step(token[:, None], mask, cache)
    return Rollouts(
        torch.cat([prompt_tokens[rows], sampled], dim=1),
        torch.cat([prompt_mask[rows], alive.long()], dim=1),
        alive, logprobs, entropy, rows,
    )  # fmt: skip
