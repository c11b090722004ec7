"""The decode side: fetch a prompt's missing blocks, decode, and grant the finished turn back."""

from __future__ import annotations

import asyncio
import logging
import time

import numpy as np
from numpy.typing import NDArray

from cluster.errors import EngineFailedError, NotReadyError, PromptTooLongError
from cluster.request import EngineRequest, FinishReason
from cluster.scheduler import SequenceEvent
from cluster.sequence import Sequence, match_request
from cluster.worker.base_worker import BaseWorker
from cluster.worker.kv_fetch import FetchResult
from cluster.worker.messages import Admission, AdmissionStatus, OutputDelta, WorkerRole
from cluster.worker.spec import WorkerSpec
from kvcache import BlockOrigin, KvCacheError, NeverFitsError, OutOfPagesError, SequenceCache
from transceiver import BackflowMode, GrantTicket
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
        self._received: dict[str, SequenceCache] = {}
        self._pages_freed = asyncio.Event()

    async def attach(self) -> int:
        """See BaseWorker. Outputs of the sessions before are dropped."""
        session = await super().attach()
        self._deltas = []
        self._has_deltas.set()
        return session

    async def generate(self, request: EngineRequest, ticket: GrantTicket | None = None) -> Admission:
        """Take a request: pull the blocks this side lacks, then decode; its tokens come out of `drain_outputs`.

        Without a ticket what `receive` pulled for the request is taken, or else the whole prompt is computed here.
        Returns once the request is queued for decoding, or once its transfer has failed (then nothing of it is left
        here). Raises PromptTooLongError, NotReadyError (no pages within the transfer time-out), EngineFailedError.
        """
        self._check_engine()
        received = self._received.pop(request.request_id, None)
        if ticket is None:
            self._live.begin(request.request_id)
            self.engine.submit(self._new_sequence(request, cache=received, prefilled=received is not None))
            return Admission(AdmissionStatus.RUNNING, 0, 0, 0, None)
        # the newest known token was sampled, its KV is computed here
        admission, cache = await self._take_prompt(request, ticket, len(request.known_ids) - 1)
        if cache is not None:
            self.engine.submit(self._new_sequence(request, cache=cache, prefilled=True))
        return admission

    async def receive(self, request: EngineRequest, ticket: GrantTicket) -> Admission:
        """Pull the blocks of a prompt while a context worker computes it. `generate` or `abort` must follow.

        Returns when all are here, or when the transfer has failed (then nothing of it is left here). Raises what
        `generate` raises.
        """
        self._check_engine()
        admission, cache = await self._take_prompt(request, ticket, len(request.known_ids))
        if cache is not None:
            self._received[request.request_id] = cache
        return admission

    async def _take_prompt(
        self, request: EngineRequest, ticket: GrantTicket, num_tokens: int
    ) -> tuple[Admission, SequenceCache | None]:
        """Fill a new cache with the request's first `num_tokens` tokens. The request is live if there is a cache."""
        self._live.begin(request.request_id)
        cache = None
        try:
            admission, cache = await self._pull_prompt(request, ticket, num_tokens)
            return admission, cache
        finally:
            if cache is None:
                self._live.end(request.request_id)

    async def _pull_prompt(
        self, request: EngineRequest, ticket: GrantTicket, num_tokens: int
    ) -> tuple[Admission, SequenceCache | None]:
        known = request.known_ids
        cache = await self._open_cache(request, known, num_tokens, self._pulls.timeout_s)
        cached = cache.num_reused_tokens
        fetch = self._pulls.prepare(cache, BlockOrigin.CTX_TO_GEN)
        try:
            result = await self._pulls.run(fetch, ticket, known[:num_tokens], request)
        except BaseException:
            self._pulls.close_when_idle(cache, fetch)
            raise
        if self._live.is_aborted(request.request_id) or not result.arrived:
            self._pulls.close_when_idle(cache, fetch)
            return Admission(AdmissionStatus.TRANSFER_FAILED, cached, 0, 0, result.outcome), None
        self.repaired_blocks += result.damaged_blocks
        return _admission(num_tokens, cached, result), cache

    async def drain_outputs(self, session: int, max_wait_s: float = 5.0) -> list[OutputDelta]:
        """All deltas since the last call, waiting up to `max_wait_s` for the first. One caller at a time.

        A call of an older session gets nothing. Raises EngineBrokenError when the worker must be replaced and has
        nothing left to say.
        """
        if not self._deltas:
            self._check_engine()
            try:
                async with asyncio.timeout(max_wait_s):
                    await self._has_deltas.wait()
            except TimeoutError:
                return []
        if session != self._session:
            return []
        self._has_deltas.clear()
        deltas, self._deltas = self._deltas, []
        return deltas

    async def stop(self, request_id: str) -> None:
        """End an answer now and keep the turn (a stop string was found). Unknown ids are ignored."""
        self._check_engine()
        self.engine.request_stop(request_id, FinishReason.STOP)

    async def abort(self, request_id: str) -> None:
        """See BaseWorker."""
        await super().abort(request_id)
        self._drop_received(request_id)
        self._pages_freed.set()  # it may be waiting for pages

    async def close(self) -> None:
        """See BaseWorker."""
        for request_id in list(self._received):
            self._drop_received(request_id)
        await super().close()

    def _drop_received(self, request_id: str) -> None:
        """What was pulled for a request will not be used."""
        cache = self._received.pop(request_id, None)
        if cache is not None:
            self._live.end(request_id)
            if self._broken is None:  # else the whole worker is about to go
                with self.engine.lock:
                    cache.close()
                self.engine.wake()

    async def _open_cache(
        self, request: EngineRequest, known: NDArray[np.int32], num_tokens: int, timeout_s: float
    ) -> SequenceCache:
        """A cache with room for all KV to come. Requests wait in order of arrival while pages are short.

        While it waits it holds nothing: pages that it matched may be just what a running sequence needs to go on.
        """
        deadline = time.monotonic() + timeout_s
        async with self._admission_turn:
            while not self._live.is_aborted(request.request_id):
                self._pages_freed.clear()
                try:
                    return self._try_open(request, known, num_tokens)
                except NeverFitsError as error:
                    raise PromptTooLongError(str(error)) from error
                except OutOfPagesError as error:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise NotReadyError(f"no pages for the prompt within {timeout_s:.0f} s: {error}") from error
                await self._wait_for_pages(min(left, 0.25))
        raise EngineFailedError("the request was aborted while it waited for pages")

    def _try_open(self, request: EngineRequest, known: NDArray[np.int32], num_tokens: int) -> SequenceCache:
        with self.engine.lock:
            cache = match_request(self.manager, request, known)
            try:
                cache.resize(num_tokens)
            except KvCacheError:
                cache.close()
                raise
            return cache

    async def _wait_for_pages(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._pages_freed.wait()
        except TimeoutError:
            return

    def _on_events(self, events: list[SequenceEvent]) -> None:
        for event in events:
            self._deltas.append(self._delta_of(event))
        self._pages_freed.set()
        self._has_deltas.set()

    def _delta_of(self, event: SequenceEvent) -> OutputDelta:
        sequence = event.sequence
        ticket = self._end(event) if event.finish_reason is not None else None
        return OutputDelta(
            request_id=sequence.request_id,
            token_ids=event.token_ids,
            finish_reason=event.finish_reason,
            error=event.error,
            cached_tokens=sequence.num_reused_tokens,
            ticket=ticket,
        )

    def _end(self, event: SequenceEvent) -> GrantTicket | None:
        """The last word on a sequence: publish its turn, grant it to the context side, give its own hold up."""
        sequence, ticket = event.sequence, None
        wanted = not self._live.is_aborted(sequence.request_id) and self._broken is None
        self._live.end(sequence.request_id)
        if wanted and event.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            with self.engine.lock:
                if sequence.cache is not None:
                    sequence.cache.end_turn(stop_reason=str(event.finish_reason), output_tokens=sequence.num_outputs)
                    ticket = self._grant_turn(sequence)
        self._close_cache(sequence)
        return ticket

    def _grant_turn(self, sequence: Sequence) -> GrantTicket | None:
        """Offer a finished turn's blocks to the context side, unless back-flow is off or impossible now."""
        if self.spec.role is WorkerRole.AGGREGATED or self.spec.transceiver.kv_backflow is BackflowMode.OFF:
            return None
        assert sequence.cache is not None
        try:
            return self._grants.give(sequence.request, sequence.cache, sequence.cache.num_computed_tokens)
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
