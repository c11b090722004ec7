"""Copies from peers of the same host: the loop's thread and helper threads take pieces of batches from one queue.

One core does not use the memory's bandwidth up, so two are put to it; how a piece is copied is a `HostReader`'s affair
(a kernel call, or a copy from a mapping). Used by `transceiver.ucx` only. A piece is copied outside any lock; a batch
is reported once, when no thread can write for it any more.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection

import numpy as np

from transceiver.copy_plan import HostReader
from transceiver.transport import LandingRead, ReadBatch

__all__ = ["HostCopies", "HostCopy"]

_log = logging.getLogger(__name__)
_PIECE_BYTES = 2 << 20
_WORKED_PIECE_BYTES = 1 << 20  # stays in the cache between the copy and the work
_WAKE_BYTES = 768 << 10  # less than this is done before a helper has woken up


class HostCopy:
    """A batch on its way. `owner` is whatever the transport wants back with it.

    What a token wants to do with what has landed is done by the thread that copied the piece, while the bytes are in
    its core's cache.
    """

    __slots__ = (
        "_plan",
        "_reader",
        "_token",
        "_whole",
        "error",
        "nbytes",
        "next",
        "owner",
        "pieces",
        "running",
    )

    def __init__(self, reader: HostReader, batch: ReadBatch, base: int, token: object, owner: object) -> None:
        self.owner = owner
        self.error: str | None = None
        self.next = 0
        self.running = 0
        self._reader = reader
        self._token = token if isinstance(token, LandingRead) and token.wants_landing else None
        remote = batch.offset + np.uint64(base)
        if self._token is None:
            self._plan = reader.plan(batch.local, remote, batch.nbytes, _PIECE_BYTES, cut=True)
        else:
            piece = _WORKED_PIECE_BYTES if self._token.by_element else 0
            self._plan = reader.plan(batch.local, remote, batch.nbytes, piece, cut=False)
        self._whole = self._token is not None and not self._token.by_element
        self.pieces = 1 if self._whole else self._plan.pieces
        self.nbytes = int(batch.nbytes.sum())

    @property
    def finished(self) -> bool:
        """No piece is left, none is under way."""
        return not self.running and self.next >= self.pieces

    def copy(self, piece: int) -> None:
        """Copy one piece; blocks for it. Raises OSError, and what the token's work raises."""
        for number in range(self._plan.pieces) if self._whole else (piece,):
            self._reader.copy(self._plan, number)
        if self._token is not None:
            cuts = self._plan.cuts
            self._token.landed(*((cuts[0], cuts[-1]) if self._whole else (cuts[piece], cuts[piece + 1])))


class HostCopies:
    """All copies of one transport. `wake` makes the loop's poll return; any thread may call it."""

    def __init__(self, helpers: int, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._lock = threading.Lock()
        self._open: deque[HostCopy] = deque()
        self._done: deque[HostCopy] = deque()
        self._asleep = False
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._helpers = helpers
        self._threads: list[threading.Thread] = []  # started when first needed

    # --- the loop -------------------------------------------------------------------------------------------------

    def add(self, copy: HostCopy) -> None:
        """Take a batch on. Its end comes from `take`."""
        with self._lock:
            self._open.append(copy)
        if (copy.nbytes >= _WAKE_BYTES or len(self._open) > 1) and self._calls.qsize() < self._helpers:
            if len(self._threads) < self._helpers:
                self._start_helper()
            self._calls.put(True)

    def _start_helper(self) -> None:
        thread = threading.Thread(target=self._help, name=f"kvferry-copy-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads to be had: the loop copies by itself
            _log.warning("no helper for copies could be started: %s", error)
        else:
            self._threads.append(thread)

    def step(self) -> bool:
        """Copy one piece here; False when there is none."""
        return self._one(here=True)

    def take(self) -> HostCopy | None:
        """A batch that has ended, taken out of this object."""
        with self._lock:
            return self._done.popleft() if self._done else None

    def may_sleep(self) -> bool:
        """The loop is about to wait; False: there is something to do. After True `wake` follows the next end."""
        with self._lock:
            self._asleep = not self._done and not self._open
            return self._asleep

    def abandon(self, owners: Collection[object], error: str) -> None:
        """Start no more pieces of these owners' batches; they end with `error` once none is under way."""
        with self._lock:
            for copy in [copy for copy in self._open if copy.owner in owners]:
                copy.error = copy.error or error
                copy.next = copy.pieces
                self._open.remove(copy)
                if copy.finished:
                    self._done.append(copy)

    def close(self) -> None:
        """End the helpers; blocks for the pieces under way."""
        for _ in self._threads:
            self._calls.put(False)
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    # --- any of the threads -----------------------------------------------------------------------------------------

    def _one(self, *, here: bool = False) -> bool:
        """Claim a piece and copy it; False when there is none."""
        with self._lock:
            if not self._open:
                return False
            copy = self._open[0]
            piece = copy.next
            copy.next += 1
            copy.running += 1
            if copy.next >= copy.pieces:
                self._open.popleft()
        error = None
        try:
            copy.copy(piece)
        except OSError as failure:
            error = f"reading the peer's memory: {failure}"
        except Exception as failure:  # the token's own work; the transfer fails, not this thread
            error = f"could not place or hash received blocks: {failure!r}"
        wake = False
        with self._lock:
            copy.running -= 1
            if error is not None:
                copy.error = copy.error or error
                if copy.next < copy.pieces:
                    copy.next = copy.pieces
                    self._open.remove(copy)
            if copy.finished:
                self._done.append(copy)
                wake, self._asleep = self._asleep and not here, False
        if wake:
            self._wake()
        return True

    def _help(self) -> None:
        while self._calls.get():
            while self._one():
                pass
