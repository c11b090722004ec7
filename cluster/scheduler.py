"""Continuous batching with chunked prefill: which tokens of which sequences the next step computes.

Pure Python over a `KvCacheManager`; owned by one `EngineLoop`, which holds the lock around every call. A decode is
just a chunk of one token, so prefill, decode, recomputation after a preemption and the repair of a block that did not
arrive are one rule: compute the tokens of a sequence that have no KV yet, and sample when none are left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cluster.engine.model_runner import SequenceStep, StepPlan
from cluster.request import FinishReason
from cluster.sequence import Sequence
from kvcache import KvCacheManager, NeverFitsError, OutOfPagesError, ReuseScope, SuspendedSequenceError

__all__ = ["ScheduledStep", "Scheduler", "SchedulerStats", "SequenceEvent"]

_PREFETCH_BLOCKS = 4  # lifted from disk in one step


@dataclass(frozen=True, slots=True)
class SequenceEvent:
    """What a step did to one sequence, for whoever submitted it. `never_fits`: no pool of this worker can hold it."""

    sequence: Sequence
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None
    never_fits: bool = False


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan for the runner and the sequences it belongs to, row by row."""

    plan: StepPlan
    sequences: tuple[Sequence, ...]


@dataclass(slots=True)
class SchedulerStats:
    """Counters since the start, and the queue lengths now."""

    running: int = 0
    waiting: int = 0
    steps: int = 0
    computed_tokens: int = 0
    sampled_tokens: int = 0
    preemptions: int = 0
    suspensions: int = 0


