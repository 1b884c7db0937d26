"""Real runs of a few steps: every allocator, exact resume, refills, interruption, evaluation, files left behind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from coba_core.integrations.grpo.config import ALLOCATORS
from coba_core.integrations.grpo.embedded import Warmup, embedded_policy, warm_up
from coba_core.integrations.grpo.loop import Trainer
from coba_core.integrations.grpo.run import resumed_config, train

from coba_core import PassRateHistory


def lines(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


def weights(config):
    last = sorted((Path(config.output) / "checkpoints").glob("step-*"))[-1]
    return safetensors.torch.load_file(next((last / "model").glob("*.safetensors")))


@pytest.mark.parametrize("name", ALLOCATORS)
def test_every_allocator_trains(small, name):
    arguments = {
        "fixed": {"alpha": 2.0, "beta": 5.0},
        "value": {"preference": {"name": "power", "a": 0, "b": 2}, "saturation": "mixed_group"},
        "coba": {"kappa": 7, "lam": 5, "saturation": {"name": "exponential", "tau": 3}, "noise": 0.01},
        "linear": {"history": {"window": 2}},
    }.get(name, {})
    config = small.replace(allocator=name, allocator_args=arguments, steps=4, eval_every=0)
    summary = train(config, progress=False)
    assert (summary["finished"], summary["steps"], summary["rollouts"]) == (True, 4, 4 * 48)
    steps = [s for s in lines(Path(config.output) / "metrics.jsonl") if s["step"]]
    assert [s["step"] for s in steps] == [1, 2, 3, 4]
    assert any(s["updates"] for s in steps)
    for record in lines(Path(config.output) / "allocations.jsonl"):
        assert sum(record["budgets"]) == 48
        assert 2 <= min(record["budgets"]) <= 6 <= max(record["budgets"]) <= 9
    if name != "uniform":
        last = lines(Path(config.output) / "allocations.jsonl")[-1]
        assert len(set(last["budgets"])) > 1
    assert ("alpha" in steps[-1]) == (name not in ("uniform", "knapsack", "rank", "value"))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"allocator": "coba", "minibatches": 2, "passes": 2, "entropy_temperature": {}, "lr_schedule": "cosine",
         "allocator_args": {"noise": 0.05}, "kl_coef": 0.01, "weighting": "prompt"},
        {"lora": {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}, "allocator": "rank"},
    ],
    ids=["plain", "everything", "lora"],
)  # fmt: skip
def test_resume_is_exact(small, tmp_path, settings, capsys):
    """Six steps, and three, a fresh start from the files, and three more: the same weights to the last bit."""
    at_once = small.replace(**settings)
    train(at_once, progress=False)
    first = at_once.replace(output=str(tmp_path / "parts"), stop_after=3)
    summary = train(first, progress=False)
    assert (summary["finished"], summary["steps"]) == (False, 3)
    assert f"go on with: coba-core train --resume {first.output}" in capsys.readouterr().err
    with (tmp_path / "parts" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward": 1}\n{"step": 5, "rew')  # as after a crash
    second = resumed_config(first.output, ["stop_after=0"])
    assert train(second, resume=True, progress=False)["finished"]
    expected, found = weights(at_once), weights(second)
    assert expected.keys() == found.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensor, found[name]), name
    assert any(not torch.equal(tensor, weights(first)[name]) for name, tensor in found.items()) is False

    def without_times(path):
        return [{k: v for k, v in s.items() if "seconds" not in k} for s in lines(path)]

    for name in ("metrics.jsonl", "allocations.jsonl"):
        assert without_times(Path(at_once.output) / name) == without_times(Path(second.output) / name)


def test_training_learns(small):
    """Sixty passes over 24 prompts more than double their pass rate."""
    changes = {"steps": 60, "lr": 2e-3, "prompts_per_step": 24, "rollouts_per_prompt": 8, "allocator": "uniform"}
    trainer = Trainer(small.replace(**changes), progress=False)
    rates = [trainer.step()[1]["pass_rate"] for _ in range(60)]
    assert trainer.finished
    assert np.mean(rates[-5:]) > 2 * np.mean(rates[:5]) > 0.1


def test_a_step_without_gradient_leaves_the_weights(small):
    """Six-digit problems that the small policy never solves: no group is mixed, nothing is updated."""
    trainer = Trainer(small.replace(task_args={"train": 20, "heldout": 0, "mix": {"-6": 1}}), progress=False)
    before = [p.clone() for p in trainer.parameters]
    _, metrics = trainer.step()
    assert (metrics["mixed_groups"], metrics["rows"], metrics["updates"], metrics["loss"]) == (0, 0, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.parameters, strict=True))


def test_refills_replace_groups_without_spread_and_are_counted(small):
    trainer = Trainer(small.replace(filter_zero_spread=True, steps=12, max_refills=2), progress=False)
    rounds = []
    while not trainer.finished:
        before = trainer.rollouts
        batch, metrics = trainer.step()
        assert trainer.rollouts - before == int(batch.budgets.sum()) == len(batch.rewards)
        assert len(batch.problems) <= 24
        mixed = batch.spread()[batch.rollouts.rows]
        assert metrics["rows"] == int(mixed.sum())
        rounds.append(metrics["rounds"])
    assert max(rounds) > 1
    assert len(rounds) < 12  # the same rollouts, fewer steps
    assert trainer.total_rollouts - trainer.rollouts < 6


def test_spread_and_length_bias(small):
    """Only right answers to the easiest quarter of the step's prompts lose μl/(1+μl)."""
    trainer = Trainer(small.replace(length_bias=0.1, length_bias_share=0.25), progress=False)
    batch, _ = trainer.collect()
    rng = np.random.default_rng(0)
    batch.pass_rates = torch.from_numpy(rng.permutation(8) / 8)
    batch.rewards = torch.from_numpy(rng.integers(0, 2, 48).astype(float))
    biased = trainer.biased_rewards(batch)
    easy = np.argsort(-batch.pass_rates.numpy())[:2]
    for j, (row, length) in enumerate(zip(batch.rollouts.rows.tolist(), batch.rollouts.lengths.tolist(), strict=True)):
        cut = 0.1 * length / (1 + 0.1 * length) if row in easy and batch.rewards[j] == 1 else 0.0
        assert float(biased[j]) == pytest.approx(float(batch.rewards[j]) - cut)
    for i, spread in enumerate(batch.spread().tolist()):
        mine = batch.rewards[batch.rollouts.rows == i]
        assert spread == bool(mine.min() < mine.max())


