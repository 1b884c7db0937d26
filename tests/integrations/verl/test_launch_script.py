"""The launch script's settings, taken as verl's command takes them: they compose, are accepted, and are the paper's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from coba_core.integrations.verl import BudgetConfig, check_config
from hydra import compose, initialize_config_module
from verl.utils.config import validate_config

SCRIPT = Path(__file__).parents[3] / "integrations" / "examples" / "verl_coba.sh"


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_settings_are_the_papers(tmp_path: Path) -> None:
    # In place of python3, a program that says what it was asked to run; bash does the rest.
    log = tmp_path / "calls"
    python3 = tmp_path / "python3"
    python3.write_text(
        f"#!{sys.executable}\nimport json, sys\nwith open({str(log)!r}, 'a') as log:\n"
        "    log.write(json.dumps(sys.argv[1:]) + '\\n')\n"
    )
    python3.chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRAIN": "a.parquet", "VAL": "b.parquet"}
    for nodes, checked in (("1", "verl.check()"), ("4", "verl.check(cluster=True)")):
        log.unlink(missing_ok=True)
        call = [str(SCRIPT), "+coba.noise=0.02"]
        subprocess.run(call, env=environment | {"NODES": nodes}, check=True, cwd=tmp_path)
        check, launch = (json.loads(line) for line in log.read_text().splitlines())
        assert checked in check[1] and launch[:2] == ["-m", "verl.trainer.main_ppo"]
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", launch[2:])
        budget = BudgetConfig.from_verl(config)
        check_config(config, budget)
        validate_config(config, use_reference_policy=False, use_critic=False)
        rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
        assert (config.data.train_batch_size, rollout.n, budget.low, budget.high) == (256, 16, 2, 128)
        assert (actor.clip_ratio_low, actor.clip_ratio_high, actor.use_kl_loss) == (0.2, 0.28, False)
        assert (actor.optim.lr, rollout.val_kwargs.n, rollout.val_kwargs.top_p) == (1e-6, 16, 0.9)
        assert (config.trainer.nnodes, budget.allocator_args["noise"]) == (int(nodes), 0.02)
        budget.make_allocator(rollout.n, steps=1000, dataset_size=17_000)
