"""The keys under coba, what is refused, and whether verl finds the trainer mode: against verl's own configuration."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from coba_core.integrations import verl as integration
from coba_core.integrations.verl import (
    GROUPED_ESTIMATORS,
    BudgetConfig,
    BudgetedPPOTrainer,
    check,
    check_config,
    row_factors,
    session_rows,
)
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, open_dict
from tensordict import TensorDict
from verl.trainer.ppo.core_algos import get_adv_estimator_fn
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import get_tensordict

import coba_core

from .conftest import overrides


def compose_config(folder: Path, **changes: Any) -> DictConfig:
    """verl's configuration as its command would have it."""
    given = [x for x in overrides(folder, **changes) if not x.startswith("hydra.")]
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", given)


def checked(config: DictConfig) -> BudgetConfig:
    budget = BudgetConfig.from_verl(config)
    check_config(config, budget)
    return budget


ALLOCATORS = [
    ({"+coba.allocator": "coba", "+coba.tau": 2, "+coba.kappa": 5, "+coba.lam": 3}, coba_core.CapabilityAllocator),
    ({"+coba.allocator": "knapsack", "+coba.noise": 0.02, "+coba.seed": 3}, coba_core.KnapsackAllocator),
    ({"+coba.allocator": "e3", "+coba.start": 4, "+coba.step": 1}, coba_core.RankAllocator),
    ({"+coba.allocator": "rank", "+coba.refresh_every": 5}, coba_core.RankAllocator),
    ({"+coba.allocator": "uniform"}, coba_core.UniformAllocator),
    ({"+coba.allocator": "fixed", "+coba.alpha": 2, "+coba.beta": 5}, coba_core.CapabilityAllocator),
    ({"+coba.allocator": "coba_released", "+coba.history.window": 1}, coba_core.ReleasedAllocator),
    (
        {"+coba.allocator": "value", "+coba.preference": "{name:power,a:0,b:2}", "+coba.saturation": "mixed_group"},
        coba_core.ValueAllocator,
    ),
]


@pytest.mark.parametrize(("given", "kind"), ALLOCATORS)
def test_allocators_by_name(given: dict[str, Any], kind: type, tmp_path: Path) -> None:
    plain = {"+coba.kappa": None, "+coba.lam": None}
    budget = checked(compose_config(tmp_path, **plain | given))
    allocator = budget.make_allocator(rollouts=4, steps=10, dataset_size=12)
    assert type(allocator) is kind and (allocator.low, allocator.high) == (2, 12)
    assert allocator.allocate([1, 2, 3], 12).sum() == 12
    if "+coba.tau" in given:
        assert isinstance(allocator, coba_core.CapabilityAllocator)
        assert (allocator.saturation.tau, allocator.schedule.kappa) == (2.0, 5.0)  # type: ignore[attr-defined]


def test_defaults_are_the_papers(tmp_path: Path) -> None:
    config = compose_config(tmp_path)
    with open_dict(config):
        del config["coba"]
    budget = checked(config)
    allocator = budget.make_allocator(rollouts=16, steps=10, dataset_size=12)
    assert isinstance(allocator, coba_core.CapabilityAllocator) and (allocator.low, allocator.high) == (2, 128)
    assert (allocator.saturation.tau, allocator.schedule.kappa) == (5.0, 11.0)  # type: ignore[attr-defined]
    assert (budget.prompt_weighting, budget.key, budget.metric) == ("rollout", "index", "reward")
    assert budget.temperature is None and not budget.fresh_history


