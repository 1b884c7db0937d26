"""The wheel and the core's tests on every Python and on the lowest and the newest NumPy: ``python tests/versions.py``.

For each interpreter: a wheel is built, installed into environments of its own (NumPy's lowest version, its newest, its
newest beside Numba), checked by tests/check_wheel.py, and the core's tests run against it (all but those of the
integrations, the studies and Triton). Interpreters are given, or those found: ``python3.N`` on the PATH and pyenv's.
Prints a table in Markdown; exit status 1 if anything failed. Needs a package index; three to ten minutes a Python.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
MINORS = range(10, 15)
# NumPy's first release with wheels for a Python, not below what pyproject.toml states.
LOWEST = {10: "1.26.0", 11: "1.26.0", 12: "1.26.0", 13: "2.1.0", 14: "2.3.2"}
ENVIRONMENTS = ("lowest", "newest", "newest, Numba")
IGNORED = (
    "tests/integrations", "tests/fuzz", "tests/test_study_*.py", "tests/test_docs.py", "tests/kernels/test_triton*.py",
)  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One environment and what came of it."""

    python: str
    numpy: str
    numba: str
    wheel: str
    tests: str

    @property
    def passed(self) -> bool:
        return self.wheel == "ok" and "failed" not in self.tests and "error" not in self.tests


def interpreters() -> list[Path]:
    """One interpreter of each minor version that is to be had here."""
    found = []
    for minor in MINORS:
        root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
        pyenv = sorted(root.glob(f"versions/3.{minor}.*/bin/python"))
        command = str(pyenv[-1]) if pyenv else shutil.which(f"python3.{minor}")
        if command:
            found.append(Path(command))
    return found


def run(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """The command's result; it sees no package but those of its own environment."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("COBA_CORE_", "PYTHON"))}
    variables |= {"COBA_CORE_REQUIRE_EXT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return subprocess.run([str(part) for part in command], cwd=cwd, env=variables, capture_output=True, text=True)


def asked(python: Path, code: str) -> str:
    return run(python, "-c", code).stdout.strip()


def build(python: Path, folder: Path) -> Path:
    """The wheel that this interpreter builds of the tree, from a copy without what an earlier build left."""
    tree = folder / "tree"
    left_out = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", "cython_backend.c", "results")
    for name in ("coba_core", "csrc", "integrations", "tests"):
        shutil.copytree(ROOT / name, tree / name, ignore=left_out)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in", "conftest.py"):
        shutil.copy(ROOT / name, tree)
    done = run(python, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, tree)
    if done.returncode:
        raise SystemExit(f"{python}: no wheel\n{done.stderr[-3000:]}")
    return next(folder.glob("*.whl"))


def check(python: Path, minor: int, wheel: Path, environment: str, folder: Path) -> Row:
    """Installs the wheel in a new environment and tests it there."""
    home = folder / environment.replace(", ", "-").lower()
    run(python, "-m", "venv", home)
    inside = home / "bin" / "python"
    numpy = f"numpy=={LOWEST[minor]}" if environment == "lowest" else "numpy"
    extra = ["numba"] if environment.endswith("Numba") else []
    packages = [wheel, numpy, *extra, "pytest", "hypothesis", "mpmath"]
    installed = run(inside, "-m", "pip", "install", "-q", "--only-binary", ":all:", *packages)
    version = asked(python, "import platform; print(platform.python_version())")
    if installed.returncode:
        return Row(version, numpy, *extra or ["–"], "not installed: " + installed.stderr.strip()[-200:], "–")
    versions = [asked(inside, f"import {name}; print({name}.__version__)") for name in ("numpy", *extra)]
    checked = run(inside, "-W", "error", ROOT / "tests" / "check_wheel.py", cwd=folder)
    tests = folder / "tests-of" / home.name  # beside no source of the package: what runs is the wheel
    shutil.copytree(folder / "tree" / "tests", tests / "tests")
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, tests)
    ignored = [f"--ignore-glob={tests / pattern}" for pattern in IGNORED]
    done = run(inside, "-m", "pytest", "-q", "-p", "no:cacheprovider", *ignored, "tests", cwd=tests)
    last = re.sub(r" in [\d.:()\s]+s?.*", "", (done.stdout.strip().splitlines() or ["error: no output"])[-1])
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], file=sys.stderr)
        last = last if "failed" in last else f"error {done.returncode}: {last}"
    if checked.returncode:
        print(checked.stderr, file=sys.stderr)
    return Row(version, versions[0], versions[1] if extra else "–", "failed" if checked.returncode else "ok", last)


def main() -> int:
    """Runs them all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pythons", nargs="*", type=Path, help="interpreters [those found]")
    parser.add_argument("--environments", nargs="*", choices=ENVIRONMENTS, default=ENVIRONMENTS)
    arguments = parser.parse_args()
    work = ROOT / "build" / "versions"
    shutil.rmtree(work, ignore_errors=True)
    print("| Python | NumPy | Numba | wheel | tests |\n|---|---|---|---|---|", flush=True)
    passed = True
    for python in arguments.pythons or interpreters():
        minor = int(asked(python, "import sys; print(sys.version_info.minor)"))
        folder = work / f"3.{minor}"
        folder.mkdir(parents=True)
        wheel = build(python, folder)
        for environment in arguments.environments:
            row = check(python, minor, wheel, environment, folder)
            print(f"| {row.python} | {row.numpy} | {row.numba} | {row.wheel} | {row.tests} |", flush=True)
            passed = passed and row.passed
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
