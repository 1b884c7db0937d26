"""GRPO with TRL and a budget for each prompt: a toy out of the box, any model and data set by argument.

    python integrations/examples/trl_grpo.py                                  # one minute on a CPU, no download
    python integrations/examples/trl_grpo.py --model Qwen/Qwen2.5-0.5B-Instruct --dataset train.jsonl --steps 200

train.jsonl: one object a line, "prompt" (a string or chat messages) and "answer" (a string that a right completion
holds). Distributed: the same line after ``accelerate launch`` or ``torchrun --nproc-per-node N``.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import transformers
from coba_core.integrations.grpo.arithmetic import VOCABULARY
from coba_core.integrations.grpo.embedded import build_tokenizer
from coba_core.integrations.trl import ALLOCATORS, BudgetedGRPOTrainer
from datasets import Dataset, load_dataset
from trl import GRPOConfig


def holds_answer(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
    """1 if the completion holds the answer, else 0."""
    texts = [x if isinstance(x, str) else x[-1]["content"] for x in completions]
    return [float(right in text) for text, right in zip(texts, answer, strict=True)]


def small_model() -> tuple[Any, Any]:
    """A model of random weights that knows digits, + and =."""
    transformers.set_seed(0)
    pad, eos = VOCABULARY.index("<pad>"), VOCABULARY.index("<eos>")
    config = transformers.Qwen2Config(
        vocab_size=len(VOCABULARY), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=True, pad_token_id=pad, eos_token_id=eos,
        bos_token_id=None,
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config), build_tokenizer()


def small_data() -> Dataset:
    sums = [(a, b) for a in range(4) for b in range(4)]
    return Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in sums], "answer": [str(a + b) for a, b in sums]})


def main(arguments: list[str] | None = None) -> BudgetedGRPOTrainer:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub name; a small one with random weights by default")
    parser.add_argument("--dataset", help="JSON lines with prompt and answer; sums of two digits by default")
    parser.add_argument("--allocator", choices=sorted(ALLOCATORS), default="coba")
    parser.add_argument("--low", type=int, default=2)
    parser.add_argument("--high", type=int, default=24)
    parser.add_argument("--rollouts", type=int, default=8, help="mean number of rollouts a prompt")
    parser.add_argument("--prompts", type=int, default=16, help="prompts a step and process")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--max-completion-length", type=int, default=3)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--use-vllm", action="store_true")
    parser.add_argument("--output", default=None)
    options = parser.parse_args(arguments)

    model, tokenizer = (options.model, None) if options.model else small_model()
    if options.dataset:
        data = load_dataset("json", data_files=options.dataset, split="train")
    else:
        data = small_data()
    config = GRPOConfig(
        output_dir=options.output or tempfile.mkdtemp(), num_generations=options.rollouts, max_steps=options.steps,
        per_device_train_batch_size=options.prompts * options.rollouts, learning_rate=options.lr, logging_steps=5,
        max_completion_length=options.max_completion_length, report_to="none", bf16=False, save_strategy="no",
        use_vllm=options.use_vllm,
    )  # fmt: skip
    trainer = BudgetedGRPOTrainer(
        model=model, reward_funcs=holds_answer, args=config, train_dataset=data, processing_class=tokenizer,
        allocator=options.allocator, budget_low=options.low, budget_high=options.high,
    )  # fmt: skip
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()