REFUSED = [
    ({"+coba.low": 1}, "coba.low is 1: a group of fewer than 2"),
    ({"+coba.high": 1}, "coba.high is 1, below coba.low"),
    ({"+coba.high": 3}, "rollout.n is 4, the mean budget, which must lie within"),
    ({"actor_rollout_ref.rollout.n": 1}, "rollout.n is 1, the mean budget"),
    ({"+coba.high": "'many'"}, "coba.high is 'many', not an integer"),
    ({"+coba.prompt_weighting": "token"}, "coba.prompt_weighting is 'token'"),
    ({"+coba.metric": 3}, "coba.metric is 3"),
    ({"+coba.key": 3}, "coba.key is 3"),
    ({"+coba.fresh_history": "'yes'"}, "coba.fresh_history is 'yes'"),
    (
        {"+coba.temperature.measure_steps": None, "+coba.temperature": 1.0},
        "coba.temperature is 1.0: give the arguments",
    ),
    ({"+coba.allocator": "knapsack", "+coba.tau": 3}, "coba.tau is 3, which coba.allocator=knapsack does not take"),
    ({"+coba.tau": 3, "+coba.saturation": "mixed_group"}, "give one of them"),
    ({"algorithm.adv_estimator": "gae"}, "algorithm.adv_estimator is 'gae'"),
    ({"algorithm.adv_estimator": "remax"}, "set one of grpo, grpo_vectorized, rloo"),
    ({"critic.enable": True}, "critic.enable is true"),
    ({"algorithm.filter_groups.enable": True}, "algorithm.filter_groups.enable is true"),
    ({"trainer.v1.sampler.sync_refill_failed_groups": True}, "sync_refill_failed_groups is true"),
    ({"trainer.v1.sampler.custom_sampler.path": "own.py"}, "custom_sampler.path is 'own.py'"),
    ({"skip.rollout_tq.enable": True}, "skip.rollout_tq.enable is true"),
    ({"actor_rollout_ref.actor.ppo_mini_batch_size": 4}, "data.train_batch_size is 6, which"),
    ({"algorithm.rollout_correction.bypass_mode": True}, "bypass_mode is true"),
]


@pytest.mark.parametrize(("given", "text"), REFUSED, ids=lambda x: str(x)[:40])
def test_refused_before_anything_starts(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    """By the trainer itself, in its constructor, which is where verl builds the replay buffer."""
    config = compose_config(tmp_path, **given)
    with pytest.raises(ValueError) as error:
        BudgetedPPOTrainer(config)
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"+coba.kapa": 7}, "unexpected keyword argument 'kapa'"),
        ({"+coba.allocator": "greedy"}, "'greedy' is none of uniform, coba"),
        ({"+coba.history.windows": 2}, "unexpected keyword argument 'windows'"),
        ({"+coba.saturation": "linear"}, "'linear' is none of exponential"),
        ({"+coba.lam": 9}, "alpha_min"),
    ],
)
def test_unknown_arguments_are_named(given: dict[str, Any], text: str, tmp_path: Path) -> None:
    budget = checked(compose_config(tmp_path, **given))
    with pytest.raises(ValueError) as error:
        budget.make_allocator(rollouts=4, steps=10, dataset_size=12)
    assert text in str(error.value) and str(error.value).startswith("+coba.*: ")


@pytest.mark.parametrize("mode", ["coba_colocate_async", "coba_separate_async"])
def test_asynchronous_modes_say_why_not(mode: str, tmp_path: Path) -> None:
    config = compose_config(tmp_path, **{"trainer.v1.trainer_mode": mode})
    with pytest.raises(ValueError, match=rf"{mode}.*Large groups are complete last"):
        get_trainer_cls(mode)(config)


def keys_of(fields: dict[str, list[Any]], key: Any = "index") -> list[Any]:
    """What the trainer takes for the keys of a batch."""
    batch = get_tensordict({name: np.array([*column, None], dtype=object)[:-1] for name, column in fields.items()})
    assert isinstance(batch, TensorDict)
    return BudgetedPPOTrainer._prompt_keys(SimpleNamespace(budget=BudgetConfig(key=key)), batch)


def test_keys_of_prompts() -> None:
    prompts = [[{"role": "user", "content": text}] for text in ("a", "b", "a")]
    assert keys_of({"raw_prompt": prompts, "index": [3, 4, 3]}) == [3, 4, 3]
    fields = {"raw_prompt": prompts, "index": [0, 0, 0], "data_source": ["x", "y", "x"]}
    assert keys_of(fields, ["data_source", "index"]) == ["x/0", "y/0", "x/0"]
    with pytest.raises(ValueError, match=r"prompt 1 of the step has the key 0, as another one has.*\+coba\.key"):
        keys_of(fields)
    with pytest.raises(ValueError, match="the data set's fields are data_source, index, raw_prompt"):
        keys_of(fields, "id")


def trainer_with(allocator: coba_core.Allocator, **settings: Any) -> Any:
    """A trainer with just what its state is made of."""
    trainer = object.__new__(BudgetedPPOTrainer)
    trainer.budget, trainer.allocator, trainer.temperature = BudgetConfig(**settings), allocator, None
    return trainer


