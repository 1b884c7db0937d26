"""What is fuzzed: readers of files that a user or a crash can have changed.

Each target takes bytes and returns whether they were accepted; refusal is a ValueError that names the file (or the
state), and anything else is a fault. test_fuzz.py runs them by Hypothesis, fuzz.py by coverage.
"""

from __future__ import annotations

import copy
import json
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coba_core.integrations.grpo.config import load_config
from coba_core.integrations.grpo.study import load_study
from coba_core.integrations.grpo.tasks import read_problems

from coba_core import (
    Allocator,
    BudgetWarning,
    CapabilityAllocator,
    KnapsackAllocator,
    RankAllocator,
    UniformAllocator,
)
from coba_core.cli import read_pass_rates
from coba_core.evaluate_cli import read_samples
from coba_core.headroom_cli import read_log

FOLDER = Path(tempfile.mkdtemp(prefix="coba-fuzz-"))
KINDS: list[Callable[[], Allocator]] = [
    UniformAllocator,
    lambda: KnapsackAllocator(noise=0.02),
    CapabilityAllocator,
    lambda: CapabilityAllocator.released(noise=0.02),
    RankAllocator,
    lambda: RankAllocator(dataset_size=3),
]
IDS: list[int | str] = ["a", "b", 3, 4, 2**70]


def learned(kind: int) -> Allocator:
    """An allocator that has seen two steps."""
    allocator = KINDS[kind % len(KINDS)]()
    for _ in range(2):
        allocator.update(IDS, [1, 0, 1, 1, 0, 0.5, 0], [0, 0, 1, 1, 2, 3, 4])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BudgetWarning)
            allocator.allocate(IDS, 40)
    return allocator


def accepts(name: Path | str, read: Callable[[], Any]) -> bool:
    """Whether something is read; it is refused by a ValueError that begins with its name."""
    try:
        read()
    except ValueError as error:
        assert str(error).startswith(str(name)), str(error)
        return False
    return True


def loads(allocator: Allocator, name: str, load: Callable[[], None]) -> bool:
    """An allocator that refuses a state is as it was; one that takes it allocates."""
    state = allocator.state_dict()
    if not accepts(name, load):
        assert allocator.state_dict() == state
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BudgetWarning)
        for ids, total in (([*IDS, "new"], 50), (["new", "a", "a"], 100)):
            budgets = allocator.allocate(ids, total)
            assert budgets.sum() == total and budgets.min() >= 2 and budgets.max() <= 128
            allocator.update(ids, [1.0, 0.0], [0, 1])
    return True


def state_file(data: bytes) -> bool:
    """A state file, as bytes."""
    path = FOLDER / "state.json"
    path.write_bytes(data)
    allocator = learned(2)
    return loads(allocator, f"state file {path}: ", lambda: allocator.load(path))


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything within a state."""
    found = [path] if path else []
    if isinstance(node, dict | list):
        for key, inner in node.items() if isinstance(node, dict) else enumerate(node):
            found += places(inner, (*path, key))
    return found


def edited_state(data: bytes) -> bool:
    """A good state with some places replaced, as from a file with the right checksum: kind, lines of place and JSON."""
    if len(data) < 2:
        return False
    allocator = learned(data[0])
    state = copy.deepcopy(allocator.state_dict())
    for line in data[1:].split(b"\n"):
        try:
            value = json.loads(line[1:])
            json.dumps(value, allow_nan=False).encode()
        except (ValueError, RecursionError):
            continue
        where = places(state)
        *parents, last = where[line[0] % len(where)]
        node: Any = state
        for key in parents:
            node = node[key]
        node[last] = value
    return loads(allocator, "state of ", lambda: allocator.load_state_dict(state))


def config_file(data: bytes) -> bool:
    """A configuration of the loop, in YAML."""
    path = FOLDER / "config.yaml"
    path.write_bytes(data)
    return accepts(path, lambda: load_config(path))


def study_file(data: bytes) -> bool:
    """A study, in YAML."""
    path = FOLDER / "study.yaml"
    path.write_bytes(data)
    return accepts(path, lambda: load_study(path, FOLDER / "study"))


def problems_file(data: bytes) -> bool:
    """Problems of the loop, in JSONL."""
    path = FOLDER / "problems.jsonl"
    path.write_bytes(data)
    return accepts(path, lambda: read_problems(path, "prompt", "answer", "id", "exact"))


def samples_file(data: bytes) -> bool:
    """Samples of an evaluation, in JSONL."""
    path = FOLDER / "samples.jsonl"
    path.write_bytes(data)
    return accepts(path, lambda: read_samples(path))


def rates_jsonl(data: bytes) -> bool:
    """Pass rates for ``coba-core allocate``, in JSONL."""
    path = FOLDER / "rates.jsonl"
    path.write_bytes(data)
    return accepts(path, lambda: read_pass_rates(path, "pass_rate"))


def rates_csv(data: bytes) -> bool:
    """Pass rates for ``coba-core allocate``, in CSV."""
    path = FOLDER / "rates.csv"
    path.write_bytes(data)
    return accepts(path, lambda: read_pass_rates(path, "pass_rate"))


def allocations_log(data: bytes) -> bool:
    """The log that ``coba-core headroom`` reads."""
    path = FOLDER / "allocations.jsonl"
    path.write_bytes(data)
    return accepts(path, lambda: read_log(path, 2))


def _state_seed() -> bytes:
    path = FOLDER / "seed.json"
    learned(2).save(path)
    return path.read_bytes()


TARGETS: dict[Callable[[bytes], bool], bytes] = {
    state_file: _state_seed(),
    edited_state: b'\x02\x001\n\x05[1, "a"]\n\x09-1\n\x11null',
    config_file: b"steps: 10\nlr: 1e-4\nallocator: coba\nallocator_args: {kappa: 7}\nlora: null\noutput: out/x\n",
    study_file: b"seeds: 2\npools: {a: {task_args: {train: 8}}}\n"
    b"batches: {b: {prompts_per_step: 4}}\nmethods: {uniform: {}}\n",
    problems_file: b'{"prompt": "1+1=", "answer": 2, "id": "a"}\n'
    b'{"prompt": [{"role": "user", "content": "2"}], "answer": "2", "kind": "x"}\n',
    samples_file: b'{"prompt_id": "a", "correct": true, "answer": 2}\n'
    b'{"prompt_id": "b", "correct": 0, "answer": "3"}\n',
    rates_jsonl: b'{"id": 1, "pass_rate": 0.5}\n{"id": 2, "pass_rate": 1e-300}\n',
    rates_csv: b"id,pass_rate\n1,0.5\n2,.25\n",
    allocations_log: b'{"step": 1, "ids": ["a", "b"], "budgets": [2, 6], "rewards": [0.5, null]}\n',
}
"""Every target, and bytes that it may accept."""
