"""What the parts of a transceiver's loop share: clock, timers, the digest thread, configuration, counters.

Everything here belongs to the loop's thread except `post`, which any thread may call. Timers and posted calls run
inside the loop, one after the other: no other locking exists in the protocol.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import math
import queue
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TypeVar

from kvcache.storage.page_storage import PageStorage
from transceiver.config import CacheTransceiverConfig
from transceiver.digest import DigestCache
from transceiver.parallel_layout import RankShare
from transceiver.stats import PerfCsv, TransceiverStats
from transceiver.transport import Transport

__all__ = ["LoopContext", "Timer"]

_log = logging.getLogger(__name__)
T = TypeVar("T")


class Timer:
    """A call at a time; `cancel` forgets it."""

    __slots__ = ("action",)

    def __init__(self, action: Callable[[], None]) -> None:
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        """Never run. Idempotent."""
        self.action = None


class LoopContext:
    """Shared by the peer table, the holder side and the receiver side of one transceiver."""

    def __init__(
        self, worker_id: str, storage: PageStorage, config: CacheTransceiverConfig, secret: bytes,
        transport: Transport, executor: Executor, clock: Callable[[], float],
        shares: tuple[RankShare, ...] | None = None,
    ) -> None:  # fmt: skip
        self.worker_id = worker_id
        self.storage = storage
        self.config = config
        self.secret = secret
        self.transport = transport
        self.clock = clock
        self.shares = shares
        self.digests = DigestCache(storage)
        self.stats = TransceiverStats()
        self.csv = PerfCsv(config.perf_csv)
        self.registrations: dict[int, int] = {}  # group -> registration of its pool
        self._executor = executor
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()

    def post(self, action: Callable[[], None], failed: Callable[[Exception], None] | None = None) -> None:
        """Run `action` in the loop soon, and ``failed(error)`` if it raises. Any thread; never blocks.

        Whoever posts what a future waits for gives `failed`: else an error is logged and the future never resolves.
        """
        self._posted.put(action if failed is None else lambda: self.guarded(action, failed))
        self.transport.wake()

    def after(self, seconds: float, action: Callable[[], None]) -> Timer:
        """Run `action` in the loop after `seconds`. Raises ValueError for nan, which would break the timers' order."""
        if math.isnan(seconds):
            raise ValueError("a timer needs a number of seconds, not nan")
        timer = Timer(action)
        heapq.heappush(self._timers, (self.clock() + seconds, next(self._order), timer))
        return timer

    def in_background(self, work: Callable[[], T], then: Callable[[T | BaseException], None]) -> None:
        """Run `work` in the digest thread and `then(result or exception)` in the loop."""

        def done(future: Future[T]) -> None:
            if not future.cancelled():
                error = future.exception()
                self.post(lambda: then(future.result() if error is None else error))

        self._executor.submit(work).add_done_callback(done)

    def end_background(self) -> None:
        """Wait for the work that the digest thread is at, drop the rest, end the thread. Idempotent."""
        self._executor.shutdown(wait=True, cancel_futures=True)

    def run_due(self) -> float:
        """Run posted calls and due timers; returns the seconds until the next timer (at most 1)."""
        while not self._posted.empty():  # nobody else takes from it
            self.guarded(self._posted.get_nowait())
        now = self.clock()
        while self._timers and self._timers[0][0] <= now:
            due = heapq.heappop(self._timers)[2]
            if due.action is not None:
                self.guarded(due.action)
        while self._timers and self._timers[0][2].action is None:
            heapq.heappop(self._timers)
        if not self._posted.empty():
            return 0.0
        return min(1.0, max(0.0, self._timers[0][0] - self.clock())) if self._timers else 1.0

    def guarded(self, action: Callable[[], None], failed: Callable[[Exception], None] | None = None) -> None:
        """Run `action` now; what it raises is logged, given to `failed`, and goes no further. Loop only.

        Whoever calls code on behalf of one transfer or one peer does it through this: its fault is theirs alone.
        """
        try:
            action()
        except Exception as error:
            _log.exception("worker %s: an action of the transceiver's loop failed", self.worker_id)
            if failed is not None:
                self.guarded(functools.partial(failed, error))
