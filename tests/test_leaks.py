"""Memory does not grow with the number of calls; `python tests/leaks.py` looks at a million of them."""

from __future__ import annotations

import sys

import pytest

from tests import leaks

GROUPS = leaks.everything(["cython", "numba", "numpy"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("group", GROUPS)
def test_calls_keep_nothing(group: str) -> None:
    count = 2_000
    per_kind = count // len(GROUPS[group])  # how often each is called: one block kept each time would be this many
    # What is kept once, by a cache, grows some round; a leak grows every one.
    rounds = [leaks.grown(GROUPS[group], count, 0 if i else 500) for i in range(3)]
    assert min(after.blocks - before.blocks for before, after in rounds) < per_kind // 2
    assert min(after.malloc - before.malloc for before, after in rounds) < 16 * per_kind
    assert min(after.resident - before.resident for before, after in rounds) < 1 << 20


def test_a_leak_is_seen() -> None:
    kept: list[bytearray] = []
    before, after = leaks.grown([lambda: kept.append(bytearray(64))], 6_000, 100)
    assert after.blocks - before.blocks > 3_000
