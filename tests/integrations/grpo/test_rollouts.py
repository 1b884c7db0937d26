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


def test_a_stop_token_ends_a_completion(policy):
    from coba_core.integrations.grpo import TrainConfig
    from coba_core.integrations.grpo.model import Policy

    stopping = Policy(policy.model, policy.tokenizer, TrainConfig(stop="0"))
    _, rollouts = sample(stopping)
    zero = policy.tokenizer("0")["input_ids"][0]
    found = rollouts.completions()
    assert any(completion[-1] == zero for completion in found)
    assert not any(zero in completion[:-1] for completion in found)
    with pytest.raises(ValueError, match="stop: '00' is 2 tokens"):
        Policy(policy.model, policy.tokenizer, TrainConfig(stop="00"))


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


@pytest.mark.parametrize("architecture", ["GPT2", "Llama", "Mistral"])
def test_any_causal_lm(tmp_path, architecture):
    """Absolute positions, rotary positions, sliding windows: loaded by path, sampled, and scored as sampled."""
    import transformers
    from coba_core.integrations.grpo import TrainConfig
    from coba_core.integrations.grpo.embedded import build_tokenizer
    from coba_core.integrations.grpo.loss import completion_logprobs
    from coba_core.integrations.grpo.model import load_policy

    common = {"vocab_size": 17, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
    wide = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {
        "GPT2": lambda: transformers.GPT2Config(n_positions=64, n_embd=32, n_layer=2, n_head=4, **common),
        "Llama": lambda: transformers.LlamaConfig(num_key_value_heads=2, **wide, **common),
        "Mistral": lambda: transformers.MistralConfig(num_key_value_heads=2, sliding_window=6, **wide, **common),
    }[architecture]()
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    build_tokenizer().save_pretrained(tmp_path)
    policy = load_policy(TrainConfig(policy=str(tmp_path)), progress=False)
    prompts, rollouts = sample(policy)
    index = torch.arange(len(rollouts.rows))
    with torch.no_grad():
        again, _ = completion_logprobs(policy, rollouts, index, 0.7)
    torch.testing.assert_close(again, rollouts.logprobs, atol=1e-4, rtol=1e-3)
    for j, completion in enumerate(rollouts.completions()):
        tokens = torch.tensor([prompts[rollouts.rows[j]] + completion])
        with torch.no_grad():
            log_p = (policy.model(tokens).logits[0, -len(completion) - 1 : -1] / 0.7).log_softmax(-1)
        expected = log_p[torch.arange(len(completion)), completion]
        torch.testing.assert_close(rollouts.logprobs[j, : len(completion)], expected, atol=1e-4, rtol=1e-3)
