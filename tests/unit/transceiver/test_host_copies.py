"""Kernel copies in several threads: every byte, one report, nothing written after it, the token's work before it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.unit.transceiver.rig import eventually
from transceiver.cma import CmaPlan, CmaReader
from transceiver.host_copies import HostCopies, HostCopy
from transceiver.transport import LandingRead, ReadBatch

MIB = 1 << 20


class Landing(LandingRead):
    """Remembers what had landed, and in which thread."""

    def __init__(self, target: NDArray[np.uint8], error: Exception | None = None, by_element: bool = False) -> None:
        self.parts = by_element
        self.spans: list[tuple[int, int]] = []
        self.target = target
        self.error = error
        self.seen: list[tuple[str, int]] = []

    @property
    def wants_landing(self) -> bool:
        return True

    @property
    def by_element(self) -> bool:
        return self.parts

    def landed(self, start: int, stop: int) -> None:
        size = self.target.nbytes // 32
        assert not self.parts or bool((self.target[start * size : stop * size] > 0).all())
        self.spans.append((start, stop))
        self.seen.append((threading.current_thread().name, int(self.target.min())))
        if self.error is not None:
            raise self.error


def batch_of(target: NDArray[np.uint8], pages: int, order: NDArray[np.int64]) -> ReadBatch:
    size = target.nbytes // pages
    local = target.ctypes.data + np.arange(pages) * size
    return ReadBatch(local.astype(np.uint64), (order * size).astype(np.uint64), np.full(pages, size, np.uint64))


@pytest.fixture
def source() -> NDArray[np.uint8]:
    return np.random.default_rng(3).integers(1, 256, 32 * MIB, dtype=np.uint8)


@pytest.fixture
def copies() -> Iterator[HostCopies]:
    made = HostCopies(1, lambda: None)
    yield made
    made.close()


def drive(copies: HostCopies, count: int) -> list[HostCopy]:
    done: list[HostCopy] = []

    def step() -> bool:
        copies.step()
        while (copy := copies.take()) is not None:
            done.append(copy)
        return len(done) == count

    assert eventually(step)
    return done


@pytest.mark.parametrize("pages", [1, 4, 512])
def test_every_byte_arrives_and_every_batch_is_reported_once(
    copies: HostCopies, source: NDArray[np.uint8], pages: int
) -> None:
    order = np.random.default_rng(pages).permutation(pages)
    targets = [np.zeros_like(source) for _ in range(3)]
    for number, target in enumerate(targets):
        copy = HostCopy(CmaReader(os.getpid()), batch_of(target, pages, order), source.ctypes.data, None, number)
        copies.add(copy)
    done = drive(copies, 3)
    assert sorted(copy.owner for copy in done) == [0, 1, 2]  # type: ignore[type-var]
    assert all(copy.error is None for copy in done)
    wanted = source.reshape(pages, -1)[order].reshape(-1)
    assert all((target == wanted).all() for target in targets)
    assert copies.take() is None


def test_the_helper_copies_while_the_loop_does_not(copies: HostCopies, source: NDArray[np.uint8]) -> None:
    target = np.zeros_like(source)
    token = Landing(target)
    copies.add(HostCopy(CmaReader(os.getpid()), batch_of(target, 4, np.arange(4)), source.ctypes.data, token, 0))
    assert eventually(lambda: bool(token.seen))
    assert token.seen[0][0].startswith("kvferry-copy")
    assert token.seen[0][1] > 0  # all of it was there before the work began
    assert len(drive(copies, 1)) == len(token.seen) == 1


def test_elements_are_worked_on_as_they_land_each_once(copies: HostCopies, source: NDArray[np.uint8]) -> None:
    target = np.zeros_like(source)
    token = Landing(target, by_element=True)
    copies.add(HostCopy(CmaReader(os.getpid()), batch_of(target, 32, np.arange(32)), source.ctypes.data, token, 0))
    assert drive(copies, 1)[0].error is None
    assert sorted(token.spans) == [(index, index + 1) for index in range(32)]  # pages of 1 MiB
    assert (target == source).all()


def test_what_the_tokens_work_raises_is_the_error_of_its_batch(copies: HostCopies, source: NDArray[np.uint8]) -> None:
    target = np.zeros_like(source)
    token = Landing(target, ValueError("no such page"))
    copies.add(HostCopy(CmaReader(os.getpid()), batch_of(target, 2, np.arange(2)), source.ctypes.data, token, 0))
    assert "no such page" in str(drive(copies, 1)[0].error)


def test_memory_that_is_not_there_ends_the_batch_with_an_error_once(copies: HostCopies) -> None:
    target = np.zeros(8 * MIB, np.uint8)
    copies.add(HostCopy(CmaReader(os.getpid()), batch_of(target, 4, np.arange(4)), 8, None, 0))
    assert "Bad address" in str(drive(copies, 1)[0].error)
    copies.step()
    assert copies.take() is None


def test_an_abandoned_batch_ends_and_writes_nothing_after_its_report(source: NDArray[np.uint8]) -> None:
    copies = HostCopies(0, lambda: None)  # nobody but this test copies
    target = np.zeros_like(source)
    copies.add(HostCopy(CmaReader(os.getpid()), batch_of(target, 32, np.arange(32)), source.ctypes.data, None, 7))
    assert copies.step()  # one piece
    copies.abandon({7}, "the link is closed")
    copy = copies.take()
    assert copy is not None
    assert copy.error == "the link is closed"
    written = target.copy()
    assert 0 < np.count_nonzero(written) < len(written)
    assert not copies.step()
    assert (target == written).all()
    copies.close()


def test_the_loop_is_woken_when_it_sleeps_and_only_then(source: NDArray[np.uint8]) -> None:
    woken = threading.Event()
    copies = HostCopies(1, woken.set)
    try:
        target = np.zeros(2 * MIB, np.uint8)
        assert copies.may_sleep()
        copies.add(HostCopy(CmaReader(os.getpid()), batch_of(target, 1, np.arange(1)), source.ctypes.data, None, 0))
        assert woken.wait(5)
        assert not copies.may_sleep()  # there is something to report
        assert copies.take() is not None
        assert copies.may_sleep()
    finally:
        copies.close()


def test_pieces_cover_every_byte_once() -> None:
    local, remote = np.asarray([0, 10 * MIB], np.uint64), np.asarray([5, 20 * MIB], np.uint64)
    plan = CmaPlan(local, remote, np.asarray([5 * MIB + 1, 100], np.uint64), 2 * MIB)
    spans = [span for piece in range(plan.pieces) for span in zip(*plan.columns(piece), strict=True)]
    assert spans == [
        (0, 5, 2 * MIB), (2 * MIB, 2 * MIB + 5, 2 * MIB), (4 * MIB, 4 * MIB + 5, MIB + 1), (10 * MIB, 20 * MIB, 100),
    ]  # fmt: skip
    assert [plan.call(piece)[4] for piece in range(plan.pieces)] == [2 * MIB, 2 * MIB, MIB + 101]


def test_without_more_threads_the_loop_copies_alone(
    copies: HostCopies, source: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    target = np.zeros_like(source)
    copies.add(HostCopy(CmaReader(os.getpid()), batch_of(target, 4, np.arange(4)), source.ctypes.data, None, 0))
    assert drive(copies, 1)[0].error is None
    assert (target == source).all()
