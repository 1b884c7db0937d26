"""The demo: uniform GRPO and CoBA with its published settings, same seeds, same rollouts, on the embedded policy.

    python -m coba_core.integrations.grpo.demo --output out/demo

It reports what it finds, whichever wins. The embedded task is a controlled instrument (see embedded.py): reinforcement
removes noise from a skill that is there, and no prompt is out of reach until easier ones are learned.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from .compare import compare
from .config import TrainConfig, load_config

CONFIG = Path(__file__).parent / "configs" / "embedded.yaml"


def demo_config() -> TrainConfig:
    """configs/embedded.yaml, evaluated more often and not kept."""
    return load_config(CONFIG).replace(eval_every=10, checkpoint_every=0, tensorboard=False)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", default="out/demo")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args(argv)
    begun = time.perf_counter()
    output = Path(arguments.output)
    config = demo_config().replace(steps=arguments.steps)
    print(
        f"uniform and CoBA, {arguments.seeds} seeds each: {config.steps} steps of {config.prompts_per_step} prompts "
        f"and {config.rollouts_per_step} rollouts. A policy of under 1 M parameters on fixed-width arithmetic: a "
        "controlled instrument to compare methods on."
    )
    text = compare(config, ["uniform", "coba"], seeds=arguments.seeds, output=output, jobs=2)
    seconds = time.perf_counter() - begun
    print(f"\n{text}\n\nmean ± standard deviation over seeds, differences paired by seed; {seconds:.0f} s in all")
    print(f"picture: {output / 'picture.png'}; every step: {output / 'runs'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
