"""Reads over a NIXL agent that answers as told: nothing is forgotten while the agent may still write."""

from __future__ import annotations

import errno
import socket
import time
from typing import Any

import numpy as np
import pytest

from transceiver import CacheTransceiverConfig, TransceiverBackend
from transceiver.errors import TransceiverError
from transceiver.nixl_fabric import NixlFabric
from transceiver.nixl_link import NixlLink, NixlRemoteRegion
from transceiver.nixl_transport import NixlTransport
from transceiver.transport import ReadBatch

REMOTE = NixlRemoteRegion(0, 64, "DRAM", 0, "their agent")


class Agent:
    """Says of each call what `raises` holds for its name, and of a read's state what `states` holds next."""

    def __init__(self) -> None:
        self.raises: dict[str, Exception] = {}
        self.states: list[str] = []
        self.registered: list[str] = []
        self.handles: list[str] = []
        self.known: list[str] = []

    def _say(self, name: str) -> None:
        if name in self.raises:
            raise self.raises[name]

    def get_xfer_descs(self, rows: Any, _: str) -> Any:
        return rows

    def register_memory(self, *_: object) -> str:
        self.registered.append(f"memory {len(self.registered)}")
        return self.registered[-1]

    def deregister_memory(self, registered: str, _: object) -> None:
        self.registered.remove(registered)

    def get_partial_agent_metadata(self, *_: object) -> bytes:
        return b"metadata"

    def add_remote_agent(self, metadata: bytes) -> bytes:
        self._say("add_remote_agent")
        self.known.append(metadata.decode())
        return metadata

    def remove_remote_agent(self, name: str) -> None:
        self.known.remove(name)

    def get_new_notifs(self, _: object) -> None:
        pass

    def initialize_xfer(self, *_: object) -> str:
        self._say("initialize_xfer")
        self.handles.append("handle")
        return "handle"

    def transfer(self, _: str) -> str:
        self._say("transfer")
        return "PROC"

    def query_xfer_backend(self, _: str) -> str:
        self._say("query_xfer_backend")
        return "UCX"

    def check_xfer_state(self, _: str) -> str:
        self._say("check_xfer_state")
        return self.states.pop(0) if self.states else "PROC"

    def release_xfer_handle(self, handle: str) -> None:
        self._say("release_xfer_handle")
        self.handles.remove(handle)


class Handler:
    """What the transport reports."""

    def __init__(self) -> None:
        self.done: list[tuple[object, str | None]] = []
        self.accepted: list[object] = []

    def on_accept(self, link: object) -> None:
        self.accepted.append(link)

    def on_message(self, link: object, payload: bytes) -> None:
        raise AssertionError(payload)

    def on_get_done(self, link: object, token: object, error: str | None) -> None:
        self.done.append((token, error))

    def on_lost(self, link: object, reason: str) -> None:
        pass


