"""Does the variance of real gradients follow the headroom? ``python studies/gradient_variance.py``

For prompts of each pool of studies/main.yaml, on the policy as it starts: pass rates measured from many rollouts; what
each rule would give; then many independent samples of the policy gradient under these budgets, prompts weighted alike,
with the true pass rate as the baseline and with the mean of the group's others. The variance of even budgets over the
rule's is set beside coba_core.headroom's prediction, which takes all prompts' gradients to have the same norm.

The measured pass rates land in rates-<pool>.json: ``coba-core headroom`` says what there is to win on them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from coba_core.integrations.grpo.config import TrainConfig
from coba_core.integrations.grpo.heldout import evaluate
from coba_core.integrations.grpo.loss import completion_logprobs
from coba_core.integrations.grpo.model import Policy, load_policy
from coba_core.integrations.grpo.report import write_text
from coba_core.integrations.grpo.rollouts import generate
from coba_core.integrations.grpo.study import load_study, machine
from coba_core.integrations.grpo.tasks import Problem, Task, make_task
from tqdm import tqdm

from coba_core.headroom import gradient_variance, headroom, rule_budgets

HERE = Path(__file__).parent
RULES = ("uniform", "neyman", "coba", "knapsack", "mixed_g0", "mixed_g2", "rank")
BASELINES = ("known", "leave_one_out")


def gradient_samples(
    policy: Policy, task: Task, problems: list[Problem], rates: Any, budgets: Any, samples: int, config: TrainConfig,
    bar: tqdm[Any],
) -> dict[str, torch.Tensor]:
    """Policy gradients by baseline, float32 [samples, parameters]; ascent direction, mean over prompts."""
    generator = torch.Generator(policy.device).manual_seed(config.seed)
    prompts = policy.encode([p.prompt for p in problems], chat=False)
    parameters = [p for p in policy.model.parameters() if p.requires_grad]
    size = torch.from_numpy(np.asarray(budgets))
    p = torch.from_numpy(np.asarray(rates))
    found: dict[str, list[torch.Tensor]] = {name: [] for name in BASELINES}
    for _ in range(samples):
        rollouts = generate(
            policy, prompts, size, generator=generator, max_new_tokens=config.max_new_tokens, temperature=1.0
        )
        rows = rollouts.rows
        texts = policy.decode(rollouts.completions())
        reward = torch.tensor([task.score(problems[i], t) for i, t in zip(rows.tolist(), texts, strict=True)]).double()
        total = torch.zeros(len(problems), dtype=torch.float64).index_add_(0, rows, reward)
        others = (total[rows] - reward) / (size[rows] - 1)
        weight = 1.0 / (len(problems) * size[rows])
        policy.model.eval()
        score = completion_logprobs(policy, rollouts, torch.arange(len(rows)), 1.0)[0].sum(1)
        for name, baseline in (("known", p[rows]), ("leave_one_out", others)):
            target = (weight * (reward - baseline)).float() @ score
            gradient = torch.autograd.grad(target, parameters, retain_graph=name == "known")
            found[name].append(torch.cat([g.flatten() for g in gradient]))
        bar.update(1)
    return {name: torch.stack(gradients) for name, gradients in found.items()}


def variance(gradients: torch.Tensor) -> tuple[float, float]:
    """Trace of the covariance, and its standard error from the spread of the samples' squared distances."""
    distance = (gradients - gradients.mean(0)).double().square().sum(1)
    n = len(distance)
    return float(distance.sum() / (n - 1)), float(distance.std() / n**0.5)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--study", type=Path, default=HERE / "main.yaml", help="whose pools to take")
    parser.add_argument("--pools", nargs="+", metavar="POOL", help="only these; give them an --output of their own")
    parser.add_argument("--output", type=Path, default=HERE / "results" / "gradient-variance")
    parser.add_argument("--prompts", type=int, default=32, help="of each pool [%(default)s]")
    parser.add_argument("--mean", type=int, default=8, help="rollouts a prompt [%(default)s]")
    parser.add_argument("--high", type=int, default=64, help="most rollouts of a prompt; the least are 2 [%(default)s]")
    parser.add_argument("--samples", type=int, default=100, help="gradients a rule [%(default)s]")
    parser.add_argument("--rollouts", type=int, default=256, help="a prompt, to measure its pass rate [%(default)s]")
    arguments = parser.parse_args(argv)
    begun = time.perf_counter()
    torch.set_num_threads(1)
    arguments.output.mkdir(parents=True, exist_ok=True)
    study = load_study(arguments.study, arguments.output)
    configs = {cell.pool: cell.config for cell in reversed(study.cells) if cell.method == study.reference}
    if unknown := sorted(set(arguments.pools or ()) - set(configs)):
        parser.error(f"--pools: {unknown[0]!r} is none of {', '.join(sorted(configs))}")
    configs = {pool: config for pool, config in configs.items() if not arguments.pools or pool in arguments.pools}
    found: dict[str, Any] = {}
    lines = ["| pool | headroom | rule | " + " | ".join(f"{b}: measured ± s.e., predicted" for b in BASELINES) + " |"]
    lines.append("|---" * 5 + "|")
    with tqdm(total=len(configs) * len(RULES) * arguments.samples, unit="gradient", mininterval=1) as bar:
        for pool, config in sorted(configs.items()):
            config = config.replace(eval_samples=arguments.rollouts, eval_problems=0, seed=0)
            policy, task = load_policy(config, progress=False), make_task(config.task, config.task_args)
            mirrored = Task(task.heldout, task.train, task.score)
            whole = evaluate(policy, mirrored, config).correct / arguments.rollouts
            write_text(arguments.output / f"rates-{pool}.json", json.dumps(whole.tolist()) + "\n")
            order = np.random.default_rng(0).permutation(len(task.train))[: arguments.prompts]
            problems, rates = [task.train[i] for i in order], whole[order]
            rules = rule_budgets(rates, arguments.mean * len(rates), low=2, high=arguments.high)
            measured: dict[str, dict[str, tuple[float, float]]] = {}
            for rule in RULES:
                samples = gradient_samples(policy, task, problems, rates, rules[rule], arguments.samples, config, bar)
                measured[rule] = {name: variance(gradients) for name, gradients in samples.items()}
            found[pool] = {"headroom": headroom(rates), "headroom_of_pool": headroom(whole), "rules": {}}
            for rule in RULES:
                row = [pool, f"{found[pool]['headroom']:.2f}", rule]
                entry: dict[str, Any] = {"budgets": rules[rule].tolist()}
                for name in BASELINES:
                    (even, even_error), (mine, error) = measured["uniform"][name], measured[rule][name]
                    ratio = even / mine
                    relative = ((even_error / even) ** 2 + (error / mine) ** 2) ** 0.5
                    spread = 0.0 if rule == "uniform" else ratio * relative
                    predicted = gradient_variance(rates, rules["uniform"], baseline=name) / gradient_variance(
                        rates, rules[rule], baseline=name
                    )
                    entry[name] = {"variance": mine, "ratio": ratio, "error": spread, "predicted": predicted}
                    row.append(f"{ratio:.2f} ± {spread:.2f}, {predicted:.2f}")
                found[pool]["rules"][rule] = entry
                lines.append("| " + " | ".join(row) + " |")
    text = "\n".join(lines) + "\n"
    print(text)
    summary = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "machine": machine(),
        "seconds": round(time.perf_counter() - begun), "prompts": arguments.prompts, "mean": arguments.mean,
        "low": 2, "high": arguments.high, "samples": arguments.samples, "rollouts": arguments.rollouts, "pools": found,
    }  # fmt: skip
    write_text(arguments.output / "summary.json", json.dumps(summary) + "\n")
    write_text(arguments.output / "table.md", text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
