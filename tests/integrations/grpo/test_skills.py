"""Prerequisite skills: the task, and a policy that starts as it should."""

from __future__ import annotations

import numpy as np
import pytest
from coba_core.integrations.grpo import skills
from coba_core.integrations.grpo.config import TrainConfig
from coba_core.integrations.grpo.heldout import evaluate
from coba_core.integrations.grpo.model import load_policy
from coba_core.integrations.grpo.tasks import make_task


def test_problems_are_distinct_apart_and_answered_by_the_maps():
    task = make_task("skills", {"train": 120, "heldout": 60, "mix": {1: 1, 3: 2}})
    assert (len(task.train), len(task.heldout)) == (120, 60)
    assert [sum(p.kind == k for p in task.train) for k in ("level 1", "level 3")] == [40, 80]
    right, wrong = skills.maps()
    assert (right != wrong).all() and all(sorted(row) == list(range(10)) for row in right.tolist())
    for problem in task.train + task.heldout:
        level = int(problem.prompt[7])
        assert problem.answer == "".join(str(right[j, int(problem.prompt[j])]) for j in range(level))
        assert task.score(problem, problem.answer) == 1
        assert task.score(problem, problem.answer + "0") == 0
    assert not {p.prompt[:6] for p in task.train} & {p.prompt[:6] for p in task.heldout}


def test_the_same_problems_for_a_seed_others_for_another():
    first, again, other = (make_task("skills", {"seed": seed}).train for seed in (0, 0, 1))
    assert first == again
    assert len({p.key for p in first} & {p.key for p in other}) < len(first) / 10


@pytest.mark.parametrize("mix", [{7: 1}, {0: 1}, {}, {1: -1, 2: 3}, {1: 0}])
def test_a_mix_of_no_levels_is_refused(mix):
    with pytest.raises(ValueError, match="mix: expected weights of levels from 1 to 6"):
        make_task("skills", {"mix": mix})


@pytest.mark.parametrize("arguments", [{"right": 0.0}, {"right": 0.6, "misled": 0.5}, {"noise": 1}])
def test_bad_arguments_of_the_policy_are_named(arguments):
    with pytest.raises(ValueError, match="policy_args"):
        skills.skills_policy(arguments, progress=False)


def test_the_warmed_up_policy_is_right_as_often_as_it_should_be_and_kept():
    arguments = {"steps": 400, "lr": 6e-3, "batch": 64, "right": 0.5, "misled": 0.3}
    config = TrainConfig(policy="skills", task="skills", policy_args=arguments, eval_samples=32, threads=1)
    folder = skills.skills_policy(arguments, progress=False)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    policy, task = load_policy(config, progress=False), make_task("skills", {"heldout": 120, "mix": {1: 1, 2: 1}})
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    found = evaluate(policy, task, config)
    rates = np.array([found.correct[[p.kind == k for p in found.problems]].mean() / 32 for k in ("level 1", "level 2")])
    expected = skills.pass_rates_at_start(skills.SkillsWarmup(**arguments))[:2]
    assert np.abs(rates - expected).max() < 0.06
