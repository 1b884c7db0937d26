"""Reads valgrind's log and prints the errors that have a frame in the compiled kernels; exit status 1 if there is one.

CPython and NumPy raise false alarms of their own, in functions that the kernels have no part in.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

OURS = re.compile(r"cython_backend|kernels_(baseline|avx2|avx512)|coba_")


def errors(log: str) -> list[str]:
    """The log's errors, one text each, without the process's number."""
    lines = [re.sub(r"^==\d+== ?", "", line) for line in log.splitlines() if line.startswith("==")]
    blocks = "\n".join(lines).split("\n\n")
    return [block for block in blocks if re.search(r"^\s+(at|by) 0x", block, re.MULTILINE)]


def main(path: str) -> int:
    """Prints what is ours and how many there were in all."""
    log = Path(path).read_text()
    if "ERROR SUMMARY" not in log:
        print(f"{path} has no summary: valgrind did not come to its end")
        return 1
    found = errors(log)
    ours = [block for block in found if OURS.search(block)]
    print(*ours, sep="\n\n")
    print(f"memcheck: {len(ours)} errors in the kernels; {len(found) - len(ours)} elsewhere in CPython and NumPy")
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
