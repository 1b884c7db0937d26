"""Tokens a second of the reference loop's two rollout engines, on one untrained model and the same unequal budgets.

    python benches/rollout_engines.py [--prompts 8] [--mean 8] [--prompt-tokens 64] [--new-tokens 32] [--rounds 5]

The model has 5.2 M parameters: on two cores the whole takes a minute or two, most of it the import of vLLM.

Both sample at temperature 1, so lengths are alike. vLLM's time includes the policy's pass for log-probs and entropy;
the time to hand over weights is printed beside it. Needs vLLM. The first round of each is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # threads that wait for each other take minutes where cores are shared
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")

import torch
import transformers
from coba_core.integrations.grpo.config import TrainConfig
from coba_core.integrations.grpo.embedded import build_tokenizer
from coba_core.integrations.grpo.model import load_policy
from coba_core.integrations.grpo.rollouts import generate
from coba_core.integrations.vllm import VLLMRollouts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("prompts", 8), ("mean", 8), ("prompt-tokens", 64), ("new-tokens", 32), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    length = arguments.prompt_tokens + arguments.new_tokens
    config = transformers.Qwen2Config(
        vocab_size=8192, hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=length, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
        build_tokenizer().save_pretrained(folder)
        policy = load_policy(TrainConfig(policy=folder), progress=False)
    prompts = torch.randint(2, 8192, (arguments.prompts, arguments.prompt_tokens)).tolist()
    budgets = torch.full((arguments.prompts,), 2)  # as unequal as CoBA's: a quarter of the prompts takes the rest
    rest = arguments.prompts * (arguments.mean - 2)
    budgets[: arguments.prompts // 4] += rest // (arguments.prompts // 4)
    options = {"max_new_tokens": arguments.new_tokens, "temperature": 1.0}
    generator = torch.Generator().manual_seed(0)
    engine = VLLMRollouts(policy, max_model_len=length, disable_log_stats=False)
    speeds: dict[str, list[float]] = {"generate": [], "vllm": []}
    handing_over = []
    for _ in range(arguments.rounds + 1):
        for name, found in speeds.items():
            start = time.perf_counter()
            if name == "vllm":
                rollouts = engine.generate(prompts, budgets, generator=generator, **options)
            else:
                rollouts = generate(policy, prompts, budgets, generator=generator, **options)
            found.append(int(rollouts.lengths.sum()) / (time.perf_counter() - start))
            print(f"round {len(found) - 1}: {name} {found[-1]:.0f} tokens/s", flush=True)
        start = time.perf_counter()
        engine.synchronise()
        handing_over.append(time.perf_counter() - start)
    parameters = sum(p.numel() for p in policy.model.parameters())
    print(f"{parameters / 1e6:.1f} M parameters, {policy.device}, torch {torch.__version__}, {os.cpu_count()} cores")
    print(f"budgets {budgets.tolist()}, {arguments.prompt_tokens} + up to {arguments.new_tokens} tokens")
    for name, found in speeds.items():
        low, *_, high = sorted(found[1:])
        print(f"{name:9s} {statistics.median(found[1:]):8.0f} tokens/s (from {low:.0f} to {high:.0f})")
    counted = {metric.name: metric.value for metric in engine.metrics() if hasattr(metric, "value")}
    shared = counted["vllm:prefix_cache_hits"] / counted["vllm:prefix_cache_queries"]
    print(f"prompt tokens served by the prefix cache: {100 * shared:.0f} %")
    print(f"weights handed over in {1e3 * statistics.median(handing_over[1:]):.0f} ms")


if __name__ == "__main__":
    main()
