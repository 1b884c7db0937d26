"""The loss: the same for any micro-batches and order of rows, right by hand, nothing where nothing is learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from coba_core.integrations.grpo.loss import LossSettings, backward, completion_logprobs, micro_batches, token_weights
from coba_core.integrations.grpo.rollouts import generate

from coba_core import group_advantages

PROMPTS = ["750000+860000=", "12+7=", "3=", "5+5="]


@pytest.fixture(scope="module")
def rollouts(policy):
    prompts = policy.encode(PROMPTS, chat=False)
    budgets = torch.tensor([5, 2, 9, 1])
    generator = torch.Generator().manual_seed(0)
    return generate(policy, prompts, budgets, max_new_tokens=9, temperature=1.3, generator=generator)


@pytest.fixture(scope="module")
def advantages(rollouts):
    rewards = np.random.default_rng(0).integers(0, 2, len(rollouts.rows)).astype(float)
    found = torch.from_numpy(group_advantages(rewards, rollouts.rows.numpy())).float()
    assert 0 < int((found == 0).sum()) < len(found)
    return found


def gradient(policy, *arguments, **options):
    policy.model.zero_grad()
    parts = backward(policy, *arguments, **options)
    found = [p.grad for p in policy.model.parameters() if p.grad is not None]
    return parts, torch.cat([g.flatten() for g in found]) if found else None


@pytest.mark.parametrize("weighting", ["token", "sequence", "prompt"])
@pytest.mark.parametrize("extra", [{}, {"entropy_coef": 0.1, "kl_coef": 0.2}])
def test_micro_batches_change_nothing(policy, rollouts, advantages, weighting, extra):
    found = []
    for limit in (1, 60, 10**6):
        settings = LossSettings(weighting=weighting, micro_batch_tokens=limit, **extra)
        found.append(gradient(policy, rollouts, advantages, settings, 1.3, reference=policy.model))
    for parts, grad in found[1:]:
        torch.testing.assert_close(grad, found[0][1], atol=1e-6, rtol=1e-4)
        assert parts["loss"] == pytest.approx(found[0][0]["loss"], abs=1e-6)


def test_large_vocabularies_go_piece_by_piece(policy, rollouts, advantages, monkeypatch):
    settings = LossSettings(entropy_coef=0.1)
    whole = gradient(policy, rollouts, advantages, settings, 1.3)
    monkeypatch.setattr("coba_core.integrations.grpo.loss.LOGITS_AT_A_TIME", 500)
    pieces = gradient(policy, rollouts, advantages, settings, 1.3)
    torch.testing.assert_close(pieces[1], whole[1], atol=1e-6, rtol=1e-4)
    assert pieces[0]["loss"] == pytest.approx(whole[0]["loss"], abs=1e-6)


def test_micro_batches_hold_every_row_once_within_the_limit(rollouts):
    chosen = torch.arange(len(rollouts.rows))
    width = rollouts.tokens.shape[1] - rollouts.completion_mask.shape[1]
    for limit in (1, 50, 100, 10**6):
        packs = list(micro_batches(rollouts, chosen, limit))
        assert sorted(i for pack in packs for i in pack.tolist()) == chosen.tolist()
        for pack in packs:
            longest = int(rollouts.mask[pack, :width].sum(1).max()) + int(rollouts.lengths[pack].max())
            assert len(pack) == 1 or len(pack) * longest <= limit


def test_rows_may_come_in_any_order(policy, rollouts, advantages):
    """Groups are by id: shuffled rollouts give the same gradient."""
    order = torch.randperm(len(advantages), generator=torch.Generator().manual_seed(3))
    _, plain = gradient(policy, rollouts, advantages, LossSettings(weighting="prompt"), 1.3)
    rewards = torch.tensor(np.random.default_rng(0).integers(0, 2, len(rollouts.rows)).astype(float))[order]
    shuffled = rollouts.select(order)
    again = group_advantages(rewards, shuffled.rows).float()
    torch.testing.assert_close(again, advantages[order])
    _, other = gradient(policy, shuffled, again, LossSettings(weighting="prompt"), 1.3)
    torch.testing.assert_close(other, plain, atol=1e-6, rtol=1e-4)


def test_weights(rollouts):
    lengths, rows = rollouts.lengths.float(), rollouts.rows
    for weighting in ("token", "sequence", "prompt"):
        w = token_weights(rollouts, weighting)
        assert float(w.sum()) == pytest.approx(1.0, abs=1e-5)
        assert not w[~rollouts.completion_mask].any()
    torch.testing.assert_close(token_weights(rollouts, "token").sum(1), lengths / lengths.sum())
    torch.testing.assert_close(token_weights(rollouts, "sequence").sum(1), torch.full_like(lengths, 1 / len(rows)))
    per_prompt = torch.zeros(4).index_add(0, rows, token_weights(rollouts, "prompt").sum(1))
    torch.testing.assert_close(per_prompt, torch.full((4,), 0.25))


def test_old_logprobs_are_those_of_training(policy, rollouts, advantages):
    """One temperature in sampling and training: the ratio is 1 before the first step, and the loss -Σ w A."""
    with torch.no_grad():
        new, _ = completion_logprobs(policy, rollouts, torch.arange(len(rollouts.rows)), 1.3)
    torch.testing.assert_close(new, rollouts.logprobs, atol=1e-5, rtol=1e-4)
    parts, _ = gradient(policy, rollouts, advantages, LossSettings(), 1.3)
    expected = -(token_weights(rollouts, "token") * advantages[:, None]).sum()
    assert parts["loss"] == pytest.approx(float(expected), abs=1e-5)
    assert parts["log_ratio"] < 1e-5


def test_clipping(policy, rollouts, advantages):
    """Against the formula, written out, with old log-probs that are off by up to 1."""
    shift = torch.rand(rollouts.logprobs.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    old = rollouts.select(torch.arange(len(rollouts.rows)))
    old.logprobs = rollouts.logprobs + shift
    parts, grad = gradient(policy, old, advantages, LossSettings(clip_low=0.2, clip_high=0.28), 1.3)
    policy.model.zero_grad()
    new, _ = completion_logprobs(policy, old, torch.arange(len(old.rows)), 1.3)
    ratio, a, w = (new - old.logprobs).exp(), advantages[:, None], token_weights(old, "token")
    loss = -(w * torch.minimum(ratio * a, ratio.clamp(0.8, 1.28) * a)).sum()
    loss.backward()
    assert parts["loss"] == pytest.approx(loss.item(), abs=1e-5)
    expected = torch.cat([p.grad.flatten() for p in policy.model.parameters()])
    torch.testing.assert_close(grad, expected, atol=1e-6, rtol=1e-3)
    assert 0.05 < parts["clip_fraction"] < 0.9


def test_rows_without_advantage_are_left_out_exactly(policy, rollouts, advantages):
    """Dropping them equals keeping them, which an entropy bonus of almost nothing forces."""
    parts, grad = gradient(policy, rollouts, advantages, LossSettings(), 1.3)
    assert parts["rows"] == float((advantages != 0).sum()) < len(advantages)
    kept, other = gradient(policy, rollouts, advantages, LossSettings(entropy_coef=1e-30), 1.3)
    assert kept["rows"] == len(advantages)
    torch.testing.assert_close(grad, other, atol=1e-6, rtol=1e-4)
    nothing, empty = gradient(policy, rollouts, torch.zeros_like(advantages), LossSettings(), 1.3)
    assert (nothing["rows"], nothing["loss"], empty) == (0.0, 0.0, None)


def test_kl_is_zero_at_the_reference_and_entropy_is_the_mean(policy, rollouts, advantages):
    settings = LossSettings(kl_coef=1.0, entropy_coef=1.0)
    parts, _ = gradient(policy, rollouts, torch.zeros_like(advantages), settings, 1.3, reference=policy.model)
    assert parts["kl"] == pytest.approx(0.0, abs=1e-6)
    assert parts["entropy_bonus"] == pytest.approx(float(rollouts.mean_entropy()), rel=1e-4)
