"""Times the Triton kernels on the GPU of this machine, after checking them there.

    python benches/gpu/bench.py [--quick] [--output benches/results]

Needs a CUDA or ROCm device, and refuses without one. First the tests marked gpu: while one is red no time is printed.
Then, for each size, median and 20th and 80th percentile of the device time of: the kernels; torch eager
(torch.distributions.Beta.log_prob, and the formula); torch.compile; the CPU path with its two copies; and the floors, a
copy of the same bytes and an empty launch. Writes a table and the raw numbers, with the card's name, the versions and
the commit.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

import coba_core
from coba_core.device import DeviceCapabilityAllocator
from coba_core.groups import torch_advantages
from coba_core.kernels import triton_backend

ROOT = Path(__file__).resolve().parents[2]
SIZES = (512, 4096, 65_536, 10**6, 10**7, 10**8)
ALPHA, BETA, TAU = 7.26, 3.74, 5.0
SAMPLES = 30


@dataclass
class Row:
    """One measurement: seconds of device time, and the bytes that must be read and written."""

    operation: str
    size: int
    how: str
    median: float
    p20: float
    p80: float
    bytes: int = 0


@triton.jit
def empty_kernel(x, BLOCK: tl.constexpr):
    """Nothing but a launch."""
    tl.store(x + tl.arange(0, BLOCK), 0.0)


def device_seconds(call: Callable[[], Any], repeats: int) -> np.ndarray:
    """SAMPLES times of one call, from events around `repeats` of them captured in one CUDA graph: no host in it."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    graph.replay()
    times = []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / repeats)
    return np.array(times)


def waiting_seconds(call: Callable[[], Any]) -> np.ndarray:
    """SAMPLES times of one call that itself waits for the device, by events around it."""
    for _ in range(3):
        call()
    times = []
    for _ in range(SAMPLES):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return np.array(times)


