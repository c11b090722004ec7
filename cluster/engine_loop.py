"""The engine: schedule, execute, apply, in one thread; everything else talks to it under one short lock.

`lock` guards the cache manager and the scheduler. The model runs outside of it, on pages that the planned sequences
hold, so control calls (probe, open a cache for a pull, publish, release) never wait for a forward pass.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from cluster.engine.model_runner import ModelRunner
from cluster.request import FinishReason
from cluster.scheduler import Scheduler, SequenceEvent
from cluster.sequence import Sequence
from kvcache import KvCacheManager

__all__ = ["EngineLoop"]

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.5  # an idle or stalled engine looks again after that long even if nobody wakes it


class EngineLoop:
    """Runs one `Scheduler` over one `ModelRunner` in its own thread.

    `deliver` receives the events of each step in the engine's thread; it must return at once.
    """

    def __init__(
        self,
        runner: ModelRunner,
        manager: KvCacheManager,
        scheduler: Scheduler,
        deliver: Callable[[list[SequenceEvent]], None],
        *,
        name: str = "engine",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.lock = threading.RLock()
        self.runner = runner
        self.manager = manager
        self.scheduler = scheduler
        self.fatal: str | None = None  # why the loop ended for good; the worker must be replaced
        self.busy_s = 0.0
        self._step_started: float | None = None
        self._deliver = deliver
        self._clock = clock
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread. Call once."""
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; its events go to `deliver`. Does not block on the model."""
        with self.lock:
            self.scheduler.add(sequence)
        self.wake()

    def request_stop(self, request_id: str, reason: FinishReason) -> bool:
        """Ask a live sequence to end before its next step. Returns whether it was found."""
        with self.lock:
            for sequence in self.scheduler.sequences():
                if sequence.request_id == request_id:
                    sequence.stop_requested = sequence.stop_requested or reason
                    self.wake()
                    return True
        return False

    def wake(self) -> None:
        """Have the loop look for work now (after pages were given back, for instance)."""
        self._wake.set()

    @property
    def step_s(self) -> float:
        """How long the forward pass that is running now has taken so far; 0 between passes."""
        started = self._step_started
        return 0.0 if started is None else self._clock() - started

    def close(self, timeout_s: float = 30.0) -> bool:
        """Stop after the current step and close every open cache. Idempotent.

        False when the step did not end in time: the model may still touch the pages, nothing was closed.
        """
        self._stopping = True
        self.wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        if self.fatal is None and self.manager.poison_reason is None:
            with self.lock:
                for sequence in self.scheduler.sequences():
                    sequence.close_cache()
        return True

    def _run(self) -> None:
        try:
            while not self._stopping:
                if not self._step():
                    self._wake.wait(_IDLE_WAIT_S)
                    self._wake.clear()
        except Exception as error:  # bookkeeping failed: nothing that this engine holds can be trusted any more
            log.exception("the engine stopped: its bookkeeping is broken")
            self.fatal = f"{type(error).__name__}: {error}"
            self._deliver([SequenceEvent(s, (), FinishReason.ERROR, self.fatal) for s in self.scheduler.sequences()])

    def _step(self) -> bool:
        """One step; False when there was nothing to compute."""
        with self.lock:
            step = self.scheduler.schedule()
            events = self.scheduler.drain_events()
        if events:
            self._deliver(events)
        if step is None:
            return False
        started = self._step_started = self._clock()
        try:
            sampled = self.runner.execute(step.plan)
        except Exception as error:  # the sequences of this step fail; the engine goes on with the others
            log.exception("the model failed in a step of %d sequences", len(step.sequences))
            self._step_started = None
            with self.lock:
                self.scheduler.fail(step, f"the model failed: {type(error).__name__}: {error}")
                events = self.scheduler.drain_events()
        else:
            self.busy_s += self._clock() - started
            self._step_started = None
            with self.lock:
                self.scheduler.apply(step, sampled)
                events = self.scheduler.drain_events()
        if events:
            self._deliver(events)
        return True
