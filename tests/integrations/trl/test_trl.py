"""BudgetedGRPOTrainer in real runs: equal to the stock trainer where budgets are, and to a plain loop where not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from coba_core.integrations.trl import (
    BudgetedGRPOTrainer,
    check_version,
    grouped_advantages,
)
from datasets import Dataset
from small_trl import budgets_of, data, history, plain_advantages, share_of_odd, trainer
from trl import GRPOTrainer

from coba_core import (
    CapabilityAllocator,
    EntropyTemperature,
    KnapsackAllocator,
    RankAllocator,
    UniformAllocator,
)

FOUR = Dataset.from_dict({"prompt": ["1+1=", "2+3=", "3+1=", "0+2="], "name": ["a", "b", "c", "d"]})
"""One step's prompts: from the second step on all have been seen."""


def by_prompt(prompts: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Odd tokens count more for some prompts than for others, so that pass rates and budgets differ."""
    rates = []
    for prompt, ids in zip(prompts, completion_ids, strict=True):
        least = {"1": 1, "2": 2, "3": 4}.get(prompt[0], 6)
        rates.append(float(sum(i % 2 for i in ids) >= least))
    return rates


def uneven(policy: Path, output: Path, **options: Any) -> Any:
    defaults = {"allocator": KnapsackAllocator(high=10), "train_dataset": FOUR, "reward_funcs": by_prompt}
    return trainer(policy, output, **{**defaults, **options})


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_even_budgets_are_the_stock_trainer(policy_folder: Path, tmp_path: Path, scale: str) -> None:
    runs = []
    for kind in ({"made": GRPOTrainer}, {"allocator": "uniform"}):
        runs.append(trainer(policy_folder, tmp_path, scale_rewards=scale, **kind))  # which seeds: one after the other
        runs[-1].train()
    expected, found = (np.array(history(run)) for run in runs)
    assert expected.shape == (3, 4) and np.abs(expected[:, 1]).min() > 1e-3
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    zero = [[x["frac_reward_zero_std"] for x in run.state.log_history if "loss" in x] for run in runs]
    assert zero[0] == zero[1]


def test_even_budgets_are_the_stock_trainer_with_two_objectives(policy_folder: Path, tmp_path: Path) -> None:
    options = {
        "reward_funcs": [share_of_odd, by_prompt], "reward_weights": [0.7, 0.4],
        "multi_objective_aggregation": "normalize_then_sum",
    }  # fmt: skip
    runs = []
    for kind in ({"made": GRPOTrainer}, {"allocator": "uniform"}):
        runs.append(trainer(policy_folder, tmp_path, **kind, **options))
        runs[-1].train()
    np.testing.assert_allclose(history(runs[1]), history(runs[0]), rtol=0, atol=1e-6)


def test_uneven_budgets_have_the_advantages_of_a_plain_loop(policy_folder: Path, tmp_path: Path) -> None:
    run = uneven(policy_folder, tmp_path, max_steps=4)
    run.train()
    assert len(run.steps) == 4 and any(len(set(b)) > 1 for b in budgets_of(run))
    for step in run.steps:
        assert sum(step["budgets"]) == 16
        np.testing.assert_allclose(step["advantages"], plain_advantages(step), atol=1e-6)
        groups = np.split(np.array([str(x) for x in step["prompt_ids"]]), np.cumsum(step["budgets"])[:-1])
        assert all(len(set(group)) == 1 for group in groups) and len({group[0] for group in groups}) == 4
    logged = run.state.log_history[-2]
    assert logged["coba/budget_mean"] == 4.0 and logged["coba/budget_max"] == max(run.steps[-1]["budgets"])
    assert list(run._logs["advantages"]) == pytest.approx(run.steps[-1]["advantages"], abs=1e-6)


def test_budgets_are_those_of_the_allocator_alone(policy_folder: Path, tmp_path: Path) -> None:
    run = uneven(policy_folder, tmp_path, max_steps=4)
    run.train()
    alone = KnapsackAllocator(high=10)
    for step in run.steps:
        budgets = alone.allocate(step["keys"], 16)
        assert budgets.tolist() == step["budgets"]
        alone.update(step["keys"], np.array(step["rewards"])[:, 0], np.repeat(np.arange(4), budgets))


def test_weighting_by_prompt(policy_folder: Path, tmp_path: Path) -> None:
    run = uneven(policy_folder, tmp_path, max_steps=4, prompt_weighting="prompt")
    run.train()
    assert any(len(set(b)) > 1 for b in budgets_of(run))
    for step in run.steps:
        factor = np.repeat(4 / np.array(step["budgets"]), step["budgets"])
        np.testing.assert_allclose(step["advantages"], factor * plain_advantages(step), atol=1e-6)


@pytest.mark.parametrize(
    "loss_type", ["grpo", "dapo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"]
)
def test_loss_types(policy_folder: Path, tmp_path: Path, loss_type: str) -> None:
    run = uneven(policy_folder, tmp_path, max_steps=2, loss_type=loss_type, beta=0.01)
    run.train()
    assert np.isfinite(history(run)).all()


@pytest.mark.parametrize(("steps_per_generation", "num_iterations"), [(2, 1), (2, 2), (4, 2)])
def test_generations_used_for_several_steps(
    policy_folder: Path, tmp_path: Path, steps_per_generation: int, num_iterations: int
) -> None:
    run = uneven(
        policy_folder, tmp_path, max_steps=16, steps_per_generation=steps_per_generation, num_iterations=num_iterations,
        per_device_train_batch_size=16 // steps_per_generation, gradient_accumulation_steps=1,
    )  # fmt: skip
    run.train()
    assert len(run.steps) == 16 // (steps_per_generation * num_iterations)
    assert all(sum(b) == 16 for b in budgets_of(run)) and np.isfinite(history(run, ("loss", "grad_norm"))).all()


def test_rewards_of_none_are_left_out(policy_folder: Path, tmp_path: Path) -> None:
    def sometimes(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
        return [None if ids[0] % 3 == 0 else float(ids[0] % 2) for ids in completion_ids]

    run = uneven(policy_folder, tmp_path, max_steps=4, reward_funcs=sometimes)
    run.train()
    missing = np.isnan(np.concatenate([np.array(s["rewards"])[:, 0] for s in run.steps]))
    assert missing.any() and not missing.all()
    for step in run.steps:
        np.testing.assert_allclose(step["advantages"], plain_advantages(step), atol=1e-6)
    assert sum(run.allocator.history.estimates([0, 1, 2, 3])[1] >= 0) == 4


@pytest.mark.parametrize("key_column", [None, "name"])
def test_iterable_data_set(policy_folder: Path, tmp_path: Path, key_column: str | None) -> None:
    run = uneven(
        policy_folder, tmp_path, max_steps=4, train_dataset=FOUR.to_iterable_dataset(), key_column=key_column
    )
    run.train()
    expected = (0, 1, 2, 3) if key_column is None else tuple("abcd")
    assert {tuple(sorted(step["keys"])) for step in run.steps} == {expected}
    assert any(len(set(b)) > 1 for b in budgets_of(run))


def test_rollout_func_and_unused_columns_removed(policy_folder: Path, tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
        seen.append(prompts)
        ids = trainer.processing_class(prompts)["input_ids"]
        made = [[5 + (j * len(seen)) % 7, 6] for j in range(len(prompts))]
        return {"prompt_ids": ids, "completion_ids": made, "logprobs": [[-1.0, -1.0]] * len(prompts), "extra": made}

    run = uneven(policy_folder, tmp_path, rollout_func=rollouts, remove_unused_columns=True)
    run.train()
    for prompts, step in zip(seen, run.steps, strict=True):
        assert len(prompts) == 16
        assert sorted(prompts.count(x) for x in set(prompts)) == sorted(step["budgets"])


def test_reward_functions_do_not_see_our_column(policy_folder: Path, tmp_path: Path) -> None:
    seen: set[str] = set()

    def names(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        seen.update(columns)
        return [float(ids[0] % 2) for ids in completion_ids]

    uneven(policy_folder, tmp_path, max_steps=1, reward_funcs=names).train()
    assert "name" in seen and not {x for x in seen if x.startswith("_")}


def test_evaluation_is_the_stock_trainers(policy_folder: Path, tmp_path: Path) -> None:
    results = []
    for made in (GRPOTrainer, BudgetedGRPOTrainer):
        run = trainer(policy_folder, tmp_path, made=made, eval_dataset=data(), per_device_eval_batch_size=8)
        torch.manual_seed(5)
        results.append({k: v for k, v in run.evaluate().items() if "reward" in k or "length" in k or k == "eval_loss"})
    assert len(results[0]) > 4 and results[0] == pytest.approx(results[1], nan_ok=True)


def test_lora(policy_folder: Path, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    run = uneven(
        policy_folder, tmp_path, peft_config=peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), beta=0.01
    )
    run.train()
    assert np.isfinite(history(run)).all() and any("lora" in name for name, _ in run.model.named_parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda: KnapsackAllocator(high=10),
        lambda: CapabilityAllocator(high=10, noise=0.05),
        lambda: RankAllocator(high=10),
    ],
    ids=["knapsack", "coba", "e3"],
)
def test_resume_decides_the_same(policy_folder: Path, tmp_path: Path, make: Any) -> None:
    options: dict[str, Any] = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "shuffle_dataset": False}
    whole = uneven(policy_folder, tmp_path, allocator=make(), temperature=EntropyTemperature(17), **options)
    whole.train()
    again = uneven(policy_folder, tmp_path, allocator=make(), temperature=EntropyTemperature(17), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert again.steps == whole.steps[3:] and len(set(map(str, budgets_of(whole)))) > 1
    assert again.allocator.state_dict() == whole.allocator.state_dict()
    assert again.entropy_temperature.state_dict() == whole.entropy_temperature.state_dict()
    np.testing.assert_allclose(history(again)[-3:], history(whole)[3:], atol=1e-6)


def test_resume_from_a_stock_checkpoint(policy_folder: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer(policy_folder, tmp_path, made=GRPOTrainer, train_dataset=FOUR, **options).train()
    checkpoint = str(tmp_path / "checkpoint-1")
    with pytest.raises(ValueError, match="fresh_history=True"):
        uneven(policy_folder, tmp_path, **options).train(resume_from_checkpoint=checkpoint)
    run = uneven(policy_folder, tmp_path, fresh_history=True, **options)
    run.train(resume_from_checkpoint=checkpoint)
    assert len(run.steps) == 1


def test_temperature_follows_the_entropy(policy_folder: Path, tmp_path: Path) -> None:
    control = EntropyTemperature(17, target_entropy=1.0)
    run = uneven(policy_folder, tmp_path, temperature=control, max_steps=4)
    run.train()
    logged = [x for x in run.state.log_history if "loss" in x]
    alone, expected = EntropyTemperature(17, target_entropy=1.0), []
    for line in logged:
        expected.append(alone.temperature)
        alone.update(line["entropy"])
    assert [x["coba/temperature"] for x in logged] == pytest.approx(expected)
    assert expected[-1] < expected[0]  # the entropy is above its target
    assert run.temperature == run.generation_config.temperature == pytest.approx(expected[-1])


def test_success_from_one_function(policy_folder: Path, tmp_path: Path) -> None:
    run = uneven(policy_folder, tmp_path, reward_funcs=[share_of_odd, by_prompt], success_from="by_prompt", max_steps=1)
    run.train()
    step = run.steps[0]
    passed = np.array(step["rewards"])[:, 1].reshape(4, 4).mean(axis=1)
    assert run.allocator.history.estimates(step["keys"])[1] == pytest.approx(passed)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"allocator": "best"}, ValueError, "allocator is 'best'"),
        ({"allocator": "coba", "budget_low": 8, "budget_high": 16}, ValueError, r"num_generations.* is 4, outside"),
        ({"allocator": UniformAllocator(), "budget_low": 2}, ValueError, "budget_low"),
        ({"allocator": UniformAllocator(on_infeasible="clip")}, ValueError, "on_infeasible='clip'"),
        ({"prompt_weighting": "token"}, ValueError, "prompt_weighting is 'token'"),
        ({"key_column": "index"}, ValueError, "key_column is 'index'; the data set's columns are prompt, name"),
        ({"success_from": "judge"}, ValueError, "success_from is 'judge'"),
        ({"temperature": 1.0}, TypeError, "temperature is 1.0"),
        ({"restore_callback_states_from_checkpoint": True}, ValueError, "leave it False"),
    ],
)
def test_refusals(policy_folder: Path, tmp_path: Path, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        uneven(policy_folder, tmp_path, **options)


def test_other_versions_are_refused_by_name() -> None:
    check_version("1.10.0"), check_version("1.14.2"), check_version("1.16.0")
    for version in ("1.9.3", "1.15.0", "1.17.0", "2.0.0"):
        with pytest.raises(ImportError, match=rf"trl is {version}.*>=1.10,<1.17,!=1.15"):
            check_version(version)

    class Changed(GRPOTrainer):
        def _calculate_rewards(self, inputs: Any) -> Any: ...

    with pytest.raises(ImportError, match=r"_calculate_rewards\(self, inputs\) was _calculate_rewards\(self, in"):
        check_version("1.16.0", Changed)


def test_grouped_advantages_by_hand() -> None:
    rewards = torch.tensor([[1.0], [2], [3], [4], [10], [12], [7], [float("nan")]])
    rows = torch.tensor([0, 0, 0, 0, 1, 1, 2, 2])
    found = grouped_advantages(rewards, torch.ones(1), rows, "none", "sum_then_normalize")
    assert found.tolist() == [-1.5, -0.5, 0.5, 1.5, -1, 1, 0, 0]


def launch(policy: Path, output: Path, kind: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).with_name("small_trl.py")
    done = subprocess.run([*command, script, policy, output, kind], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(Path(f"{output}.{rank}").read_text()) for rank in (0, 1)]


def test_two_ranks(policy_folder: Path, tmp_path: Path) -> None:
    stock, even, uneven_run = (launch(policy_folder, tmp_path / k, k) for k in ("stock", "even", "uneven"))
    assert len(stock[0]["history"]) == 4
    np.testing.assert_allclose(even[0]["history"], stock[0]["history"], rtol=0, atol=1e-6)
    first, second = (run["steps"] for run in uneven_run)
    assert any(len(set(step["budgets"])) > 1 for step in first)
    for a, b in zip(first, second, strict=True):
        assert (a["budgets"], a["keys"], a["rewards"]) == (b["budgets"], b["keys"], b["rewards"])
        assert len(a["advantages"]) == len(b["advantages"]) == 8
        np.testing.assert_allclose(a["advantages"] + b["advantages"], plain_advantages(a), atol=1e-6)
