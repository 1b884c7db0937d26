"""`make bench`: runs every bench, prints one table, and writes it with two pictures to benches/results.

    python -m benches.run [--output benches/results]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from datetime import date
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
THREADS = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS", "MKL_NUM_THREADS")}


def measure(folder: Path) -> dict[str, Any]:
    """pytest-benchmark's record of all benches, threads pinned to one except where a bench asks for more."""
    target = folder / "benchmark.json"
    command = [sys.executable, "-m", "pytest", "-q", "benches", f"--benchmark-json={target}", "--benchmark-save-data"]
    environment = {**os.environ, **THREADS, "BENCH_FULL": "1"}
    subprocess.run([*command, "--benchmark-quiet"], cwd=ROOT, env=environment, check=True)
    record: dict[str, Any] = json.loads(target.read_text())
    return record


def rows_of(record: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a bench: medians and spreads in seconds."""
    rows = []
    for bench in record["benchmarks"]:
        data = np.array(bench["stats"]["data"])
        p20, median, p80 = np.percentile(data, [20, 50, 80])
        info = bench["extra_info"]
        rows.append(
            {
                "group": bench["group"],
                "name": info["name"],
                "prompts": info.get("prompts"),
                "total": info.get("total"),
                "median": float(median),
                "p20": float(p20),
                "p80": float(p80),
                "rounds": len(data),
            }
        )
    return rows


MEMORY = """
import sys, numpy as np, coba_core

def status(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

prompts, mean = int(sys.argv[1]), int(sys.argv[2])
p = np.random.default_rng(0).random(prompts)
value = coba_core.CapabilityValue(7.26, 3.74)
coba_core.allocate(p[:1000], 16000, value=value)
before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak starts anew
coba_core.allocate(p, mean * prompts, high=4000, value=value)
print(status("VmHWM") - before)
"""


def memory(prompts: int = 10**7) -> dict[str, float]:
    """Bytes a prompt that an allocation adds to the pass rates at its peak, its result among them (Linux only)."""
    if platform.system() != "Linux":
        return {}
    added = {}
    for mean in (16, 1000):
        command = [sys.executable, "-c", MEMORY, str(prompts), str(mean)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        added[f"total {mean} × prompts"] = int(done.stdout) / prompts
    return added


def import_times(repeats: int = 15) -> dict[str, float]:
    """Median seconds of a fresh interpreter that imports NumPy, and that imports coba_core after it."""
    times = defaultdict(list)
    for _ in range(repeats):
        for name, code in (("numpy", "import numpy"), ("numpy and coba_core", "import numpy, coba_core")):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
            times[name].append(time.perf_counter() - start)
    return {name: float(np.median(x)) for name, x in times.items()}


def duration(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def extrapolated(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Python's DP at M=512, total 8,192, by its O(M R W) from the size that was measured. Marked as such."""
    found = [row for row in rows if row["name"] == "DP, Python"]
    if not found:
        return None
    small = found[0]

    def work(prompts: int) -> int:
        """(units, r) pairs: the inner loop stops at the units that there are."""
        spare = 14 * prompts
        return prompts * sum(min(126, r) + 1 for r in range(spare + 1))

    scale = work(512) / work(small["prompts"])
    times = {key: small[key] * scale for key in ("median", "p20", "p80")}
    return {**small, **times, "name": "DP, Python (extrapolated)", "prompts": 512, "total": 8192, "rounds": 0}


def table(rows: list[dict[str, Any]], record: dict[str, Any], extras: dict[str, Any]) -> str:
    machine = record["machine_info"]
    lines = [
        f"# Benches, {date.today().isoformat()}",
        "",
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}, {machine['instructions']}; "
        f"Python {machine['python']}, "
        + ", ".join(f"{name} {version}" for name, version in machine["packages"].items())
        + f"; commit {machine['commit']}. One thread except where said. Medians, in brackets the 20th and 80th "
        "percentile. The ratio is to the Cython threshold at the same size, of the same run. `make bench` makes this.",
    ]
    titles = {
        "size": "Allocation, capability value, budgets in [2, 128], total 16 a prompt",
        "total": "Growth with the total, budgets in [2, 4000]",
        "public": "The public call, checks included",
        "threads": "Threads",
        "value": "Every kind of value",
        "gains": "Batched marginal gains",
        "history": "History: 4,096 rollouts over 256 prompts",
        "groups": "Groups",
        "step": "A step of the stateful allocator",
    }
    for group, title in titles.items():
        chosen = [row for row in rows if row["group"] == group]
        if not chosen:
            continue
        lines += ["", f"## {title}", "", "| what | prompts | total | time | ratio |", "|---|---:|---:|---:|---:|"]
        ours = {
            (row["prompts"], row["total"]): row["median"] for row in chosen if row["name"] == "threshold, Cython"
        }
        for row in sorted(chosen, key=lambda x: (x["prompts"] or 0, x["total"] or 0, x["median"])):
            base = ours.get((row["prompts"], row["total"]))
            ratio = "" if base is None else f"{row['median'] / base:,.3g}"
            total = "" if row["total"] is None else f"{row['total']:,}"
            spread = "" if not row["rounds"] else f" ({duration(row['p20'])} – {duration(row['p80'])})"
            lines.append(
                f"| {row['name']} | {row['prompts']:,} | {total} | {duration(row['median'])}{spread} | {ratio} |"
            )
    lines += ["", "## Memory and import", "", "| what | |", "|---|---:|"]
    for name, x in extras["memory"].items():
        lines.append(f"| bytes a prompt above the pass rates, M=10,000,000, {name} | {x:.1f} |")
    times = extras["import"]
    lines.append(f"| import coba_core above import numpy | {duration(times['numpy and coba_core'] - times['numpy'])} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict[str, Any]], group: str, over: str, path: Path) -> None:
    """Time over prompts or over the total, one line a peer, log-log."""
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["group"] == group:
            lines[row["name"]].append((row[over], row["median"]))
    figure, axes = plt.subplots(figsize=(8, 5.5))
    ours = sorted(name for name in lines if name.startswith("threshold"))
    for name in [*ours, *sorted(set(lines) - set(ours))]:
        x, y = zip(*sorted(lines[name]), strict=True)
        axes.loglog(x, y, "o-", markersize=4, linewidth=2.2 if name in ours else 1.2, label=name)
    axes.set_xlabel("prompts" if over == "prompts" else "total budget, rollouts")
    axes.set_ylabel("seconds, median")
    axes.grid(which="major", alpha=0.3)
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    temporary = path.with_suffix(".partial.png")
    figure.savefig(temporary, dpi=130, bbox_inches="tight")
    plt.close(figure)
    temporary.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=ROOT / "benches" / "results")
    output: Path = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        record = measure(Path(folder))
    rows = rows_of(record)
    if (guess := extrapolated(rows)) is not None:
        rows.append(guess)
    extras = {"memory": memory(), "import": import_times()}
    name = re.sub(r"[^a-z0-9]+", "-", record["machine_info"]["processor"].lower()).strip("-")
    stem = output / f"{date.today().isoformat()}-{name}"
    text = table(rows, record, extras)
    draw(rows, "size", "prompts", stem.with_name(stem.name + "-prompts.png"))
    draw(rows, "total", "total", stem.with_name(stem.name + "-total.png"))
    facts = json.dumps({"machine": record["machine_info"], "rows": rows, **extras}, indent=1)
    for suffix, content in ((".md", text), (".json", facts)):
        temporary = stem.with_name(stem.name + suffix + ".partial")
        temporary.write_text(content)
        temporary.replace(stem.with_name(stem.name + suffix))
    print(text)
    print(f"written to {stem}.md, .json, -prompts.png and -total.png")


if __name__ == "__main__":
    main()