class Scheduler:
    """Waiting and running sequences of one engine.

    `max_num_tokens` bounds the tokens of one step, `max_batch_size` the sequences. With chunked prefill off, a prompt
    is computed whole in one step of its own size. A preempted sequence is computed again or, within
    `max_suspended_bytes`, suspended: its pages wait in host memory.
    """

    def __init__(
        self,
        manager: KvCacheManager,
        *,
        max_batch_size: int,
        max_num_tokens: int,
        enable_chunked_prefill: bool = True,
        max_suspended_bytes: int = 0,
    ) -> None:
        self._manager = manager
        self._max_suspended_bytes = max_suspended_bytes
        self._prefetch_most = 0
        if manager.config.disk_cache_size:
            layout = manager.layout
            block_bytes = sum(layout.page_bytes(group) for group in range(len(layout.groups)))
            self._prefetch_most = manager.config.host_cache_size // block_bytes
        self._max_batch_size = max_batch_size
        self._max_num_tokens = max_num_tokens
        self._chunked = enable_chunked_prefill
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._events: list[SequenceEvent] = []
        self.stats = SchedulerStats()

    @property
    def has_work(self) -> bool:
        """True while a sequence waits, runs, or an event has not been collected."""
        return bool(self._waiting or self._running or self._events)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its cache may be open already (blocks were pulled into it) or is opened at admission."""
        self._waiting.append(sequence)

    def sequences(self) -> Iterator[Sequence]:
        """Every live sequence, running ones first."""
        yield from self._running
        yield from self._waiting

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step: decodes first, then prefill chunks in order of arrival, within the token budget.

        Retires sequences that were asked to stop, admits waiting ones, and preempts the youngest running sequence
        when pages run out. Returns None when there is nothing to compute now. Waits for nobody; with a disk tier it
        reads a few files.
        """
        self._retire_stopped()
        budget = self._max_num_tokens
        scheduled: list[tuple[Sequence, int]] = []
        for sequence in sorted(self._running, key=lambda s: s.num_uncomputed > 1):  # decodes first; stable otherwise
            if budget <= 0 or sequence not in self._running:  # an earlier one may have preempted it
                continue
            tokens = self._fit(sequence, budget, scheduled)
            if tokens:
                scheduled.append((sequence, tokens))
                budget -= tokens
        while self._waiting and budget > 0 and len(self._running) < self._max_batch_size:
            admitted = self._admit(self._waiting[0], budget)
            if admitted is None:
                break
            sequence = self._waiting.popleft()
            if admitted:
                self._running.append(sequence)
                scheduled.append((sequence, admitted))
                budget -= admitted
        self._prefetch_next()
        if not scheduled:
            return None
        steps = [self._step_of(sequence, tokens) for sequence, tokens in scheduled]
        return ScheduledStep(StepPlan(steps), tuple(sequence for sequence, _ in scheduled))

    def apply(self, step: ScheduledStep, sampled: list[int | None]) -> None:
        """Record what a step computed: history, published blocks, new tokens, finished sequences."""
        self.stats.steps += 1
        for sequence, row, token in zip(step.sequences, step.plan.sequences, sampled, strict=True):
            assert sequence.cache is not None
            self.stats.computed_tokens += len(row.token_ids)
            reaches_prompt_end = row.start < sequence.num_prompt_tokens <= row.start + len(row.token_ids)
            sequence.cache.append_computed(row.token_ids, end_of_prompt=reaches_prompt_end)
            if token is None or sequence.stop_requested is not None:
                if sequence.reports_chunks:
                    self._events.append(SequenceEvent(sequence))
                continue
            sequence.append(token)
            self.stats.sampled_tokens += 1
            reason = sequence.finish_reason()
            if reason is not None:
                self._running.remove(sequence)
            self._events.append(SequenceEvent(sequence, (token,), reason))

    def fail(self, step: ScheduledStep, error: str) -> None:
        """The runner raised: every sequence of the step ends with `error`."""
        for sequence in step.sequences:
            if sequence in self._running:
                self._running.remove(sequence)
            self._finish(sequence, FinishReason.ERROR, error)

    def drain_events(self) -> list[SequenceEvent]:
        """Events since the last call, oldest first."""
        events, self._events = self._events, []
        return events

    def snapshot(self) -> SchedulerStats:
        """A copy of the counters with the queue lengths of now."""
        return replace(self.stats, running=len(self._running), waiting=len(self._waiting))

    def _step_of(self, sequence: Sequence, tokens: int) -> SequenceStep:
        cache = sequence.cache
        assert cache is not None
        start = cache.num_computed_tokens
        wants_token = start + tokens == sequence.num_tokens
        return SequenceStep(
            token_ids=sequence.token_ids(start, start + tokens),
            start=start,
            pages=tuple(cache.pages(group) for group in range(len(self._manager.layout.groups))),
            sampling=sequence.request.sampling if wants_token else None,
            suppress_eos=sequence.suppress_eos,
        )

    def _chunk(self, uncomputed: int, budget: int) -> int:
        if self._chunked or uncomputed <= budget:
            return min(uncomputed, budget)
        return uncomputed if budget == self._max_num_tokens else 0

    def _fit(self, sequence: Sequence, budget: int, scheduled: list[tuple[Sequence, int]]) -> int:
        """Tokens of a running sequence that can be computed now; makes room by preempting younger ones."""
        assert sequence.cache is not None
        tokens = self._chunk(sequence.num_uncomputed, budget)
        while tokens:
            try:
                sequence.cache.resize(max(sequence.cache.num_computed_tokens + tokens, sequence.reserved_tokens))
                return tokens
            except NeverFitsError as error:
                self._running.remove(sequence)
                self._finish(sequence, FinishReason.ERROR, str(error), never_fits=True)
                return 0
            except OutOfPagesError:
                if not self._make_room(sequence, scheduled):
                    return 0  # pages come back when others finish or a peer lets its pins go
        return 0

    def _admit(self, sequence: Sequence, budget: int) -> int | None:
        """Tokens to compute for a waiting sequence; 0 when it ended here; None when it must wait."""
        while True:
            try:
                if not self._resume(sequence):
                    return None
                if sequence.cache is None:
                    sequence.open_cache(self._manager)
                assert sequence.cache is not None
                tokens = self._chunk(sequence.num_uncomputed, budget)
                if not tokens:
                    return None
                sequence.cache.resize(max(sequence.cache.num_computed_tokens + tokens, sequence.reserved_tokens))
                sequence.note_reuse()
                return min(tokens, sequence.num_uncomputed)
            except NeverFitsError as error:
                self._finish(sequence, FinishReason.ERROR, str(error), never_fits=True)
                return 0
            except OutOfPagesError:
                if self._running or not self._make_room(sequence, []):
                    return None

    def _make_room(self, sequence: Sequence, scheduled: list[tuple[Sequence, int]]) -> bool:
        """Take the pages of the youngest other sequence, to suspend it or compute it again. False for want of one."""
        waiting = [one for one in reversed(self._waiting) if one.cache is not None and one is not sequence]
        for victim in waiting:
            if victim.cache is not None and victim.cache.suspended is None:
                self.stats.preemptions += 1
                victim.close_cache()
                return True
        victim = self._running[-1] if self._running else sequence
        if victim is sequence or any(victim is other for other, _ in scheduled):
            if len(self._running) <= 1 and waiting:  # suspended: they hold the path that they matched, nothing else
                self.stats.preemptions += 1
                waiting[0].close_cache()
                return True
            return False
        self.stats.preemptions += 1
        self._running.remove(victim)
        if not self._suspend(victim):
            victim.close_cache()
        self._waiting.appendleft(victim)
        return True

    def _suspend(self, sequence: Sequence) -> bool:
        """Move a sequence's pages to host memory if they fit there."""
        cache = sequence.cache
        if cache is None or not self._max_suspended_bytes:
            return False
        size = cache.own_bytes()
        used = sum(s.cache.suspended.nbytes for s in self._waiting if s.cache is not None and s.cache.suspended)
        if not size or used + size > self._max_suspended_bytes:
            return False
        cache.suspend()
        self.stats.suspensions += 1
        return True

    def _resume(self, sequence: Sequence) -> bool:
        """Bring a suspended sequence's pages back. False while it must wait for room. When it waits for nobody, or its
        content was lost, its cache is given up: it is computed again.
        """
        cache = sequence.cache
        if cache is None or cache.suspended is None:
            return True
        try:
            if cache.resume():
                return True
        except SuspendedSequenceError:
            sequence.close_cache()
            return True
        if not self._running:
            sequence.close_cache()
        return sequence.cache is None

    def _prefetch_next(self) -> None:
        """Have a few blocks of the next waiting prompt lifted from disk, while others compute: no more of it than host
        memory holds, or it would push out what it has just lifted.
        """
        for sequence in self._waiting if self._prefetch_most else ():
            most = min(_PREFETCH_BLOCKS, self._prefetch_most - sequence.prefetched_blocks)
            if sequence.cache is not None or most <= 0:
                continue
            scope = ReuseScope(cache_salt=sequence.request.cache_salt)
            lifted = self._manager.prefetch(sequence.token_ids(), scope, most=most)
            sequence.prefetched_blocks += lifted if lifted == most else self._prefetch_most  # or there are no more
            return

    def _retire_stopped(self) -> None:
        for sequence in [s for s in self.sequences() if s.stop_requested is not None]:
            if sequence in self._running:
                self._running.remove(sequence)
            else:
                self._waiting.remove(sequence)
            assert sequence.stop_requested is not None
            self._finish(sequence, sequence.stop_requested, None)

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None, *, never_fits: bool = False) -> None:
        if reason in (FinishReason.CANCELLED, FinishReason.ERROR) or not self._resume(sequence):
            sequence.close_cache()
        self._events.append(SequenceEvent(sequence, (), reason, error, never_fits))
