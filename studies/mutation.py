"""Mutation testing: small faults put into the core one at a time, and whether its tests notice.

``python studies/mutation.py --minutes 30`` needs cosmic-ray (for its operators) beside the packages of the tests. It
works on a copy in build/mutation, takes the mutants of all modules in an order drawn with --seed, and writes counts and
survivors to studies/results/mutation. Left out: annotations, which are not evaluated, and doc strings. A mutant is
killed when a test of its module fails or the tests take longer than --timeout seconds.
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import datetime
import difflib
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = {
    "groups": ["test_groups.py"],
    "history": ["test_history.py"],
    "schedules": ["test_schedules.py"],
    "values": ["test_values.py", "test_vectors.py"],
    "allocators": ["test_allocators.py", "test_faults.py", "test_vectors.py"],
}
"""The modules, and the tests of each."""
PRELOADED = ["numpy", "scipy.special", "mpmath", "numba", "torch"]  # not pytest's plugins, which it imports itself


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change to one module: the n-th place where an operator applies."""

    module: str
    operator: str
    occurrence: int


def mutants(module: str, source: str) -> list[Mutant]:
    """All mutants of a module, in the order of the operators' names."""
    from cosmic_ray.ast import ast_nodes, get_ast
    from cosmic_ray.plugins import get_operator, operator_names

    skipped = [
        ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
        for parent in ast.walk(ast.parse(source))
        for node in (getattr(parent, "annotation", None), getattr(parent, "returns", None))
        if node is not None
    ]
    nodes = list(ast_nodes(get_ast(source)))
    found = []
    for name in sorted(operator_names()):
        if name.startswith("core/Variable"):  # these need to be told which variable
            continue
        operator = get_operator(name)()
        places = [place for node in nodes for place in operator.mutation_positions(node)]
        for occurrence, (start, end) in enumerate(places):
            if not any(first <= tuple(start) and tuple(end) <= last for first, last in skipped):
                found.append(Mutant(module, name, occurrence))
    return found


def run_tests(folder: str, files: list[str]) -> None:
    """In a process of its own: exit status 0 if the tests pass."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.dont_write_bytecode = True
    output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import coba_core

    if not str(coba_core.__file__).startswith(folder):
        os._exit(99)
    import pytest

    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in files)])
    os._exit(int(status))


def tested(folder: Path, module: str, timeout: float) -> str:
    """ "survived", "killed" or "timeout" of the module as it stands in the copy."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=run_tests, args=(str(folder), TESTS[module]))
    process.start()
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        return "timeout"
    if process.exitcode == 99:
        raise RuntimeError("the tests found another coba_core than the copy")
    return "survived" if process.exitcode == 0 else "killed"


def main() -> None:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30, help="begin no mutant after so many [%(default)s]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, metavar="REPORT", help="only the survivors of an earlier report")
    parser.add_argument("--timeout", type=float, default=180, help="seconds for the tests of a module [%(default)s]")
    parser.add_argument("--output", type=Path, default=ROOT / "studies" / "results" / "mutation")
    arguments = parser.parse_args()
    folder = ROOT / "build" / "mutation"
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("coba_core", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "integrations"))
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(ROOT / name, folder)
    sources = {module: (folder / "coba_core" / f"{module}.py").read_text() for module in TESTS}
    for module in TESTS:
        if tested(folder, module, arguments.timeout) != "survived":
            sys.exit(f"{', '.join(TESTS[module])}: does not pass on the code as it is")
    every = [mutant for module, source in sources.items() for mutant in mutants(module, source)]
    random.Random(arguments.seed).shuffle(every)
    if arguments.again:
        survived = json.loads(arguments.again.read_text(encoding="utf-8"))["survivors"]
        every = [Mutant(found["module"], found["operator"], found["occurrence"]) for found in survived]
    counts: dict[str, collections.Counter[str]] = {module: collections.Counter() for module in TESTS}
    survivors = []
    end = time.monotonic() + 60 * arguments.minutes
    for number, mutant in enumerate(every):
        if time.monotonic() > end:
            break
        path, source = folder / "coba_core" / f"{mutant.module}.py", sources[mutant.module]
        mutated = mutate_code(source, get_operator(mutant.operator)(), mutant.occurrence)
        path.write_text(mutated)
        outcome = tested(folder, mutant.module, arguments.timeout)
        path.write_text(source)
        counts[mutant.module][outcome] += 1
        if outcome == "survived":
            change = difflib.unified_diff(source.splitlines(), mutated.splitlines(), lineterm="", n=0)
            survivors.append({**dataclasses.asdict(mutant), "change": list(change)[2:]})
            print(json.dumps(survivors[-1], ensure_ascii=False), flush=True)
        print(f"{number + 1} of {len(every)}", file=sys.stderr, flush=True)
    total = sum(counts.values(), collections.Counter())
    report = {
        "date": datetime.date.today().isoformat(), "python": platform.python_version(), "seed": arguments.seed,
        "mutants": len(every), "sampled": total.total(),
        "killed": (total["killed"] + total["timeout"]) / max(total.total(), 1),
        "modules": {module: dict(counter) for module, counter in counts.items()}, "survivors": survivors,
    }  # fmt: skip
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report, indent=1, ensure_ascii=False) + "\n"
    (arguments.output / f"{report['date']}.json").write_text(text)
    print(f"{total.total()} of {len(every)} mutants, {report['killed']:.1%} killed: {dict(total)}")


if __name__ == "__main__":
    main()