def test_state_files(tmp_path: Path) -> None:
    path = tmp_path / "coba.json"
    saved = trainer_with(coba_core.CapabilityAllocator(high=12))
    saved.allocator.update(["a", "b"], [1, 0, 1, 1], [0, 0, 1, 1])
    with pytest.raises(FileNotFoundError, match=r"coba.json is missing: .*\+coba.fresh_history=true"):
        saved._read_state(path)
    trainer_with(coba_core.CapabilityAllocator(), fresh_history=True)._read_state(path)
    saved._write_state(path)
    again = trainer_with(coba_core.CapabilityAllocator(high=12))
    again._read_state(path)
    assert again.allocator.allocate(["a", "b"], 8).tolist() == saved.allocator.allocate(["a", "b"], 8).tolist()
    with pytest.raises(ValueError, match=r"coba.json: state of UniformAllocator: its kind is 'CapabilityAllocator'"):
        trainer_with(coba_core.UniformAllocator())._read_state(path)
    again.temperature = coba_core.EntropyTemperature(64)
    with pytest.raises(ValueError, match=r"coba.json: it was made with coba.temperature and this run has none, or"):
        again._read_state(path)
    path.write_text(path.read_text()[:-20])
    with pytest.raises(ValueError, match=r"coba.json: not whole"):
        saved._read_state(path)


@pytest.mark.parametrize("estimator", GROUPED_ESTIMATORS)
def test_estimators_take_groups_of_any_size(estimator: str) -> None:
    """verl's own functions, on groups of 2, 3 and 5 out of order, against a loop."""
    rows = np.array([0, 2, 1, 2, 0, 1, 2, 1, 2, 2])
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.25, 1.0, 1.0, 0.5, 0.0, 0.0])
    scores = torch.zeros(10, 3)
    scores[:, 2] = torch.tensor(rewards)
    uids = np.array([f"uid{row}" for row in rows], dtype=object)
    function = get_adv_estimator_fn(estimator)
    found, _ = function(token_level_rewards=scores, response_mask=torch.ones(10, 3), index=uids)
    for row in range(3):
        group = rewards[rows == row]
        expected = (group - group.mean()) / (group.std(ddof=1) + 1e-6)
        if estimator.startswith("rloo"):
            expected = [x - (group.sum() - x) / (len(group) - 1) for x in group]
        assert found[rows == row, 0].tolist() == pytest.approx(list(expected), abs=1e-4)


def test_sessions_are_rollouts() -> None:
    uids, last = session_rows(["a_0_1", "b_0_0", "a_0_0", "a_1_0", "b_1_2", "b_1_10"])
    assert (uids, last.tolist()) == (["a", "b", "a", "b"], [0, 1, 3, 5])


def test_weights_of_rows() -> None:
    rows = np.array([2, 0, 0, 1, 1, 1, 1])
    assert row_factors(rows, "rollout").tolist() == [0.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    weights = row_factors(rows, "prompt")
    assert weights[rows == 0].sum() == pytest.approx(7 / 3) == weights[rows == 1].sum() and weights[0] == 0.0


def test_check_finds_the_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    version = importlib.metadata.version("verl")
    assert check() == f"verl {version}: coba_sync is registered through the entry point 'coba'"
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "other")
    with pytest.raises(RuntimeError, match="VERL_USE_EXTERNAL_PLUGINS is 'other', which leaves 'coba' out"):
        check()
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: [])
    with pytest.raises(RuntimeError, match="install coba-core with pip"):
        check()
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", f"verl_cpu_backend,{integration.__name__}")
    assert check().endswith("through VERL_USE_EXTERNAL_MODULES")


@pytest.mark.parametrize("version", ["0.9.0", "0.8.5", "0.10.0", "1.0", "0.10.0.dev1"])
def test_other_versions_of_verl_are_refused(version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda _: version)
    for call in (check, lambda: BudgetedPPOTrainer(compose_config(tmp_path))):
        with pytest.raises(RuntimeError, match=rf"verl is {version}; .*pip install 'verl>=0.9.1,<0.10'"):
            call()


def test_what_a_user_sees_without_the_plugin() -> None:
    """verl names the mode; check() the reason."""
    code = (
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "try:\n    get_trainer_cls('coba_sync')\n"
        "except ValueError as error:\n    print(error)\n"
        "from coba_core.integrations import verl\nverl.check()"
    )
    environment = os.environ | {"VERL_USE_EXTERNAL_PLUGINS": "none"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "Unknown trainer 'coba_sync'. Available trainers: colocate_async, separate_async, sync." in run.stdout
    assert run.returncode == 1 and "leaves 'coba' out: unset it" in run.stderr
