"""verl on the CPU: its configuration, a small policy and data, and one run that is killed, for all tests to share."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl")
pytest.importorskip("ray")

HERE = Path(__file__).parent
ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # the name under which verl registers its FSDP engine
    "VERL_USE_EXTERNAL_MODULES": "verl_cpu_backend",  # not this package, which verl finds by its entry point
    "PYTHONPATH": str(HERE),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
os.environ.update(ENVIRONMENT)  # verl reads them when it is imported, which the tests do at their top
sys.path.insert(0, str(HERE))

STEPS, SAVE_AT, KILL_AT = 6, 3, 5
PROMPTS, BATCH, ROLLOUTS = 12, 6, 4

# What verl, Ray, torch and the data loader warn of, none of which is ours.
IGNORED = (
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore::ResourceWarning",
    "ignore::UserWarning:verl.*",
    "ignore::UserWarning:torch.*",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::coba_core.BudgetWarning",
    "ignore:Disabled critic:UserWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            for ignored in IGNORED:
                item.add_marker(pytest.mark.filterwarnings(ignored))


def make_policy(folder: Path) -> None:
    """A Llama of two layers and a tokenizer of sixty words: w0, w1, ..."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(62)} | {"<eos>": 62, "<pad>": 63}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": 64, "bos_token_id": None, "eos_token_id": 62, "pad_token_id": 63}
    LlamaForCausalLM(LlamaConfig(**sizes, **tokens, max_position_embeddings=256)).save_pretrained(folder)


def make_data(path: Path) -> None:
    """Prompts of two words; the second is how often the server's answer is right, in sixths."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "prompt": [{"role": "user", "content": f"w{10 + i // 7} w{i % 7}"}],
            "data_source": "made_up",
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": 1000 + i},
        }
        for i in range(PROMPTS)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def overrides(folder: Path, **changes: Any) -> list[str]:
    """verl's command line for a run in `folder`; double underscores stand for dots in the names of `changes`."""
    settings: dict[str, Any] = {
        "trainer.v1.trainer_mode": "coba_sync",
        "+coba.allocator": "coba",
        "+coba.high": 12,
        "+coba.kappa": 5,
        "+coba.lam": 3,
        "+coba.prompt_weighting": "prompt",
        "+coba.metric": "acc",
        "+coba.temperature.measure_steps": 1,
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": BATCH,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "data.dataloader_num_workers": 0,
        "data.seed": 1,
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size": BATCH // 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": False,
        "actor_rollout_ref.actor.use_torch_compile": False,
        "actor_rollout_ref.actor.optim.lr": 1e-3,
        "actor_rollout_ref.rollout.name": "made_up",
        "actor_rollout_ref.rollout.n": ROLLOUTS,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": HERE / "verl_cpu_backend.py",
        "reward.custom_reward_function.name": "reward",
        "trainer.device": "cpu",
        "trainer.n_gpus_per_node": 1,
        "trainer.val_before_train": False,
        "trainer.logger": "[console]",
        "trainer.total_epochs": STEPS,
        "trainer.total_training_steps": STEPS,
        "trainer.save_freq": SAVE_AT,
        "trainer.default_local_dir": folder / "checkpoints",
        "trainer.rollout_data_dir": folder / "rollouts",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "ray_kwargs.ray_init.num_cpus": 8,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "hydra.run.dir": folder / "hydra",
    }
    given = {name.replace("__", "."): value for name, value in changes.items()}
    unknown = [name for name in given if name not in settings]
    settings = {name: value for name, value in settings.items() if f"+{name}" not in unknown} | given
    return [f"{name}={value}" for name, value in settings.items() if value is not None]


def arrived(folder: Path, step: int) -> dict[str, int]:
    """How many rollouts of each prompt verl trained on, from the file it leaves for a step."""
    counts: dict[str, int] = {}
    for line in (folder / "rollouts" / f"{step}.jsonl").read_text().splitlines():
        prompt = json.loads(line)["input"]
        counts[prompt] = counts.get(prompt, 0) + 1
    return counts


@pytest.fixture(scope="session")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run by verl's own command that was killed in its fifth step, two steps after its checkpoint."""
    folder = tmp_path_factory.mktemp("verl")
    (folder / "model").mkdir()
    make_policy(folder / "model")
    make_data(folder / "train.parquet")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides(folder)]
    with (folder / "log").open("w") as log:
        run = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            until = folder / "rollouts" / f"{KILL_AT}.jsonl"
            while not until.exists():
                try:
                    status = run.wait(0.2)
                except subprocess.TimeoutExpired:
                    continue
                pytest.fail(f"verl ended with {status} before step {KILL_AT}:\n{(folder / 'log').read_text()[-6000:]}")
        finally:
            os.killpg(run.pid, signal.SIGKILL)
            run.wait()
    yield folder
