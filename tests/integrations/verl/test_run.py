"""verl's own command, killed and resumed: budgets, advantages, update, checkpoint, temperature, failed rollouts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
import transfer_queue as tq
from coba_core.integrations.verl import BudgetedPPOTrainer, check, session_rows
from verl.trainer.main_ppo import TaskRunnerV1
from verl.trainer.ppo.v1 import register_trainer
from verl_cpu_backend import FAILS, SERVER

import coba_core

from .conftest import BATCH, ENVIRONMENT, KILL_AT, ROLLOUTS, SAVE_AT, STEPS, arrived, overrides


@dataclasses.dataclass
class Step:
    """What a step planned, and what verl hands to the actor's update."""

    prompts: list[str]
    budgets: list[int]
    rows: np.ndarray
    rewards: np.ndarray
    advantages: list[torch.Tensor]
    masks: list[torch.Tensor]
    padding: list[torch.Tensor]
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)


STEPS_TAKEN: dict[int, Step] = {}


@register_trainer("coba_sync_recorded")
class Recorded(BudgetedPPOTrainer):  # type: ignore[misc]
    """The trainer as it is; besides, each step is kept before its update."""

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        fields = ["rm_scores", "advantages", "response_mask"]
        data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding")]
        uids, _ = session_rows([batch.keys[i] for i in real])
        advantages, masks = list(data["advantages"].unbind()), list(data["response_mask"].unbind())
        scores = list(data["rm_scores"].unbind())
        step = STEPS_TAKEN[self.global_steps] = Step(
            [self.tokenizer.decode([10 + (key - 1000) // 7, (key - 1000) % 7]) for key in self._keys],
            self._planned.tolist(),
            np.array([self._position[uid] for uid in uids]),
            np.array([float(scores[i].sum()) for i in real]),
            [advantages[i] for i in real],
            [masks[i] for i in real],
            [masks[i] for i in range(len(batch)) if i not in real],
        )
        batch = super()._update_actor(batch, metrics)
        step.metrics = {name: float(value) for name, value in metrics.items() if np.isscalar(value)}
        return batch


@pytest.fixture(scope="module")
def resumed(killed: Path) -> Iterator[dict[str, Any]]:
    """The killed run, gone on with from its checkpoint in this process, to look into it."""
    before = {step: arrived(killed, step) for step in range(1, KILL_AT + 1)}
    ray.init(
        num_cpus=8, num_gpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": ENVIRONMENT}
    )
    try:
        from hydra import compose, initialize_config_module

        with initialize_config_module("verl.trainer.config", version_base=None):
            given = [x for x in overrides(killed) if not x.startswith("hydra.")]
            config = compose("ppo_trainer", [*given, "trainer.v1.trainer_mode=coba_sync_recorded"])
        runner = TaskRunnerV1.__ray_metadata__.modified_class()  # in this process, not in a worker
        runner.run(config)
        server = ray.get_actor(SERVER)
        yield {
            "before": before,
            "after": {step: arrived(killed, step) for step in range(SAVE_AT + 1, STEPS + 1)},
            "temperatures": ray.get(server.seen_temperatures.remote()),
            "folder": killed,
        }
    finally:
        ray.shutdown()


def test_planned_budgets_arrive(resumed: dict[str, Any]) -> None:
    uneven = 0
    for number in range(SAVE_AT + 1, STEPS):
        step = STEPS_TAKEN[number]
        assert sum(step.budgets) == BATCH * ROLLOUTS
        assert np.bincount(step.rows).tolist() == step.budgets
        assert resumed["after"][number] == dict(zip(step.prompts, step.budgets, strict=True))
        assert step.metrics["coba/missing_rollouts"] == 0.0 and not step.padding
        uneven += len(set(step.budgets)) > 2
    assert uneven  # else this would show nothing


def test_killed_and_resumed_plans_what_was_planned(resumed: dict[str, Any]) -> None:
    """Steps after the checkpoint are those that the killed run took: prompts, budgets, and so rewards and state."""
    for step in range(SAVE_AT + 1, KILL_AT + 1):
        assert resumed["after"][step] == resumed["before"][step]
    assert max(resumed["before"][KILL_AT].values()) > ROLLOUTS


def test_advantages(resumed: dict[str, Any]) -> None:
    """By group, divided by the group's deviation, every prompt of the same weight; 0 alone; the same at every token."""
    for step in STEPS_TAKEN.values():
        expected = np.zeros(len(step.rewards))
        for prompt in range(BATCH):
            group = step.rewards[step.rows == prompt]
            if len(group) > 1:
                weight = len(step.rows) / (BATCH * len(group))
                expected[step.rows == prompt] = weight * (group - group.mean()) / (group.std(ddof=1) + 1e-6)
        weights = len(step.rows) * coba_core.prompt_weights(step.rows)
        ours = weights * coba_core.group_advantages(step.rewards, step.rows)
        for values, mask, by_loop, by_core in zip(step.advantages, step.masks, expected, ours, strict=True):
            assert values.tolist() == pytest.approx((by_loop * mask).tolist(), abs=2e-5)
            assert by_loop == pytest.approx(by_core, rel=1e-3, abs=1e-3)  # 1e-4 is added to the deviation, not 1e-6
        assert np.abs(expected).max() > 0.5


def test_fsdp2_update_changes_the_weights(resumed: dict[str, Any]) -> None:
    folder: Path = resumed["folder"] / "checkpoints"
    name = "actor/model_world_size_1_rank_0.pt"
    early, late = (torch.load(folder / f"global_step_{step}" / name, weights_only=False) for step in (SAVE_AT, STEPS))
    assert early.keys() == late.keys()
    moved = [float((late[key].to_local() - early[key].to_local()).abs().max()) for key in early]
    assert max(moved) > 1e-3 and all(np.isfinite(moved))  # three steps of two updates at a rate of 1e-3
    assert all(step.metrics["actor/grad_norm"] > 0.0 for step in STEPS_TAKEN.values())


def test_failed_rollouts(resumed: dict[str, Any]) -> None:
    """A prompt of which one rollout is left has no advantage; rows are filled up with masked ones; metrics say it."""
    step = STEPS_TAKEN[FAILS[0] + 1]
    place = step.prompts.index(f"w{FAILS[1]} w{FAILS[2]}")
    missing = step.budgets[place] - 1
    assert missing > 0 and np.sum(step.rows == place) == 1
    assert step.metrics["coba/missing_rollouts"] == missing
    alone = int(np.flatnonzero(step.rows == place)[0])
    assert not step.advantages[alone].any() and step.rewards[alone] != 0.0
    assert (len(step.rows) + len(step.padding)) % (BATCH // 2 * ROLLOUTS) == 0
    assert step.padding and not any(mask.any() for mask in step.padding)


def test_temperature_is_that_of_rollouts_and_rule(resumed: dict[str, Any]) -> None:
    rule = coba_core.EntropyTemperature(64)
    state = json.loads((resumed["folder"] / f"checkpoints/global_step_{SAVE_AT}/coba.json").read_text())["state"]
    rule.load_state_dict(state["temperature"])
    assert rule.temperature != 1.0
    for number in range(SAVE_AT + 1, STEPS + 1):
        metrics = STEPS_TAKEN[number].metrics
        assert metrics["coba/temperature"] == rule.temperature
        assert resumed["temperatures"][number - 1] == {rule.temperature}
        assert metrics["coba/entropy"] == pytest.approx(metrics["actor/entropy"], rel=1e-2)
        rule.update(metrics["coba/entropy"])


def test_state_and_metrics(resumed: dict[str, Any]) -> None:
    last = STEPS_TAKEN[STEPS].metrics
    state = json.loads((resumed["folder"] / f"checkpoints/global_step_{STEPS}/coba.json").read_text())["state"]
    assert sorted(state["allocator"]["history"]["keys"]) == list(range(1000, 1012))
    allocator = coba_core.CapabilityAllocator(schedule=coba_core.CapabilitySchedule(kappa=5.0, lam=3.0), high=12)
    allocator.load_state_dict(state["allocator"])
    assert allocator.allocate(list(range(1000, 1006)), 24).sum() == 24
    assert {"coba/alpha", "coba/beta", "coba/budget_max", "coba/failure_rate", "coba/mixed_groups"} <= set(last)
    # Success is judged by acc, 0 or 1; the scores are lower by a bit for length and most are below the threshold.
    rates = allocator.history.estimates(list(range(1000, 1012)))[1]
    assert rates[[0, 7]].tolist() == [0.0, 0.0] and rates[6] == 1.0


def test_check_on_every_node(resumed: dict[str, Any]) -> None:
    (node,) = [node for node in ray.nodes() if node["Alive"]]
    assert check(cluster=True) == f"{node['NodeManagerAddress']}: {check()}"
