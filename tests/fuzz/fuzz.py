"""Coverage-guided fuzzing of the targets: ``python tests/fuzz/fuzz.py --seconds 60`` (needs atheris).

Runs every target, or those named, each in a process of its own with a corpus under --corpus that later runs go on
from. A fault ends with a traceback, the bytes that caused it, and exit status 1.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def fuzz(name: str, seconds: int, corpus: Path) -> None:
    """Never returns: libFuzzer ends the process."""
    import atheris

    sys.path.insert(0, str(ROOT))
    with atheris.instrument_imports(include=["coba_core"]):
        from tests.fuzz.targets import TARGETS

    target = next(t for t in TARGETS if t.__name__ == name)
    folder = corpus / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "seed").write_bytes(TARGETS[target])

    def one(data: bytes) -> None:
        target(data)

    prefix = f"-artifact_prefix={folder.parent}/{name}-"
    atheris.Setup([sys.argv[0], str(folder), f"-max_total_time={seconds}", "-max_len=4096", prefix], one)
    atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help="names of functions of targets.py [all]")
    parser.add_argument("--seconds", type=int, default=60, help="for each target [%(default)s]")
    parser.add_argument("--corpus", type=Path, default=ROOT / "build" / "fuzz")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        fuzz(arguments.one, arguments.seconds, arguments.corpus)
    sys.path.insert(0, str(ROOT))
    from tests.fuzz.targets import TARGETS

    failed = 0
    for name in arguments.targets or [t.__name__ for t in TARGETS]:
        options = ["--one", name, "--seconds", str(arguments.seconds), "--corpus", str(arguments.corpus)]
        done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, cwd=ROOT)
        lines = done.stderr.splitlines()
        reached = next((line for line in reversed(lines) if line.startswith("#")), "")  # executions, coverage, features
        print(f"{name}: {'ok' if not done.returncode else 'FAULT'}; {reached}", flush=True)
        if done.returncode:
            failed += 1
            print(done.stdout, "\n".join(lines[-40:]), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
