"""The decode side: fetch a prompt's missing blocks, decode, and grant the finished turn back."""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np
from numpy.typing import NDArray

from cluster.errors import NotReadyError, PromptTooLongError
from cluster.request import EngineRequest, FinishReason
from cluster.scheduler import SequenceEvent
from cluster.sequence import Sequence
from cluster.worker.base_worker import BaseWorker
from cluster.worker.kv_fetch import FetchResult, KvFetch
from cluster.worker.messages import Admission, AdmissionStatus, OutputDelta, WorkerRole
from cluster.worker.spec import WorkerSpec
from kvcache import NeverFitsError, OutOfPagesError, ReuseScope, SequenceCache
from transceiver import BackflowMode, GrantTicket, Pull
from transceiver.testing import FaultInjector

__all__ = ["GenerationWorker"]

log = logging.getLogger(__name__)


class GenerationWorker(BaseWorker):
    """Decodes. Without a ticket it computes the prompt itself: that is the aggregated mode and the local fall-back."""

    def __init__(self, spec: WorkerSpec, *, faults: FaultInjector | None = None) -> None:
        super().__init__(spec, faults=faults)
        self._deltas: list[OutputDelta] = []
        self._has_deltas = asyncio.Event()
        self._admission_turn = asyncio.Lock()
        self._pages_freed = asyncio.Event()
        self._pulls: dict[str, Pull] = {}
        self._aborted: set[str] = set()

    async def generate(self, request: EngineRequest, ticket: GrantTicket | None = None) -> Admission:
        """Take a request: pull the blocks this side lacks, then decode; its tokens come out of `drain_outputs`.

        Returns once the request is queued for decoding, or once its transfer has failed (then nothing of it is left
        here). Raises PromptTooLongError, NotReadyError (no pages within the transfer time-out), EngineFailedError.
        """
        self._check_engine()
        if ticket is None:
            self.engine.submit(self._new_sequence(request))
            return Admission(AdmissionStatus.RUNNING, 0, 0, 0, None)
        assert self.transceiver is not None
        timeout_s = self.spec.transceiver.kv_transfer_timeout_ms / 1000
        known = np.concatenate([request.prompt_ids, np.asarray(request.first_token_ids, np.int32)]).astype(np.int32)
        computed = known[:-1]  # the newest token was sampled, its KV is computed here
        cache = await self._open_cache(request, known, timeout_s)
        cached = cache.num_reused_tokens
        fetch = KvFetch(self.engine, self.transceiver, cache)
        try:
            result = await fetch.run(
                ticket,
                computed,
                conversation_id=request.conversation_id,
                cache_salt=request.cache_salt,
                timeout_s=timeout_s,
                register=lambda pull: self._register_pull(request.request_id, pull),
            )
        except BaseException:
            self._close_when_idle(cache, fetch)
            raise
        finally:
            self._pulls.pop(request.request_id, None)
            aborted = request.request_id in self._aborted
            self._aborted.discard(request.request_id)
        if aborted or not result.arrived:
            self._close_when_idle(cache, fetch)
            return Admission(AdmissionStatus.TRANSFER_FAILED, cached, 0, 0, result.outcome)
        self.repaired_blocks += result.damaged_blocks
        self.engine.submit(self._new_sequence(request, cache=cache))
        return _admission(len(computed), cached, result)

    async def drain_outputs(self, max_wait_s: float = 5.0) -> list[OutputDelta]:
        """All deltas since the last call, waiting up to `max_wait_s` for the first. One caller at a time."""
        self._check_engine()
        if not self._deltas:
            try:
                await asyncio.wait_for(self._has_deltas.wait(), max_wait_s)
            except TimeoutError:
                return []
        self._has_deltas.clear()
        deltas, self._deltas = self._deltas, []
        return deltas

    async def stop(self, request_id: str) -> None:
        """End an answer now and keep the turn (a stop string was found). Unknown ids are ignored."""
        self.engine.request_stop(request_id, FinishReason.STOP)

    async def abort(self, request_id: str) -> None:
        """End a request without publishing its turn, whatever it is doing. Unknown ids are ignored."""
        pull = self._pulls.get(request_id)
        if pull is not None:
            self._aborted.add(request_id)
            pull.cancel()
        await super().abort(request_id)

    def _register_pull(self, request_id: str, pull: Pull) -> None:
        self._pulls[request_id] = pull

    async def _open_cache(self, request: EngineRequest, known: NDArray[np.int32], timeout_s: float) -> SequenceCache:
        """A cache with room for all KV to come. Requests wait in order of arrival while pages are short."""
        deadline = time.monotonic() + timeout_s
        async with self._admission_turn:
            with self.engine.lock:
                cache = self.manager.create(
                    request.request_id,
                    known,
                    scope=ReuseScope(cache_salt=request.cache_salt),
                    conversation_id=request.conversation_id,
                )
            while True:
                self._pages_freed.clear()
                try:
                    with self.engine.lock:
                        cache.resize(len(known) - 1)
                    return cache
                except NeverFitsError as error:
                    self._close_when_idle(cache, None)
                    raise PromptTooLongError(str(error)) from error
                except OutOfPagesError as error:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        self._close_when_idle(cache, None)
                        raise NotReadyError(f"no pages for the prompt within {timeout_s:.0f} s: {error}") from error
                    try:
                        await self._wait_for_pages(min(left, 0.25))
                    except asyncio.CancelledError:
                        self._close_when_idle(cache, None)
                        raise

    async def _wait_for_pages(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._pages_freed.wait(), seconds)
        except TimeoutError:
            return

    def _on_events(self, events: list[SequenceEvent]) -> None:
        for event in events:
            self._deltas.append(self._delta_of(event))
        self._pages_freed.set()
        self._has_deltas.set()

    def _delta_of(self, event: SequenceEvent) -> OutputDelta:
        sequence = event.sequence
        ticket = None
        if event.finish_reason is not None:
            with self.engine.lock:
                if sequence.cache is not None and event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                    sequence.cache.end_turn()
                    ticket = self._grant_turn(sequence)
                sequence.close_cache()
        return OutputDelta(
            request_id=sequence.request_id,
            token_ids=event.token_ids,
            finish_reason=event.finish_reason,
            error=event.error,
            cached_tokens=sequence.num_reused_tokens,
            ticket=ticket,
        )

    def _grant_turn(self, sequence: Sequence) -> GrantTicket | None:
        """Offer a finished turn's blocks to the context side, unless back-flow is off or impossible now."""
        if self.spec.role is WorkerRole.AGGREGATED or self.spec.transceiver.kv_backflow is BackflowMode.OFF:
            return None
        assert sequence.cache is not None
        try:
            return self._grant(sequence.request, sequence.cache, sequence.cache.num_computed_tokens)
        except NotReadyError as error:  # only the reuse of this answer is lost
            log.warning("no back-flow for %s: %s", sequence.request_id, error.message)
            return None


def _admission(tokens: int, cached: int, result: FetchResult) -> Admission:
    return Admission(
        status=AdmissionStatus.RUNNING,
        cached_tokens=cached,
        transferred_tokens=max(0, result.intact_tokens - cached),
        repaired_tokens=tokens - result.intact_tokens,
        transfer=result.outcome,
    )
