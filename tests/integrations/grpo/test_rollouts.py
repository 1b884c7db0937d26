"""Sampling with unequal budgets: the shared prefill changes nothing, log-probs are those of a plain forward pass."""

from __future__ import annotations

import pytest
import torch
from coba_core.integrations.grpo.rollouts import Rollouts, generate, pad_left, restrict

PROMPTS = ["750000+860000=", "12+7=", "3=", "999999-1", "5+5="]  # unequal lengths: padding on the left
BUDGETS = torch.tensor([3, 1, 0, 6, 2])


def sample(policy, budgets=BUDGETS, seed=0, **options):
    prompts = policy.encode(PROMPTS, chat=False)
    options = {"max_new_tokens": 9, "temperature": 0.7, **options}
    return prompts, generate(policy, prompts, budgets, generator=torch.Generator().manual_seed(seed), **options)


def test_shapes_and_groups(policy):
    _, rollouts = sample(policy)
    assert rollouts.rows.tolist() == [0, 0, 0, 1, 3, 3, 3, 3, 3, 3, 4, 4]
    width = rollouts.tokens.shape[1] - rollouts.completion_mask.shape[1]
    assert torch.equal(rollouts.mask[:, width:].bool(), rollouts.completion_mask)
    for completion, length in zip(rollouts.completions(), rollouts.lengths.tolist(), strict=True):
        assert len(completion) == length
        ends = [t in policy.eos_ids for t in completion]
        assert not any(ends[:-1])
        assert ends[-1] or length == 9


def test_greedy_equals_generate_on_repeated_rows(policy):
    """Reading each prompt once gives what transformers' generate gives on a batch of repeated prompts."""
    prompts, rollouts = sample(policy, greedy=True)
    repeated = [prompts[i] for i in rollouts.rows.tolist()]
    tokens, mask = pad_left(repeated, policy.tokenizer.pad_token_id, policy.device)
    expected = policy.model.generate(
        input_ids=tokens, attention_mask=mask, max_new_tokens=9, do_sample=False,
    )[:, tokens.shape[1] :].tolist()  # fmt: skip
    for found, other in zip(rollouts.completions(), expected, strict=True):
        assert found == other[: len(found)]


def test_a_prompt_is_read_once(policy, monkeypatch):
    rows_read = []
    step = policy.step
    monkeypatch.setattr(policy, "step", lambda t, m, c: rows_read.append(tuple(t.shape)) or step(t, m, c))
    sample(policy)
    assert rows_read[0] == (4, 14)  # the four prompts with a budget, at their full length
    assert all(shape[1] == 1 for shape in rows_read[1:])


def test_logprobs_and_entropy_are_those_of_a_plain_forward_pass(policy):
    """Of each rollout alone, unpadded, at the sampling temperature."""
    prompts, rollouts = sample(policy)
    for j, completion in enumerate(rollouts.completions()):
        tokens = torch.tensor([prompts[rollouts.rows[j]] + completion])
        with torch.no_grad():
            log_p = (policy.model(tokens).logits[0, -len(completion) - 1 : -1] / 0.7).log_softmax(-1)
        n = len(completion)
        torch.testing.assert_close(rollouts.logprobs[j, :n], log_p[torch.arange(n), completion], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(rollouts.entropy[j, :n], -(log_p.exp() * log_p).sum(-1), atol=1e-5, rtol=1e-4)
        assert not rollouts.logprobs[j, n:].any()
    assert float(rollouts.mean_entropy()) == pytest.approx(
        float(rollouts.entropy.sum() / rollouts.lengths.sum()), rel=1e-6
    )


def test_sampling_follows_the_distribution(policy):
    """Frequencies of the first token against the policy's own probabilities at the temperature."""
    prompts = policy.encode(PROMPTS[:1], chat=False)
    count = 20_000
    rollouts = generate(
        policy, prompts, torch.tensor([count]), max_new_tokens=1, temperature=1.5,
        generator=torch.Generator().manual_seed(1), max_rows=count,
    )  # fmt: skip
    with torch.no_grad():
        p = (policy.model(torch.tensor(prompts)).logits[0, -1] / 1.5).softmax(-1)
    found = torch.bincount(rollouts.tokens[:, -1], minlength=len(p)) / count
    assert float((found - p).abs().max()) < 0.015


def test_in_parts_or_at_once(policy):
    _, whole = sample(policy, greedy=True)
    _, parts = sample(policy, greedy=True, max_rows=5)
    assert whole.completions() == parts.completions()
    torch.testing.assert_close(whole.logprobs, parts.logprobs, atol=1e-5, rtol=1e-4)
    assert torch.equal(whole.rows, parts.rows)


def test_restrict():
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4]]))
    kept = restrict(logits, 0.7, 0).isfinite()
    assert kept.tolist() == [[True, True, False, False], [False, False, True, True]]
    assert restrict(logits, 0.8, 3).isfinite().tolist() == [[True, True, False, False], [False, True, True, True]]
    assert restrict(logits, 1.0, 1).isfinite().sum(1).tolist() == [1, 1]
    assert restrict(logits, 1e-9, 0).isfinite().sum(1).tolist() == [1, 1]
    assert torch.equal(restrict(logits, 1.0, 0), logits)


def test_concatenate_pads_prompts(policy):
    _, first = sample(policy)
    prompts = policy.encode(["1="], chat=False)
    generator = torch.Generator().manual_seed(0)
    second = generate(policy, prompts, torch.tensor([2]), max_new_tokens=9, temperature=0.7, generator=generator)
    joined = Rollouts.concatenate([first, second], [5, 1])
    assert joined.rows.tolist() == [*first.rows.tolist(), 5, 5]
    assert joined.completions() == first.completions() + second.completions()
    assert joined.mask.sum(1).tolist() == first.mask.sum(1).tolist() + second.mask.sum(1).tolist()
    assert joined.select(joined.rows == 5).completions() == second.completions()