class Table:
    """Rows as they come, each printed at once."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def add(
        self, operation: str, size: int, how: str, call: Callable[[], Any], *, bytes: int = 0, waits: bool = False
    ) -> None:
        """Measures a call; one that this card or torch cannot do is left out, and said."""
        repeats = max(1, min(20, 4 * 10**6 // size))
        try:
            times = waiting_seconds(call) if waits else device_seconds(call, repeats)
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            print(f"{operation:18} {size:>11,} {how:34} left out: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.empty_cache()
            return
        p20, median, p80 = np.percentile(times, [20, 50, 80])
        self.rows.append(Row(operation, size, how, float(median), float(p20), float(p80), bytes))
        rate = f"{bytes / median / 1e9:8.0f} GB/s" if bytes else ""
        print(
            f"{operation:18} {size:>11,} {how:34} {median * 1e6:12.2f} µs ({p20 * 1e6:.2f}-{p80 * 1e6:.2f}) {rate}",
            flush=True,
        )

    def find(self, operation: str, size: int, how: str) -> Row | None:
        rows = [r for r in self.rows if (r.operation, r.size, r.how) == (operation, size, how)]
        return rows[0] if rows else None


def formula_density(p: Any, alpha: float, beta: float, log_beta: float) -> Any:
    return (alpha - 1.0) * torch.log(p) + (beta - 1.0) * torch.log1p(-p) - log_beta


def formula_gains(p: Any, budgets: Any, alpha: float, beta: float, log_beta: float) -> Any:
    """The log gain and the gain as torch would write them, without cancellation."""
    k = p * (1.0 - p) / TAU
    log_gain = formula_density(p, alpha, beta, log_beta) - k * budgets + torch.log(-torch.expm1(-k))
    return log_gain, torch.exp(log_gain)


def measure_floors(table: Table, device: torch.device, sizes: tuple[int, ...]) -> None:
    few = torch.empty(32, device=device)
    table.add("floor", 1, "empty launch", lambda: empty_kernel[(1,)](few, BLOCK=32, num_warps=1))
    for size in sizes:
        source = torch.rand(size, dtype=torch.float64, device=device)
        target = torch.empty_like(source)
        table.add("floor", size, "copy of float64", lambda s=source, t=target: t.copy_(s), bytes=16 * size)


def measure_gains(table: Table, device: torch.device, sizes: tuple[int, ...]) -> None:
    log_beta = math.lgamma(ALPHA) + math.lgamma(BETA) - math.lgamma(ALPHA + BETA)
    form = coba_core.CapabilityValue(ALPHA, BETA, TAU).form
    compiled_density, compiled_gains = torch.compile(formula_density), torch.compile(formula_gains)
    for size in sizes:
        for dtype, width in ((torch.float32, 4), (torch.float64, 8)):
            name = str(dtype).removeprefix("torch.")
            p = torch.rand(size, dtype=dtype, device=device) * 0.998 + 0.001
            budgets = torch.randint(2, 128, (size,), dtype=torch.int32, device=device)
            distribution = torch.distributions.Beta(
                torch.tensor(ALPHA, dtype=dtype, device=device), torch.tensor(BETA, dtype=dtype, device=device),
                validate_args=False,
            )  # fmt: skip
            for how, call in (
                ("Triton", lambda p=p: triton_backend.log_density(p, ALPHA, BETA)),
                ("torch.distributions.Beta.log_prob", lambda p=p, d=distribution: d.log_prob(p)),
                ("torch eager formula", lambda p=p: formula_density(p, ALPHA, BETA, log_beta)),
                ("torch.compile formula", lambda p=p: compiled_density(p, ALPHA, BETA, log_beta)),
            ):
                table.add(f"log_density {name}", size, how, call, bytes=2 * width * size)
            for how, call in (
                ("Triton", lambda p=p, b=budgets: triton_backend.log_gains_and_gains(p, form, b)),
                ("torch eager formula", lambda p=p, b=budgets: formula_gains(p, b, ALPHA, BETA, log_beta)),
                ("torch.compile formula", lambda p=p, b=budgets: compiled_gains(p, b, ALPHA, BETA, log_beta)),
            ):
                table.add(f"gains {name}", size, how, call, bytes=(3 * width + 4) * size)
            del p, budgets
            torch.cuda.empty_cache()


def measure_allocation(table: Table, device: torch.device, sizes: tuple[int, ...]) -> None:
    for value, name in (
        (coba_core.CapabilityValue(ALPHA, BETA, TAU), "allocate capability"),
        (coba_core.KnapsackValue(), "allocate knapsack"),
    ):
        for size in sizes:
            p = torch.rand(size, dtype=torch.float64, device=device)
            total, form = 16 * size, value.form
            if not torch.equal(
                triton_backend.threshold(p, form, 2, 128, total).cpu(),
                torch.from_numpy(coba_core.allocate(p.cpu().numpy(), total, value=value)),
            ):
                raise AssertionError(f"{name} at {size} prompts is not the CPU's allocation")
            kinds = ("one", "many") if size <= 65_536 else ("many",)
            for kind in kinds:
                table.add(
                    name, size, f"Triton, {kind} launch{'es' if kind == 'many' else ''}",
                    lambda p=p, f=form, t=total, k=kind: triton_backend.threshold(p, f, 2, 128, t, launches=k),
                )  # fmt: skip
            table.add(
                name, size, "CPU and two copies",
                lambda p=p, t=total, v=value: torch.from_numpy(
                    coba_core.allocate(p.cpu().numpy(), t, value=v)
                ).to(device),
                waits=True,
            )  # fmt: skip
            if name == "allocate capability":
                table.add(
                    "decide and repeat", size, "Triton, one graph",
                    lambda p=p, f=form, t=total: triton_backend.repeat_index(
                        triton_backend.threshold(p, f, 2, 128, t), t
                    ),
                )  # fmt: skip
            del p
            torch.cuda.empty_cache()


def measure_groups(table: Table, device: torch.device, sizes: tuple[int, ...]) -> None:
    for size in sizes:
        if size > 10**7:
            continue
        prompts = max(1, size // 16)
        rows = torch.randint(0, prompts, (size,), device=device)
        rewards = (torch.rand(size, device=device) < 0.4).float()
        for how, call in (
            ("Triton", lambda r=rewards, i=rows: triton_backend.group_advantages(r, i, "group", 1e-4)),
            ("torch operations", lambda r=rewards, i=rows: torch_advantages(r, i, "group", 1e-4)),
        ):
            table.add("group_advantages", size, how, call, bytes=16 * size)
        allocator = DeviceCapabilityAllocator(prompts, device=device)
        ids = torch.arange(prompts, device=device)
        table.add("history update", size, "Triton", lambda a=allocator, i=ids, r=rewards, w=rows: a.update(i, r, w))
        table.add("pass rates", prompts, "Triton", lambda a=allocator, i=ids: a.device_history.pass_rates(i))


def bars(table: Table) -> list[str]:
    """The targets, for an H200, and whether this run met them."""
    lines = []
    copy, gains = table.find("floor", 10**8, "copy of float64"), table.find("gains float64", 10**8, "Triton")
    if copy and gains:
        share = (gains.bytes / gains.median) / (copy.bytes / copy.median)
        lines.append(f"gains float64 at 1e8: {share:.0%} of the copy bandwidth (bar 85 %)")
    for operation, size, how, bar in (
        ("allocate capability", 512, "Triton, one launch", 15e-6),
        ("allocate capability", 10**6, "Triton, many launches", 150e-6),
        ("decide and repeat", 512, "Triton, one graph", 30e-6),
    ):
        row = table.find(operation, size, how)
        if row:
            lines.append(f"{operation} at {size:,}: {row.median * 1e6:.1f} µs (bar {bar * 1e6:.0f} µs)")
    return lines


def environment() -> dict[str, str]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    properties = torch.cuda.get_device_properties(0)
    return {
        "card": properties.name,
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "multiprocessors": str(properties.multi_processor_count),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "commit": commit.stdout.strip() or "unknown",
        "date": date.today().isoformat(),
    }


def write(folder: Path, about: dict[str, str], table: Table) -> Path:
    """gpu-<date>-<card>.json and .md."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = folder / f"gpu-{about['date']}-{about['card'].replace(' ', '-')}"
    record = {"about": about, "rows": [asdict(row) for row in table.rows]}
    stem.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    lines = [f"# {about['card']}, {about['date']}", "", ", ".join(f"{k} {v}" for k, v in about.items()), ""]
    lines += [*(f"- {line}" for line in bars(table)), ""]
    lines += ["| operation | size | how | median µs | p20-p80 | GB/s |", "|---|---|---|---|---|---|"]
    for r in table.rows:
        rate = f"{r.bytes / r.median / 1e9:.0f}" if r.bytes else ""
        spread = f"{r.p20 * 1e6:.2f}-{r.p80 * 1e6:.2f}"
        lines.append(f"| {r.operation} | {r.size:,} | {r.how} | {r.median * 1e6:.2f} | {spread} | {rate} |")
    target = stem.with_suffix(".md")
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return target


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="check and time the Triton kernels on this machine's GPU")
    parser.add_argument("--quick", action="store_true", help="sizes up to 65,536 only")
    parser.add_argument("--output", type=Path, default=ROOT / "benches" / "results")
    options = parser.parse_args(arguments)
    usable, reason = triton_backend.usable()
    if not usable:
        print(f"nothing measured: {reason}. This bench needs a GPU that Triton can use.", file=sys.stderr)
        return 2
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/kernels/test_triton.py"]
    if subprocess.run(tests, cwd=ROOT).returncode:
        print("nothing measured: the kernels are wrong on this card, see above.", file=sys.stderr)
        return 1
    sizes = SIZES[:3] if options.quick else SIZES
    device, table, about = torch.device("cuda"), Table(), environment()
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    measure_floors(table, device, sizes)
    measure_gains(table, device, sizes)
    measure_allocation(table, device, sizes)
    measure_groups(table, device, sizes)
    print("\n".join(bars(table)))
    print(f"written to {write(options.output, about, table)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