class Rig:
    """A transport over the agent, with one link to a socket that says nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.agent = Agent()

        def fabric(*_: object) -> NixlFabric:
            made = NixlFabric.__new__(NixlFabric)
            made._agent, made._regions, made._registered, made._users, made.reads = self.agent, [], [], {}, []
            return made

        monkeypatch.setattr("transceiver.nixl_transport.NixlFabric", fabric)
        config = CacheTransceiverConfig(backend=TransceiverBackend.NIXL)
        self.transport = NixlTransport("w", "127.0.0.1", config)
        self.handler = Handler()
        self.transport.open(self.handler)
        self.peer = socket.create_server(("127.0.0.1", 0))
        self.link: NixlLink = self.transport.connect(f"nixl://127.0.0.1:{self.peer.getsockname()[1]}")

    @property
    def fabric(self) -> NixlFabric:
        return self.transport.fabric

    def get(self, token: object = "t") -> None:
        target = np.zeros(8, np.uint8)
        self.link.get(ReadBatch.single(target.ctypes.data, 0, 8), REMOTE, None, token)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = Rig(monkeypatch)
    yield made
    made.transport.close()
    made.peer.close()


def test_a_read_is_over_when_the_agent_says_so(rig: Rig) -> None:
    rig.get()
    assert rig.link.transport == "nixl/ucx"
    assert rig.fabric.turn() == []
    assert (rig.fabric.has_reads(rig.link), rig.agent.handles, len(rig.agent.registered)) == (True, ["handle"], 1)
    rig.agent.states = ["DONE"]
    rig.transport.poll(0)
    assert rig.handler.done == [("t", None)]
    assert (rig.fabric.has_reads(rig.link), rig.agent.handles, rig.agent.registered) == (False, [], [])


def test_a_transport_without_a_name_is_no_reason_to_forget_a_read(rig: Rig) -> None:
    rig.agent.raises["query_xfer_backend"] = RuntimeError("invalid parameter")
    rig.get()
    assert (rig.link.transport, rig.fabric.has_reads(rig.link)) == ("nixl", True)
    rig.agent.states = ["DONE"]
    rig.transport.poll(0)
    assert rig.handler.done == [("t", None)]


def test_a_start_broken_off_keeps_the_read_until_the_agent_is_done_with_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transceiver.nixl_transport._DRAIN_S", 0.02)
    rig.agent.raises["transfer"] = RuntimeError("the second descriptor")
    rig.get()
    rig.transport.poll(0)  # the link is given up
    assert not rig.link.open
    assert (rig.handler.done, rig.fabric.has_reads(rig.link), rig.agent.handles) == ([], True, ["handle"])
    rig.agent.states = ["DONE"]
    rig.transport.poll(0)
    ((token, error),) = rig.handler.done
    assert (token, "the second descriptor" in str(error)) == ("t", True)
    assert (rig.fabric.reads, rig.agent.handles, rig.agent.registered) == ([], [], [])


def test_a_failed_read_whose_handle_stays_is_not_over(rig: Rig) -> None:
    rig.get()
    rig.agent.raises["check_xfer_state"] = RuntimeError("remote disconnected")
    rig.agent.raises["release_xfer_handle"] = RuntimeError("still active")
    assert rig.fabric.turn() == rig.fabric.turn() == []
    assert (rig.fabric.has_reads(rig.link), len(rig.agent.registered)) == (True, 1)
    del rig.agent.raises["release_xfer_handle"]
    (read,) = rig.fabric.turn()
    assert "remote disconnected" in str(read.error)
    assert (rig.fabric.reads, rig.agent.registered) == ([], [])


def test_a_finished_read_whose_handle_stays_is_over(rig: Rig) -> None:
    rig.get()
    rig.agent.states = ["DONE"]
    rig.agent.raises["release_xfer_handle"] = RuntimeError("why not")
    assert [read.error for read in rig.fabric.turn()] == [None]


def test_a_read_that_cannot_be_made_leaves_nothing_behind(rig: Rig) -> None:
    rig.agent.raises["initialize_xfer"] = RuntimeError("not found")
    with pytest.raises(TransceiverError, match="not found"):
        rig.get()
    assert (rig.fabric.reads, rig.agent.registered, rig.agent.handles) == ([], [], [])


def test_a_peer_is_forgotten_after_its_last_read(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transceiver.nixl_transport._DRAIN_S", 0.02)
    rig.fabric.load(rig.link, b"their agent")
    rig.get()
    rig.link.close()
    assert rig.agent.known == ["their agent"]
    rig.agent.states = ["DONE"]
    rig.transport.poll(0)
    assert rig.handler.done == [("t", "the link is closed")]
    assert rig.agent.known == []


def test_the_agent_ends_with_its_transport_even_when_a_link_does_not(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def drop(*_: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(rig.transport, "drop", drop)
    rig.transport.close()
    assert rig.fabric._agent is None


def test_without_descriptors_nobody_is_let_in_and_the_loop_does_not_spin(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("transceiver.nixl_transport._ACCEPT_PAUSE_S", 0.1)
    listener: Any = rig.transport._listener

    class Short:
        def __init__(self) -> None:
            self.tries: list[float] = []

        def accept(self) -> Any:
            self.tries.append(time.monotonic())
            if len(self.tries) <= 2:
                raise OSError(errno.EMFILE, "Too many open files")
            return listener.accept()

        def __getattr__(self, name: str) -> Any:
            return getattr(listener, name)

    short: Any = Short()
    rig.transport._listener = short
    with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        for _ in range(500):
            rig.transport.poll(0.01)
            if rig.handler.accepted:
                break
    assert (len(short.tries), len(rig.handler.accepted)) == (3, 1)
    assert short.tries[1] - short.tries[0] >= 0.1 <= short.tries[2] - short.tries[1]
    assert len([r for r in caplog.records if "could not be accepted" in r.message]) == 2
