"""Frames over a stream: any cut, both bounds, ends."""

from __future__ import annotations

import contextlib
import socket
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transceiver.rig import eventually
from transceiver.control_socket import MAX_UNPROVEN_FRAME, ControlSocket
from transceiver.errors import LinkClosedError, TransceiverError
from transceiver.host_port import format_address, name_in, numeric, parse_address, with_host


@pytest.fixture
def ends() -> Iterator[tuple[ControlSocket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        control = ControlSocket.connect(*server.getsockname()[:2])
        raw, _ = server.accept()
        yield control, raw
        control.close()
        raw.close()


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "little") + payload


def test_messages_arrive_whole_and_in_order(ends: tuple[ControlSocket, socket.socket]) -> None:
    control, raw = ends
    got: list[bytes] = []
    stream = framed(b"one") + framed(b"") + framed(b"x" * 70_000)
    for start in range(0, len(stream), 9_000):
        raw.sendall(stream[start : start + 9_000])
        got += control.on_ready()
    assert eventually(lambda: got.extend(control.on_ready()) or len(got) == 3)
    assert got == [b"one", b"", b"x" * 70_000]


@given(st.lists(st.binary(max_size=300), max_size=6), st.integers(1, 50))
def test_any_cut_of_the_stream_gives_the_same_messages(messages: list[bytes], step: int) -> None:
    left, right = socket.socketpair()
    with right:
        control = ControlSocket.__new__(ControlSocket)  # a pair has no TCP options to set
        left.setblocking(False)
        control._socket, control._connected, control._incoming = left, True, bytearray()
        control._outgoing, control.limit, control.broken = deque(), 1000, ""
        stream, got = b"".join(map(framed, messages)), []
        for start in range(0, len(stream), step):
            right.sendall(stream[start : start + step])
            got += control.on_ready()
        assert got == messages
        assert not control.broken
        control.close()


def test_what_does_not_fit_waits_for_the_reader(ends: tuple[ControlSocket, socket.socket]) -> None:
    control, raw = ends
    assert eventually(lambda: control.on_ready() == [] and not control.wanted & 4)
    payload = bytes(range(256)) * 60_000
    control.send(payload)
    control.send(b"tail")
    assert control.waiting
    assert control.wanted & 4  # EPOLLOUT
    raw.setblocking(False)
    got = bytearray()

    def drained() -> bool:
        with contextlib.suppress(BlockingIOError):
            got.extend(raw.recv(1 << 20))
        control.on_ready()
        return len(got) == len(payload) + 4 + 8

    assert eventually(drained, 10)
    assert bytes(got) == framed(payload) + framed(b"tail")
    assert not control.waiting


def test_a_peer_that_never_reads_ends_the_link(ends: tuple[ControlSocket, socket.socket]) -> None:
    control, _ = ends
    assert eventually(lambda: control.on_ready() == [] and not control.wanted & 4)

    def talk() -> None:
        for _ in range(5000):
            control.send(b"y" * 65536)

    with pytest.raises(LinkClosedError, match="does not take messages"):
        talk()
    assert control.broken


@pytest.mark.parametrize("trusted", [False, True])
def test_a_stranger_may_not_announce_a_large_message(ends: tuple[ControlSocket, socket.socket], trusted: bool) -> None:
    control, raw = ends
    if trusted:
        control.trust()
    raw.sendall((MAX_UNPROVEN_FRAME + 1).to_bytes(4, "little") + b"z" * 100)
    assert eventually(lambda: bool(control.on_ready() == [] and (trusted or control.broken)))
    assert ("exceeds the bound" in control.broken) is not trusted


def test_the_end_of_the_peer_is_seen_after_its_last_message(ends: tuple[ControlSocket, socket.socket]) -> None:
    control, raw = ends
    raw.sendall(framed(b"last"))
    raw.close()
    got: list[bytes] = []
    assert eventually(lambda: got.extend(control.on_ready()) or bool(control.broken))
    assert (got, control.broken) == ([b"last"], "the peer closed the connection")
    with pytest.raises(LinkClosedError):
        control.send(b"too late")


def test_nobody_listens() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    control = ControlSocket.connect("127.0.0.1", port)
    assert eventually(lambda: control.on_ready() == [] and bool(control.broken))
    control.close()


def test_a_numeric_address_needs_no_look_up_and_a_name_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.getaddrinfo

    def at_once(*args: Any, flags: int = 0, **rest: Any) -> Any:
        assert flags & socket.AI_NUMERICHOST
        return real(*args, flags=flags, **rest)

    monkeypatch.setattr(socket, "getaddrinfo", at_once)
    assert numeric("127.0.0.1", 7)[4] == ("127.0.0.1", 7)
    assert numeric("::1", 7)[0] is socket.AF_INET6
    for name in ("node-1", "localhost", "x" * 70, "a..b"):
        with pytest.raises(OSError, match="is not a numeric address"):
            ControlSocket.connect(name, 7)
        assert name_in(f"nixl://{name}:7") == name_in(f"ucx://{name}:7") == name
    others = ("ucx://10.0.0.1:7", "nixl://[::1]:7", "inproc://node:7", "ucx://:7", "ucx://node:0", "nonsense", "")
    assert [name_in(address) for address in others] == [""] * 7
    assert with_host("ucx://node-1:7", "10.0.0.2") == "ucx://10.0.0.2:7"
    assert with_host("nixl://node-1:7", "fe80::1%lo") == "nixl://[fe80::1%lo]:7"


def test_addresses() -> None:
    assert parse_address("nixl", format_address("nixl", "::1", 7)) == ("::1", 7)
    assert parse_address("nixl", "nixl://node-1:65535") == ("node-1", 65535)
    for wrong in (
        "ucx://node:1",
        "nixl://:1",
        "nixl://node",
        "nixl://node:0",
        "nixl://node:65536",
        "nixl://node:x",
        "",
    ):
        with pytest.raises(TransceiverError, match="both sides need the same backend"):
            parse_address("nixl", wrong)
