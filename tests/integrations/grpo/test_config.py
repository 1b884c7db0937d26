"""The configuration: what YAML and the command line say, and errors that name the field."""

from __future__ import annotations

import pytest
from coba_core.integrations.grpo.config import TrainConfig, dump_config, load_config


def test_yaml_and_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("lr: 3e-4\nsteps: 7\nallocator: value\nallocator_args:\n  preference: {name: power, a: 0, b: 2}\n")
    config = load_config(path).override(["allocator_args.preference.b=3", "top-p=1", "kl_coef=1e-3", "lora={r: 4}"])
    assert (config.lr, config.steps, config.top_p, config.kl_coef) == (3e-4, 7, 1.0, 1e-3)
    assert config.allocator_args == {"preference": {"name": "power", "a": 0, "b": 3}}
    assert config.lora == {"r": 4}
    path.write_text(dump_config(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    "assignment",
    [
        "steps=0", "steps=1.5", "steps=many", "lr=0", "lr=.nan", "top_p=1.5", "allocator=greedy", "task=chess",
        "budget_low=9", "budget_high=7", "weighting=row", "clip_low=2", "temperature=-1", "lora=3", "autocast=1",
        "task_args=[1]", "output=", "max_refills=-1", "nothing=1",
    ],
)  # fmt: skip
def test_an_error_names_the_field(assignment):
    name = assignment.partition("=")[0]
    named = "rollouts_per_prompt|budget" if name.startswith("budget") else name
    with pytest.raises(ValueError, match=named):
        TrainConfig().override([assignment])


@pytest.mark.parametrize("content", ["- 1\n- 2\n", "steps: [1, 2\n", "stepz: 3\n", "steps: 0\n", "1: 2\n"])
def test_an_error_names_the_file(tmp_path, content):
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"wrong\.yaml"):
        load_config(path)


def test_yaml_cannot_run_code(tmp_path):
    path = tmp_path / "evil.yaml"
    path.write_text("output: !!python/object/apply:os.getcwd []\n")
    with pytest.raises(ValueError, match="not valid YAML"):
        load_config(path)


def test_the_shipped_configurations_load():
    from pathlib import Path

    import coba_core.integrations.grpo as grpo

    shipped = sorted((Path(grpo.__file__).parent / "configs").glob("*.yaml"))
    assert shipped
    for path in shipped:
        load_config(path)
