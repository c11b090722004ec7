"""A UCX link's kernel copies, without UCX: reads at once, what a failed start leaves, the end of the transport."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.transceiver.rig import Pair, pair
from transceiver import CacheTransceiverConfig, TransferStatus
from transceiver.cma import CmaReader
from transceiver.host_copies import HostCopies
from transceiver.inproc_link import InprocLink
from transceiver.transport import ReadBatch, RemoteRegion
from transceiver.ucx import UcxTransport
from transceiver.ucx_link import UcxLink, UcxRemoteRegion

HELD = np.arange(10, 20, dtype=np.uint64)


def make_link(*, cma: bool = True) -> UcxLink:
    owner: Any = SimpleNamespace(copies=HostCopies(0, lambda: None), no_cma={}, device_of=lambda _: "cpu")
    link = UcxLink(owner, SimpleNamespace(), SimpleNamespace(handle=1), "peer")  # type: ignore[arg-type]
    link.cma = CmaReader(os.getpid()) if cma else None
    return link


def region(device: str = "cpu", address: int | None = None) -> UcxRemoteRegion:
    return UcxRemoteRegion(HELD.ctypes.data if address is None else address, HELD.nbytes, b"", device)


def numbers_of(target: NDArray[np.uint64]) -> ReadBatch:
    return ReadBatch.single(target.ctypes.data, 3 * 8, target.nbytes)


def test_a_few_bytes_are_read_at_once() -> None:
    target = np.zeros(4, np.uint64)
    assert make_link().read_now(numbers_of(target), region())
    assert target.tolist() == [13, 14, 15, 16]


@pytest.mark.parametrize("why", ["no cma", "device memory", "closed"])
def test_only_the_kernels_copy_of_host_memory_is_done_at_once(why: str) -> None:
    link, target = make_link(cma=why != "no cma"), np.zeros(4, np.uint64)
    link.open = why != "closed"
    assert not link.read_now(numbers_of(target), region("cuda:0" if why == "device memory" else "cpu"))
    assert not target.any()


def test_a_read_that_fails_at_once_is_left_to_get_which_says_why() -> None:
    link, batch = make_link(), numbers_of(np.zeros(4, np.uint64))
    assert not link.read_now(batch, region(address=8))
    link.get(batch, region(address=8), None, "token")
    assert link.owner.copies.step()
    copy = link.owner.copies.take()
    assert copy is not None
    assert "Bad address" in str(copy.error)


class AtOnce:
    """`InprocLink.read_now` by the kernel, in this process; `address` takes the place of the peer's numbers."""

    def __init__(self, address: int | None = None) -> None:
        self.address = address
        self.answers: list[bool] = []

    def __call__(self, _: object, batch: ReadBatch, remote: RemoteRegion) -> bool:
        base: int = self.address or remote.address  # type: ignore[attr-defined]
        self.answers.append(make_link().read_now(batch, region(address=base)))
        return self.answers[-1]


def pull_while(p: Pair, monkeypatch: pytest.MonkeyPatch, at_once: AtOnce, *, stale: bool) -> Any:
    monkeypatch.setattr(InprocLink, "read_now", lambda *args: at_once(*args))
    if stale:
        original = p.holder._holder._tell

        def tell(link: Any, message: Any) -> None:
            original(link, message)
            if type(message).__name__ == "Grant":
                p.source.generations()[1] += 1  # given out anew after the grant

        monkeypatch.setattr(p.holder._holder, "_tell", tell)
    return p.pull(p.publish()).future.result(5)


@pytest.mark.parametrize("stale", [False, True])
def test_numbers_read_at_once_still_find_a_page_given_out_anew(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = AtOnce()
    with pair(verify=False) as p:
        outcome = pull_while(p, monkeypatch, at_once, stale=stale)
        assert at_once.answers == [True]
        assert outcome.status is (TransferStatus.FAILED if stale else TransferStatus.DONE)
        assert outcome.blocks == (2 if stale else 3)


@pytest.mark.parametrize("stale", [False, True])
def test_numbers_that_cannot_be_read_at_once_are_read_by_get(stale: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = AtOnce(address=8)
    with pair(verify=False) as p:
        outcome = pull_while(p, monkeypatch, at_once, stale=stale)
        assert at_once.answers == [False]
        assert outcome.status is (TransferStatus.FAILED if stale else TransferStatus.DONE)


def test_a_copy_that_cannot_be_made_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("transceiver.ucx_link.HostCopy", refuse)
    link = make_link()
    with pytest.raises(MemoryError):
        link.get(numbers_of(np.zeros(4, np.uint64)), region(), None, "token")
    assert not link.copies


def test_copy_threads_end_with_the_transport_even_when_a_link_cannot_be_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = UcxTransport("127.0.0.1", CacheTransceiverConfig())
    closed, dropped = [], []
    transport._epoll = SimpleNamespace(close=lambda: None)  # type: ignore[assignment]
    for number in (1, 2):
        transport._links[number] = SimpleNamespace(sends=(), peer=number)  # type: ignore[assignment]

    def drop(link: Any, _: object) -> None:
        dropped.append(link.peer)
        raise RuntimeError("no")

    monkeypatch.setattr(transport, "drop", drop)
    monkeypatch.setattr(transport.copies, "close", lambda: closed.append(True))
    transport.close()
    assert (dropped, closed, transport._epoll) == ([1, 2], [True], None)


@pytest.mark.parametrize(("link", "size", "kept"), [
    ("trusted", 64 << 20, True), ("trusted", (64 << 20) + 1, False), ("stranger", 4 << 20, True),
    ("stranger", (4 << 20) + 1, False), ("unknown", (4 << 20) + 1, False),
])  # fmt: skip
def test_a_large_message_of_a_stranger_is_not_even_copied(link: str, size: int, kept: bool) -> None:
    transport, data = UcxTransport("127.0.0.1", CacheTransceiverConfig()), np.zeros(size, np.uint8)
    if link != "unknown":
        transport._links[1] = SimpleNamespace(trusted=link == "trusted")  # type: ignore[assignment]
    transport._on_am(1, data.ctypes.data, size)
    assert [len(payload) for _, payload in transport._inbox] == ([size] if kept else [])
    transport._links.clear()
    transport.close()