def test_temperature_follows_entropy_and_is_logged(small):
    config = small.replace(entropy_temperature={"target_entropy": 5.0, "high": 1.3}, eval_every=0)
    train(config, progress=False)
    steps = [s for s in lines(Path(config.output) / "metrics.jsonl") if s["step"]]
    temperatures = [s["temperature"] for s in steps]
    assert temperatures[0] == 1.0
    assert temperatures == sorted(temperatures)  # no distribution over 17 tokens has an entropy of 5
    assert temperatures[-1] == 1.3


def test_evaluation_and_files(small):
    config = small.replace(checkpoint_every=2, keep_checkpoints=2, tensorboard=True)
    train(config, progress=False)
    folder = Path(config.output)
    scored = {s["step"]: s for s in lines(folder / "metrics.jsonl") if "eval/avg@4" in s}
    assert set(scored) == {0, 3, 6}
    records = lines(folder / "evaluations" / "step-000006.jsonl")
    assert len(records) == 12
    average = sum(r["correct"] for r in records) / sum(r["samples"] for r in records)
    assert scored[6]["eval/avg@4"] == pytest.approx(average) == scored[6]["eval/pass@1"]
    assert scored[6]["eval/pass@1"] <= scored[6]["eval/pass@2"] <= scored[6]["eval/pass@4"]
    assert [p.name for p in sorted((folder / "checkpoints").iterdir())] == ["step-000004", "step-000006"]
    assert any((folder / "tensorboard").iterdir())
    assert json.loads((folder / "summary.json").read_text())["rollouts"] == 6 * 48


