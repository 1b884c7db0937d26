"""State on disk: JSON with a checksum, written whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import tempfile
from collections.abc import Collection
from pathlib import Path
from typing import Any

State = dict[str, Any]
"""A JSON-able mapping that names its "kind" and "version"."""


def _digest(state: State) -> str:
    text = json.dumps(state, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def write_state(path: str | os.PathLike[str], state: State) -> None:
    """Writes `state` to `path` through a temporary file beside it: after a crash the old file or the new one is there.

    >>> folder = tempfile.mkdtemp()
    >>> write_state(folder + "/state.json", {"kind": "Example", "version": 1})
    >>> read_state(folder + "/state.json")
    {'kind': 'Example', 'version': 1}
    """
    target = Path(path)
    text = json.dumps({"sha256": _digest(state), "state": state}, allow_nan=False)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_state(path: str | os.PathLike[str]) -> State:
    """The state in `path`; ValueError that names the file if it is empty, cut short, edited or not a state."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or JSON that no state is
        raise ValueError(f"state file {os.fspath(path)}: not whole ({error})") from error
    if not isinstance(content, dict) or set(content) != {"sha256", "state"} or not isinstance(content["state"], dict):
        raise ValueError(f"state file {os.fspath(path)}: not a state written by coba_core")
    state: State = content["state"]
    try:
        digest = _digest(state)
    except ValueError as error:
        raise ValueError(f"state file {os.fspath(path)}: {error}") from error
    if digest != content["sha256"]:
        raise ValueError(f"state file {os.fspath(path)}: its checksum does not match, it was edited or damaged")
    return state


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file, its line ends as they are; ValueError that names the file if it is something else."""
    try:
        return Path(path).read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{os.fspath(path)}: not text in UTF-8 ({error})") from error


def check_state(state: State, kind: str, version: int, keys: Collection[str]) -> None:
    """ValueError unless `state` is of this kind, not newer than `version`, and has exactly these keys besides."""
    if not isinstance(state, dict):
        raise ValueError(f"state of {kind}: {type(state).__name__}, not a dict")
    if state.get("kind") != kind:
        raise ValueError(f"state of {kind}: its kind is {state.get('kind')!r}")
    found = state.get("version")
    if not isinstance(found, int) or found < 1:
        raise ValueError(f"state of {kind}: its version is {found!r}")
    if found > version:
        raise ValueError(f"state of {kind}: version {found} is newer than {version}, the newest known here")
    given, wanted = set(state) - {"kind", "version"}, set(keys)
    if given != wanted:
        missing, unknown = sorted(wanted - given), sorted(map(str, given - wanted))
        raise ValueError(f"state of {kind}: missing keys {missing}, unknown keys {unknown}")


def whole_number(name: str, x: Any, *, at_least: int | None = None) -> int:
    """x, an integer of any kind, as an int of at least so many; ValueError that names it otherwise."""
    try:
        number = operator.index(x)
    except TypeError as error:
        raise ValueError(f"{name} is {x!r}, not an integer") from error
    if at_least is not None and number < at_least:
        raise ValueError(f"{name} is {number}, not at least {at_least}")
    return number


def finite_number(
    name: str,
    x: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> float:
    """x as a float within the bounds; ValueError that names it otherwise."""
    try:
        number = float(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name} is {x!r}, not a number") from error
    bounds = [
        (f"of at least {at_least}", at_least is None or number >= at_least),
        (f"above {above}", above is None or number > above),
        (f"of at most {at_most}", at_most is None or number <= at_most),
        (f"below {below}", below is None or number < below),
    ]
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}, not a finite number")
    for need, holds in bounds:
        if not holds:
            raise ValueError(f"{name} is {number}, not a number {need}")
    return number
