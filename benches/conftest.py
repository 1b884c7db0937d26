"""Sizes, and what every bench here shares."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coba_core.kernels import cython_backend

QUICK = os.environ.get("BENCH_FULL") != "1"
ALPHA, BETA, TAU = 7.26, 3.74, 5.0
LOW, HIGH = 2, 128


def pass_rates(prompts: int, kind: str = "uniform", seed: int = 0) -> np.ndarray:
    """Pass rates of a seeded pool: "uniform" on (0, 1), or "counts", successes of 16 rollouts."""
    random = np.random.default_rng(seed)
    if kind == "uniform":
        return random.uniform(1e-6, 1.0 - 1e-6, prompts)
    return random.integers(0, 17, prompts) / 16.0


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def pytest_benchmark_update_machine_info(config: Any, machine_info: dict[str, Any]) -> None:
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    machine_info.clear()
    machine_info.update(
        processor=processor(),
        cores=os.cpu_count(),
        system=f"{platform.system()} {platform.machine()}",
        python=platform.python_version(),
        instructions=cython_backend.target,
        commit=revision.stdout.strip(),
        packages={name: metadata.version(name) for name in ("numpy", "numba", "scipy", "Cython")},
    )


def sizes(*full: int) -> list[int]:
    """The sizes of a bench; small ones only where benches are just checked."""
    return [size for size in full if size <= 512] if QUICK else list(full)


@pytest.fixture
def measure(benchmark: Any) -> Any:
    """measure(group, name, function, *arguments, **facts): times it and returns its result."""

    def run(group: str, name: str, function: Any, *arguments: Any, slow: bool = False, **facts: Any) -> Any:
        benchmark.group = group
        benchmark.extra_info.update(name=name, **facts)
        result = function(*arguments)  # compiles, and is what the check looks at
        if slow:
            benchmark.pedantic(function, arguments, rounds=3)
        else:
            benchmark._min_rounds = 7
            benchmark._max_time = 1.0
            benchmark(function, *arguments)
        return result

    return run