def test_output_is_not_overwritten_by_accident(small, tmp_path):
    config = small.replace(steps=1, eval_every=0)
    train(config, progress=False)
    with pytest.raises(ValueError, match="is not empty"):
        train(config, progress=False)
    assert train(config, overwrite=True, progress=False)["finished"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("x")
    with pytest.raises(ValueError, match="was not written by a run"):
        train(config.replace(output=str(other)), overwrite=True, progress=False)
    assert (other / "chapter.txt").exists()


def test_a_damaged_checkpoint_is_named(small):
    config = small.replace(steps=2, stop_after=1, eval_every=0)
    train(config, progress=False)
    again = resumed_config(config.output, ["stop_after=0"])
    last = Path(config.output) / "checkpoints" / "step-000001"
    for name in ("training.pt", "allocator.json", "progress.json"):
        whole = (last / name).read_bytes()
        (last / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ValueError, match=name):
            train(again, resume=True, progress=False)
        (last / name).write_bytes(whole)
    assert train(again, resume=True, progress=False)["finished"]


def test_only_some_settings_may_change_on_resume(small, tmp_path):
    with pytest.raises(ValueError, match="no config"):
        resumed_config(tmp_path / "nowhere", [])
    config = small.replace(steps=2, stop_after=1, eval_every=0)
    train(config, progress=False)
    with pytest.raises(ValueError, match="lr: cannot change"):
        resumed_config(config.output, ["lr=1"])
    assert resumed_config(config.output, ["steps=5"]).steps == 5


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"allocator": "fixed"}, "allocator_args"),
        ({"allocator_args": {"kapa": 3}}, "allocator_args"),
        ({"allocator_args": {"history": {"windows": 3}}}, "allocator_args.*windows"),
        ({"allocator": "value", "allocator_args": {"saturation": "sudden"}}, "saturation"),
        ({"entropy_temperature": {"hot": 1}}, "entropy_temperature"),
        ({"max_prompt_tokens": 5}, "max_prompt_tokens"),
        ({"device": "cuda:99"}, "device"),
    ],
)
def test_wrong_settings_are_named(small, changes, match):
    with pytest.raises(ValueError, match=match):
        Trainer(small.replace(**changes), progress=False)


def test_the_warm_up_is_repeatable_and_cached(cache_folder, monkeypatch):
    warmup = Warmup(steps=4, hidden=32, layers=1, batch=16)
    first, second = warm_up(warmup, progress=False), warm_up(warmup, progress=False)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    folder = embedded_policy(dataclasses.asdict(warmup), progress=False)
    assert folder.parent == Path(cache_folder) / "coba_core"
    monkeypatch.setattr("coba_core.integrations.grpo.embedded.warm_up", None)  # the cache answers
    assert embedded_policy(dataclasses.asdict(warmup), progress=False) == folder
    assert not list(folder.parent.glob(".embedded-*"))
    with pytest.raises(ValueError, match="policy_args"):
        embedded_policy({"step": 4})


def test_the_embedded_policy_is_small():
    from coba_core.integrations.grpo.embedded import build_model, build_tokenizer

    assert sum(p.numel() for p in build_model(Warmup()).parameters()) < 1_000_000
    tokenizer = build_tokenizer()
    ids = tokenizer("750000+860000=")["input_ids"]
    assert len(ids) == 14
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == "750000+860000="


def test_history_of_the_loop_is_the_allocators(small):
    """What the loop calls the estimate is what the allocator decided on."""
    trainer = Trainer(small, progress=False)
    trainer.step()
    assert isinstance(trainer.allocator.history, PassRateHistory)
    batch, _ = trainer.collect()
    assert batch.pass_rates.shape == (8,)
    assert len(trainer.allocator.history) == 16
