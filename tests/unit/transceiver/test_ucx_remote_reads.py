"""Reads by message: every byte to its place, what comes late is dropped, only registered memory is sent."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache.storage.page_storage import MemoryRegion
from transceiver.ucx_remote_reads import Answers, ReadServer, RemoteReads

SIZES = np.asarray([5, 600_000, 1], np.uint64)


class Wire:
    """Takes the place of a link: hands over to the reader what the other side sends, or keeps it."""

    def __init__(self, reads: RemoteReads, *, slow: bool = False) -> None:
        self.reads, self.slow, self.sent, self.freed = reads, slow, 0, 0
        self.handle = 1
        self.fabric = SimpleNamespace(ucp=self)

    def send_data(self, _handle: int, _am_id: int, header: bytes, address: int, nbytes: int) -> int:
        self.sent += 1
        self.reads.arrived(header, address, nbytes)
        return self.sent if self.slow else 0

    def status(self, _request: int) -> int:
        return 1 if self.slow else 0

    def free(self, _request: int) -> None:
        self.freed += 1


@pytest.fixture
def memory() -> np.ndarray[Any, Any]:
    return np.random.default_rng(3).integers(0, 255, 1 << 20, np.uint8)


def addresses(memory: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.asarray([7, 1000, 700_000], np.uint64) + np.uint64(memory.ctypes.data)


def region(memory: np.ndarray[Any, Any]) -> MemoryRegion:
    return MemoryRegion(memory.ctypes.data, memory.nbytes, 4096, "cpu")


def test_every_byte_comes_to_its_place(memory: np.ndarray[Any, Any]) -> None:
    here, reads, answers = np.zeros_like(memory), RemoteReads(), Answers()
    number, message = reads.ask(addresses(here), addresses(memory), SIZES)
    assert reads.left(number) == int(SIZES.sum())
    assert answers.add(message, [region(memory)])
    wire: Any = Wire(reads)
    assert not answers.send(wire)
    assert (reads.left(number), wire.sent) == (0, 5)  # the large one in three
    for at, size in zip((7, 1000, 700_000), SIZES.tolist(), strict=True):
        assert (here[at : at + size] == memory[at : at + size]).all()
        here[at : at + size] = 0
    assert not here.any()


def test_what_comes_for_a_batch_that_is_over_is_dropped(memory: np.ndarray[Any, Any]) -> None:
    here, reads, answers = np.zeros_like(memory), RemoteReads(), Answers()
    number, message = reads.ask(addresses(here), addresses(memory), SIZES)
    assert answers.add(message, [region(memory)])
    reads.forget(number)
    wire: Any = Wire(reads)
    answers.send(wire)
    assert wire.sent == 5
    assert not here.any()


@pytest.mark.parametrize("shift", [-(1 << 21), (1 << 20) - 700_000, 1 << 40])
def test_memory_outside_the_regions_is_not_sent(memory: np.ndarray[Any, Any], shift: int) -> None:
    _, message = RemoteReads().ask(SIZES, (addresses(memory).astype(np.int64) + shift).astype(np.uint64), SIZES)
    assert not Answers().add(message, [region(memory)])


def test_sizes_that_run_over_are_refused(memory: np.ndarray[Any, Any]) -> None:
    huge = np.asarray([2**64 - 1, 1, 1], np.uint64)
    message = RemoteReads().ask(SIZES, addresses(memory), np.ones(3, np.uint64))[1]
    assert not Answers().add(message[:-24] + huge.tobytes(), [region(memory)])


@pytest.mark.parametrize("cut", [0, 3, 12, 20])
def test_a_message_cut_short_is_refused(memory: np.ndarray[Any, Any], cut: int) -> None:
    _, message = RemoteReads().ask(SIZES, addresses(memory), SIZES)
    assert not Answers().add(message[:cut], [region(memory)])


def test_a_slow_peer_bounds_what_waits(memory: np.ndarray[Any, Any]) -> None:
    reads, answers = RemoteReads(), Answers()
    many = np.full(100, memory.ctypes.data, np.uint64)
    _, message = reads.ask(many, many, np.ones(100, np.uint64))
    assert answers.add(message, [region(memory)])
    wire: Any = Wire(reads, slow=True)
    assert not answers.send(wire)
    assert (wire.sent, answers.send(wire), wire.sent) == (16, False, 16)
    assert not answers.end(wire.status, wire.free)
    wire.slow = False
    assert answers.end(wire.status, wire.free)
    assert (wire.freed, answers.send(wire), wire.sent) == (16, False, 16)


def test_a_peer_may_not_ask_for_more_and_more(memory: np.ndarray[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits is bounded, whatever the peer takes."""
    monkeypatch.setattr("transceiver.ucx_remote_reads._MAX_ELEMENTS", 100)
    answers, reads = Answers(), RemoteReads()

    def ask() -> tuple[int, bytes]:
        return reads.ask(*(np.full(24, value, np.uint64) for value in (1, memory.ctypes.data, 1)))

    number, message = ask()
    assert [answers.add(each, [region(memory)]) for each in (message, *(ask()[1] for _ in range(4)))] == [
        True, True, True, True, False,
    ]  # fmt: skip
    assert answers.add(RemoteReads.take_back(number), [])
    assert answers.add(ask()[1], [region(memory)])
    assert not answers.add(ask()[1], [region(memory)])
    answers.send(Wire(RemoteReads()))  # type: ignore[arg-type]
    answers.send(Wire(RemoteReads()))  # type: ignore[arg-type]
    assert answers.add(ask()[1], [region(memory)])


def test_nothing_more_is_sent_of_a_batch_that_was_taken_back(memory: np.ndarray[Any, Any]) -> None:
    here, reads, answers = np.zeros_like(memory), RemoteReads(), Answers()
    unwanted, message = reads.ask(addresses(here), addresses(memory), SIZES)
    assert answers.add(message, [region(memory)])
    wanted, message = reads.ask(addresses(here), addresses(memory), SIZES)
    assert answers.add(message, [region(memory)])
    assert answers.add(reads.take_back(unwanted), [region(memory)])
    assert answers.add(reads.take_back(77), [region(memory)])  # of which nothing is known
    wire: Any = Wire(reads)
    assert not answers.send(wire)
    assert (reads.left(unwanted), reads.left(wanted), wire.sent) == (int(SIZES.sum()), 0, 5)


@pytest.mark.parametrize(("trusted", "size", "kept"), [(True, 100, True), (False, 100, False), (True, 65 << 20, False)])
def test_of_a_stranger_nothing_is_kept(trusted: bool, size: int, kept: bool, memory: np.ndarray[Any, Any]) -> None:
    """Not even a copy of what it sends: that would be tens of megabytes a message, without the secret."""
    link: Any = SimpleNamespace(trusted=trusted, peer="stranger")
    failed: list[Any] = []
    server = ReadServer({1: link}, [region(memory)], failed.append)
    server.on_ask(2, 0, 10)  # a link that is gone
    server.on_ask(1, memory.ctypes.data, size)
    assert (len(server._asked), failed) == ((1, []) if kept else (0, [link]))
