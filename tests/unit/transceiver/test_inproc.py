"""The transport inside one process: who connects to one that is just ending hears of it at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from transceiver.inproc import InprocTransport


class Heard:
    """Notes what its transport tells."""

    def __init__(self) -> None:
        self.accepted: list[Any] = []
        self.lost: list[tuple[Any, str]] = []

    def on_accept(self, link: Any) -> None:
        self.accepted.append(link)

    def on_message(self, link: Any, payload: bytes) -> None: ...

    def on_get_done(self, link: Any, token: object, error: str | None) -> None: ...

    def on_lost(self, link: Any, reason: str) -> None:
        self.lost.append((link, reason))


@pytest.fixture
def sides() -> Iterator[tuple[InprocTransport, Heard, InprocTransport, Heard]]:
    listener, caller, heard, told = InprocTransport("inproc-test-a"), InprocTransport("inproc-test-b"), Heard(), Heard()
    listener.open(heard)
    caller.open(told)
    yield listener, heard, caller, told
    listener.close()
    caller.close()


@pytest.mark.parametrize("end", ["close", "kill"])
@pytest.mark.parametrize("heard_of", [False, True])
def test_the_end_reaches_who_has_just_connected(
    sides: tuple[InprocTransport, Heard, InprocTransport, Heard], end: str, heard_of: bool
) -> None:
    """Before or after the other side has heard of the connection: else only a time-out would end the link."""
    listener, heard, caller, told = sides
    link = caller.connect(listener.address)
    if heard_of:
        listener.poll(0)
        assert len(heard.accepted) == 1
    getattr(listener, end)()
    caller.poll(0)
    assert [(lost, bool(reason)) for lost, reason in told.lost] == [(link, True)]
    assert not link.open


def test_nobody_listens_there_any_more(sides: tuple[InprocTransport, Heard, InprocTransport, Heard]) -> None:
    listener, _, caller, told = sides
    listener.close()
    link = caller.connect(listener.address)
    caller.poll(0)
    assert told.lost == [(link, "nobody listens at this address")]
