"""State files: whole or refused, by name; numbers checked by name."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coba_core.state import check_state, finite_number, read_state, whole_number, write_state

STATE: dict[str, Any] = {
    "kind": "Example",
    "version": 1,
    "keys": [1, "1", "ключ", 2**100],
    "numbers": [0.1, 1e-300, -0.0, 2.5],
    "inner": {"b": None, "a": True},
}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    for given_path in (path, str(path)):
        write_state(given_path, STATE)
        assert read_state(given_path) == STATE
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
    assert set(json.loads(path.read_text())) == {"sha256", "state"}


@given(state=st.dictionaries(st.text(), JSON, max_size=5))
def test_any_json_comes_back(tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any]) -> None:
    path = tmp_path_factory.getbasetemp() / "any.json"
    write_state(path, state)
    assert read_state(path) == state


@pytest.mark.parametrize("bad", [{"x": float("nan")}, {"x": float("inf")}, {"x": object()}, {"x": b"1"}])
def test_what_cannot_be_written_leaves_the_old_file(tmp_path: Path, bad: dict[str, Any]) -> None:
    path = tmp_path / "state.json"
    write_state(path, STATE)
    with pytest.raises((ValueError, TypeError)):
        write_state(path, bad)
    assert read_state(path) == STATE
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    """Where files may not grow beyond 512 bytes, a larger state fails, and nothing is lost or left over."""
    path = tmp_path / "state.json"
    write_state(path, STATE)
    code = (
        "import resource, signal, sys; from coba_core.state import write_state\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))\n"
        "write_state(sys.argv[1], {'x': 'y' * 100_000})"
    )
    if sys.platform == "win32":
        pytest.skip("no resource limits on Windows")
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.returncode == 1 and "OSError" in done.stderr
    assert read_state(path) == STATE
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        write_state(tmp_path / "nowhere" / "state.json", STATE)
    with pytest.raises(FileNotFoundError, match=r"absent\.json"):
        read_state(tmp_path / "absent.json")


def test_replacing_goes_through_a_symlinked_folder(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    os.symlink(tmp_path / "real", tmp_path / "link")
    write_state(tmp_path / "link" / "state.json", STATE)
    assert read_state(tmp_path / "real" / "state.json") == STATE


def written(tmp_path: Path) -> tuple[Path, bytes]:
    path = tmp_path / "state.json"
    write_state(path, STATE)
    return path, path.read_bytes()


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path, whole = written(tmp_path)
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"^state file {re.escape(str(path))}: "):
            read_state(path)


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    """Unless it changes nothing of the state, such as white space between tokens."""
    path, whole = written(tmp_path)
    for place in range(len(whole)):
        for bit in (0, 4, 6):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            try:
                state = read_state(path)
            except ValueError as error:
                assert str(error).startswith(f"state file {path}: ")
            else:
                assert state == STATE


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "not whole"),
        (b"\x80\x04\x95", "not whole"),  # a pickle
        (b"PK\x03\x04", "not whole"),  # a zip file, such as torch writes
        (b"{}", "not a state written by coba_core"),
        (b"[]", "not a state written by coba_core"),
        (b"3", "not a state written by coba_core"),
        (b'{"sha256": "", "state": []}', "not a state written by coba_core"),
        (b'{"sha256": "", "state": {}, "more": 1}', "not a state written by coba_core"),
        (b'{"sha256": "", "state": {}}', "its checksum does not match"),
        (b'{"sha256": null, "state": {"x": 1}}', "its checksum does not match"),
        (b'{"sha256": "", "state": {"x": NaN}}', "Out of range"),
        (b"[" * 200_000, "not whole"),
        (b'{"sha256": "", "state": {"x": ' + b"9" * 5000 + b"}}", "not whole"),
    ],
)
def test_foreign_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "state.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^state file {re.escape(str(path))}: .*{message}"):
        read_state(path)


def test_an_edited_state(tmp_path: Path) -> None:
    path, whole = written(tmp_path)
    path.write_bytes(whole.replace(b"2.5", b"2.6"))
    with pytest.raises(ValueError, match="its checksum does not match, it was edited or damaged"):
        read_state(path)


@pytest.mark.parametrize(
    "state, message",
    [
        (None, "NoneType, not a dict"),
        ([], "list, not a dict"),
        ({}, "its kind is None"),
        ({"kind": "Other", "version": 1, "a": 0}, "its kind is 'Other'"),
        ({"kind": "Example", "a": 0}, "its version is None"),
        ({"kind": "Example", "version": 1.0, "a": 0}, "its version is 1.0"),
        ({"kind": "Example", "version": 0, "a": 0}, "its version is 0"),
        ({"kind": "Example", "version": 4, "a": 0}, "version 4 is newer than 3, the newest known"),
        ({"kind": "Example", "version": 3}, r"missing keys \['a'\], unknown keys \[\]"),
        ({"kind": "Example", "version": 3, "a": 0, "b": 1, 7: 2}, r"missing keys \[\], unknown keys \['7', 'b'\]"),
    ],
)
def test_check_state(state: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^state of Example: {message}"):
        check_state(state, "Example", 3, ("a",))
    check_state({"kind": "Example", "version": 3, "a": 0}, "Example", 3, ("a",))
    check_state({"kind": "Example", "version": 1, "a": 0}, "Example", 3, ["a"])


def test_finite_number() -> None:
    import numpy as np

    assert finite_number("x", np.float32(0.5)) == 0.5 and type(finite_number("x", 1)) is float
    assert finite_number("x", 2, at_least=2, at_most=2) == 2.0
    for bounds, x, need in (
        ({"at_least": 1}, 0.5, "of at least 1"),
        ({"above": 1}, 1, "above 1"),
        ({"at_most": 1}, 1.5, "of at most 1"),
        ({"below": 1}, 1, "below 1"),
    ):
        with pytest.raises(ValueError, match=f"^x is {float(x)}, not a number {need}"):
            finite_number("x", x, **bounds)
    for wrong in (float("nan"), float("-inf")):
        with pytest.raises(ValueError, match=f"^x is {wrong}, not a finite number"):
            finite_number("x", wrong)
    for nothing in (None, "abc", [1]):
        with pytest.raises(ValueError, match=r"^x is .*, not a number"):
            finite_number("x", nothing)


def test_whole_number() -> None:
    import numpy as np

    assert whole_number("x", np.int32(7), at_least=7) == 7 and type(whole_number("x", np.uint8(7))) is int
    with pytest.raises(ValueError, match=r"^x is 6, not at least 7"):
        whole_number("x", 6, at_least=7)
    for wrong in (1.0, "1", None):
        with pytest.raises(ValueError, match=rf"^x is {re.escape(repr(wrong))}, not an integer"):
            whole_number("x", wrong)
