"""A small policy, data and runs of TRL, for the tests and for the ranks that they start.

As a program: ``python small_trl.py <folder of policy> <output.json> <stock|even|uneven>`` under torchrun.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from coba_core.integrations.grpo.arithmetic import VOCABULARY
from coba_core.integrations.grpo.embedded import build_tokenizer
from coba_core.integrations.trl import BudgetedGRPOTrainer
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from coba_core import KnapsackAllocator, group_advantages

PROMPTS = [f"{a}+{b}=" for a in range(4) for b in range(4)]


def save_policy(folder: str | Path) -> None:
    torch.manual_seed(0)
    pad, eos = VOCABULARY.index("<pad>"), VOCABULARY.index("<eos>")
    config = transformers.Qwen2Config(
        vocab_size=len(VOCABULARY), hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=pad, eos_token_id=eos,
        bos_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def share_of_odd(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """A reward that random weights get some of: the share of tokens with an odd number."""
    return [sum(i % 2 for i in ids) / max(len(ids), 1) for ids in completion_ids]


def data() -> Dataset:
    return Dataset.from_dict({"prompt": PROMPTS, "name": [f"sum {x}" for x in PROMPTS]})


def config(output: str | Path, **changes: Any) -> GRPOConfig:
    options: dict[str, Any] = {
        "output_dir": str(output), "per_device_train_batch_size": 16, "num_generations": 4, "max_completion_length": 6,
        "max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "report_to": "none", "use_cpu": True, "seed": 3,
        "save_strategy": "no", "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
    }  # fmt: skip
    return GRPOConfig(**{**options, **changes})


def trainer(policy: str | Path, output: str | Path, *, made: type[GRPOTrainer] | None = None, **options: Any) -> Any:
    """A trainer (Recorded unless `made`) on the small policy; what is no option of it goes to GRPOConfig."""
    ours = ("allocator", "budget_low", "budget_high", "prompt_weighting", "key_column", "success_from", "temperature",
            "fresh_history", "reward_funcs", "train_dataset", "eval_dataset", "peft_config", "rollout_func",
            "callbacks")  # fmt: skip
    own = {name: options.pop(name) for name in ours if name in options}
    own = {"reward_funcs": share_of_odd, "train_dataset": data(), **own}
    model = transformers.AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(policy)
    made = Recorded if made is None else made
    return made(model=model, args=config(output, **options), processing_class=tokenizer, **own)


class Recorded(BudgetedGRPOTrainer):
    """Keeps what every step decided and what came out."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.steps: list[dict[str, Any]] = []

    def _decide(self, inputs: Any) -> Any:
        decision = super()._decide(inputs)
        self.steps.append({"keys": decision["keys"], "budgets": decision["budgets"].tolist()})
        return decision

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.steps[-1] |= {
                "rewards": self._scored.tolist(),
                "advantages": output["advantages"].tolist(),
                "prompt_ids": output["prompt_ids"].tolist(),
            }
        return output


def budgets_of(run: Any) -> list[list[int]]:
    return [step["budgets"] for step in run.steps]


def history(run: Any, names: tuple[str, ...] = ("loss", "grad_norm", "reward", "reward_std")) -> list[list[float]]:
    return [[x[name] for name in names] for x in run.state.log_history if "loss" in x]


def plain_advantages(step: dict[str, Any]) -> np.ndarray:
    """Advantages of all rows of a step, by coba_core's own function."""
    rows = np.repeat(np.arange(len(step["budgets"])), step["budgets"])
    return np.asarray(group_advantages(np.array(step["rewards"])[:, 0], rows))


def main() -> None:
    policy, output, kind = sys.argv[1:]
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", 0))
    options: dict[str, Any] = {"per_device_train_batch_size": 8, "max_steps": 4, "ddp_backend": "gloo"}
    options["train_dataset"] = data().select(range(4))  # one step's prompts
    if kind == "stock":
        run = trainer(policy, output + ".run", made=GRPOTrainer, **options)
    else:
        allocator = "uniform" if kind == "even" else KnapsackAllocator(high=8)
        run = trainer(policy, output + ".run", allocator=allocator, **options)
    run.train()
    found = {"history": history(run), "steps": getattr(run, "steps", [])}
    Path(f"{output}.{rank}").write_text(json.dumps(found))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        # At once: DDP's reducer frees a gloo group with the GIL held, which may then wait for ever for a thread that
        # waits for the GIL (seen with torch 2.13).
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
