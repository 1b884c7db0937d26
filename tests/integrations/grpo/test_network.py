"""A run on a local policy asks nothing of the network and starts no shell."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from coba_core.integrations.grpo.run import train

WATCHED = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto", "os.system")
seen: list[tuple[str, Any]] | None = None


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if seen is not None and event in WATCHED:
        seen.append((event, arguments))


@pytest.fixture
def events() -> Iterator[list[tuple[str, Any]]]:
    """What happens from here to the end of the test. An audit hook cannot be taken away, only told to look aside."""
    global seen
    sys.addaudithook(hook)
    seen = []
    yield seen
    seen = None


def test_a_run_stays_on_this_machine(small, events):
    assert train(small.replace(steps=2, eval_every=1), progress=False)["finished"]
    assert events == []
    with socket.socket() as closed, socket.socket() as other:
        closed.bind(("127.0.0.1", 0))  # bound, but nobody listens
        with pytest.raises(ConnectionRefusedError):
            other.connect(closed.getsockname())
    assert [event for event, _ in events] == ["socket.connect"]  # it would have been seen
