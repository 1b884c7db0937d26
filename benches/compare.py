"""`make bench-compare BASE=<revision>`: this tree's kernels against another revision's, built side by side.

Both are timed in turn, in fresh processes, so that a drift of the machine falls on both; the ratio is taken pair by
pair. Where valgrind is there, callgrind counts instructions, which hardly vary (AVX2 code: it knows no AVX-512).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
CASES = {
    "threshold M=512": "cb.threshold(p[:512], capability, 2, 128, 8192)",
    "threshold M=10,000": "cb.threshold(p[:10000], capability, 2, 128, 160000)",
    "threshold M=100,000": "cb.threshold(p[:100000], capability, 2, 128, 1600000)",
    "threshold, Knapsack M=1024": "cb.threshold(p[:1024], knapsack, 2, 128, 8192)",
    "heap M=512": "cb.heap(p[:512], capability, 2, 128, 8192)",
    "gains M=10,000": "cb.gains(p[:10000], capability, b)",
    "allocate() M=64": "coba_core.allocate(p[:64], 1024, value=value)",
}
PROGRAM = """
import sys, time
import numpy as np
import coba_core
from coba_core.kernels import cython_backend as cb
p, b = np.random.default_rng(0).random(10**5), np.full(10000, 16)
value = coba_core.CapabilityValue(7.26, 3.74)
capability, knapsack = value.form, coba_core.KnapsackValue().form
work = compile(sys.argv[1], "case", "eval")
repeats = int(sys.argv[2])
times = []
for _ in range(repeats):
    start = time.perf_counter()
    eval(work)
    times.append(time.perf_counter() - start)
print(np.median(times))
"""


def run(tree: Path, case: str, repeats: int, *before: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-c", PROGRAM, case, str(repeats)]
    variables = {**os.environ, "PYTHONPATH": str(tree), **environment}
    return subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, check=True)


def instructions(tree: Path, case: str) -> int:
    """Instructions of some hundred runs, those of starting up taken off."""
    counts = []
    for repeats in (1, 31 if "100000" in case else 501):
        valgrind = ("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null")
        variables = {"COBA_CORE_CPU": "avx2", "OPENBLAS_CORETYPE": "Haswell", "PYTHONHASHSEED": "0"}
        done = run(tree, case, repeats, *valgrind, **variables)
        counts.append(int(re.findall(r"Collected : (\d+)", done.stderr)[0]))
    return counts[1] - counts[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="git revision to compare with")
    parser.add_argument("--pairs", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder, "base")
        subprocess.run(["git", "worktree", "add", "--detach", str(other), arguments.base], cwd=ROOT, check=True)
        try:
            for tree in (ROOT, other):
                build = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
                subprocess.run(build, cwd=tree, env={**os.environ, "COBA_CORE_REQUIRE_EXT": "1"}, check=True)
            print(f"| case | this tree | {arguments.base} | ratio (20th – 80th percentile) | instructions, ratio |")
            print("|---|---:|---:|---:|---:|")
            for name, case in CASES.items():
                repeats = 101 if "100,000" in name else 2001
                pairs = np.array(
                    [[float(run(t, case, repeats).stdout) for t in (ROOT, other)] for _ in range(arguments.pairs)]
                )
                ours, theirs = np.median(pairs, axis=0)
                low, middle, high = np.percentile(pairs[:, 0] / pairs[:, 1], [20, 50, 80])
                counted = "no valgrind"
                if shutil.which("valgrind"):
                    counted = f"{instructions(ROOT, case) / instructions(other, case):.4f}"
                spread = f"{middle:.3f} ({low:.3f} – {high:.3f})"
                print(
                    f"| {name} | {ours * 1e6:.2f} µs | {theirs * 1e6:.2f} µs | {spread} | {counted} |", flush=True
                )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(other)], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()
