"""Files damaged at random are read, or refused by a ValueError that names them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("yaml")

from tests.fuzz.targets import IDS, TARGETS, edited_state

TOKENS = [
    b"", b"\n", b"\x00", b"\xff", b'"', b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-1", b"0.5", b"1e999",
    b"NaN", b"-Infinity", b"9" * 30, b"9" * 400, b"9" * 5000, b"[[]]", b'{"a": 1}', b'"\\ud800"',
    b"!!python/object/apply:os.getcwd []",
    b"&a [*a]", b"\xef\xbb\xbf", b"2020-01-01",
]  # fmt: skip


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The bytes with a few stretches replaced by tokens that mean something to some parser, or by anything."""
    data = whole
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = draw(st.integers(start, min(len(data), start + 24)))
        data = data[:start] + draw(st.sampled_from(TOKENS) | st.binary(max_size=6)) + data[end:]
    return data


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_damaged_files(target: Callable[[bytes], bool]) -> None:
    @given(damaged(TARGETS[target]))
    def check(data: bytes) -> None:
        target(data)

    check()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_anything_at_all(target: Callable[[bytes], bool]) -> None:
    @given(st.binary(max_size=200))
    def check(data: bytes) -> None:
        target(data)

    check()


@pytest.mark.parametrize("target", [t for t in TARGETS if t is not edited_state], ids=lambda target: target.__name__)
def test_undamaged_files_are_read(target: Callable[[bytes], bool]) -> None:
    assert target(TARGETS[target])


VALUES = [
    "null", "true", "0", "1", "-1", "2", "0.5", "-0.0", "1e300", "5e-324", str(2**63), str(2**64), str(2**200),
    "9" * 400, '""', '"a"',
    "[]", "[1]", '["a"]', "{}", '{"kind": 1}', "[[1]]", "[[], []]", '[1, "1"]', "[0.5, 0.5]",
]  # fmt: skip


@given(
    kind=st.integers(0, 5),
    edits=st.lists(st.tuples(st.integers(0, 255), st.sampled_from(VALUES)), min_size=1, max_size=3),
)
def test_edited_states(kind: int, edits: list[tuple[int, str]]) -> None:
    edited_state(bytes([kind]) + b"\n".join(bytes([place]) + value.encode() for place, value in edits))


@pytest.mark.parametrize("kind", range(6))
def test_every_place_of_a_state_with_every_value(kind: int) -> None:
    """One place at a time, which Hypothesis would find only by chance."""
    from tests.fuzz.targets import learned, places

    count = len(places(learned(kind).state_dict()))
    assert len(IDS) < count < 256
    for place in range(count):
        for value in VALUES:
            edited_state(bytes([kind, place]) + value.encode())
