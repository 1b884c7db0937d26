"""Memory does not grow with the number of calls; `python tests/leaks.py` looks at a million of them."""

from __future__ import annotations

import sys

import pytest

from tests import leaks

GROUPS = leaks.everything(["cython", "numba", "numpy"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("group", GROUPS)
def test_20_000_calls_keep_nothing(group: str) -> None:
    count = 2_000 if group == "numpy" else 6_000
    before, after = leaks.grown(GROUPS[group], count, 500)
    per_kind = count // len(GROUPS[group])  # how often each was called: one block kept each time would be this many
    assert after.blocks - before.blocks < per_kind // 2
    assert after.malloc - before.malloc < 16 * per_kind
    assert after.resident - before.resident < 2 << 20


def test_a_leak_is_seen() -> None:
    kept: list[bytearray] = []
    before, after = leaks.grown([lambda: kept.append(bytearray(64))], 6_000, 100)
    assert after.blocks - before.blocks > 3_000
