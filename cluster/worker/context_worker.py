"""The prefill side: compute what no cache has, sample the first token, grant the blocks; later take the answer back."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.errors import EngineFailedError, NotReadyError, PromptTooLongError
from cluster.request import EngineRequest, FinishReason, conversation_key
from cluster.scheduler import SequenceEvent
from cluster.sequence import Sequence, match_request
from cluster.worker.backflow import BackflowPolicy
from cluster.worker.base_worker import BaseWorker
from cluster.worker.kv_fetch import FetchResult, KvFetch
from cluster.worker.messages import BackflowResult, CacheShortfall, PrefillResult, PrefixLoan, TurnHandoff
from cluster.worker.spec import WorkerSpec
from kvcache import BlockOrigin, NeverFitsError, OutOfPagesError, ReuseScope, SequenceCache
from transceiver import BackflowMode, GrantTicket, TransferOutcome, TransferStatus
from transceiver.testing import FaultInjector

__all__ = ["ContextWorker"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Pulled:
    """What came of a loan: an open cache with `tokens` pulled tokens behind the matched ones, or no cache."""

    cache: SequenceCache | None
    tokens: int
    outcome: TransferOutcome | None


class ContextWorker(BaseWorker):
    """Prefills prompts, computing only what neither it nor a lending peer holds, and keeps their turns."""

    def __init__(self, spec: WorkerSpec, *, faults: FaultInjector | None = None) -> None:
        super().__init__(spec, faults=faults)
        self._backflow = BackflowPolicy()
        self._prefills: dict[str, asyncio.Future[SequenceEvent]] = {}
        self._offers: dict[str, asyncio.Future[GrantTicket | None]] = {}

    async def offer(self, request: EngineRequest) -> GrantTicket | None:
        """A grant of a prompt that `prefill`, called after this, computes: its blocks are added chunk by chunk.

        Returns when the first chunk stands and there are pages for the whole prompt, so that whoever pulls waits for
        computing only. None when it does not come to that: then `prefill` ends with an ordinary ticket. Needs
        enable_pipelined_transfer.
        """
        self._check_engine()
        offer: asyncio.Future[GrantTicket | None] = self._loop.create_future()
        self._offers[request.request_id] = offer
        try:
            return await offer
        finally:
            self._offers.pop(request.request_id, None)

    async def prefill(
        self, request: EngineRequest, loan: PrefixLoan | None = None, expected_tokens: int = 0
    ) -> PrefillResult | CacheShortfall:
        """Compute the KV of a prompt and its first token; the KV stays pinned for whoever shows the ticket.

        loan             what a peer has of the prompt: what is missing here of it is pulled first, when that is cheaper
        expected_tokens  without a loan: with less of the prompt than that in the cache, do nothing and say so

        Raises PromptTooLongError when the prompt can never fit, EngineFailedError when the model failed or the
        request was aborted.
        """
        self._check_engine()
        started = time.monotonic()
        if loan is None and expected_tokens:
            cached = await self.probe(request.known_ids, request.cache_salt)
            if cached < expected_tokens:
                return CacheShortfall(cached)
        self._live.begin(request.request_id)
        try:
            pulled = await self._take_prefix(request, loan) if loan is not None else _Pulled(None, 0, None)
            if self._live.is_aborted(request.request_id):
                if pulled.cache is not None:
                    with self.engine.lock:
                        pulled.cache.close()
                raise EngineFailedError("the prefill was aborted")
            offered = request.request_id in self._offers
            sequence = self._new_sequence(request, decode_limit=1, cache=pulled.cache, reports_chunks=offered)
            event = await self._run(sequence)
            if event.finish_reason not in (FinishReason.HANDOFF, FinishReason.STOP, FinishReason.LENGTH):
                kind = PromptTooLongError if event.never_fits else EngineFailedError
                raise kind(event.error or f"the prefill was {event.finish_reason}")
            ticket = self._finish_prefill(sequence, event.finish_reason)
        finally:
            self._live.end(request.request_id)
            self._decide_offer(request.request_id, None)
            if self._grants.is_growing(request.request_id):  # it was not computed to its end
                self._grants.withdraw(request.request_id)
        prompt_tokens = sequence.num_tokens - 1
        cached = sequence.num_reused_tokens or 0
        return PrefillResult(
            token_id=int(sequence.token_ids(prompt_tokens)[0]),
            finish_reason=event.finish_reason,
            cached_tokens=cached,
            recomputed_tokens=prompt_tokens - cached - pulled.tokens,
            ticket=ticket,
            seconds=time.monotonic() - started,
            pulled_tokens=pulled.tokens,
            pull=pulled.outcome,
        )

    async def _take_prefix(self, request: EngineRequest, loan: PrefixLoan) -> _Pulled:
        """Pull what a peer lends and this side lacks. Without success the prompt is matched and computed as if there
        were no loan; the peer is told to let go in any case.
        """
        known, target = request.known_ids, min(loan.num_tokens, len(request.known_ids) - 1)
        with self.engine.lock:
            cache = match_request(self.manager, request, known)
            declined = None
            if target > cache.num_computed_tokens:
                mode = self.spec.transceiver.kv_prefix_pull
                declined = self._why_not(cache, target, mode, capacity=len(known))
            have = cache.num_computed_tokens
            wanted = have if declined is not None else max(target, have)
        fetch, arrived = self._pulls.prepare(cache, BlockOrigin.PULLED), False
        try:
            result = await self._pull(fetch, loan.ticket, known[:wanted], request, end_of_prompt=False)
            arrived = result.arrived and declined is None
        finally:
            if not arrived:
                self._pulls.close_when_idle(cache, fetch)
        if not arrived:
            return _Pulled(None, 0, declined or result.outcome)
        return _Pulled(cache, result.intact_tokens - have, result.outcome)

    def _finish_prefill(self, sequence: Sequence, reason: FinishReason) -> GrantTicket | None:
        """Grant a computed prompt if somebody will fetch it; the sequence gives its own hold up."""
        with self.engine.lock:
            try:
                if self._live.is_aborted(sequence.request_id):
                    raise EngineFailedError("the prefill was aborted")
                if reason is not FinishReason.HANDOFF:
                    return None
                assert sequence.cache is not None
                return self._grant_prompt(sequence, sequence.cache)
            finally:
                sequence.close_cache()

    async def close_turn(self, turn: TurnHandoff) -> BackflowResult:
        """Take the answer's blocks that this side lacks, and end the turn in the conversation's ledger.

        Without a ticket, or when the blocks do not arrive, the turn ends where this side's KV ends. Never raises for
        a peer's fault.
        """
        self._check_engine()
        with self.engine.lock:
            cache = self.manager.create(
                f"{turn.request_id}/turn",
                turn.token_ids,
                scope=ReuseScope(cache_salt=turn.cache_salt),
                conversation_id=conversation_key(turn.conversation_id, turn.cache_salt),
            )
            had = cache.num_reused_tokens
        outcome: TransferOutcome | None = None
        fetch = self._pulls.prepare(cache, BlockOrigin.GEN_TO_CTX)
        try:
            if turn.ticket is not None:
                outcome = await self._take_answer(turn, turn.ticket, cache, fetch)
            with self.engine.lock:
                endpoint = cache.num_computed_tokens
                cache.end_turn(
                    stop_reason=str(turn.finish_reason), output_tokens=len(turn.token_ids) - turn.prompt_tokens
                )
        finally:
            self._pulls.close_when_idle(cache, fetch)
        return BackflowResult(endpoint_tokens=endpoint, already_cached_tokens=had, transfer=outcome)

    async def _take_answer(
        self, turn: TurnHandoff, ticket: GrantTicket, cache: SequenceCache, fetch: KvFetch
    ) -> TransferOutcome:
        """Pull what is missing of the turn. When that is not wanted, pull nothing, so that the holder may let go."""
        target = len(turn.token_ids) - 1
        with self.engine.lock:
            declined = self._why_not(cache, target, self.spec.transceiver.kv_backflow, capacity=target)
            wanted = target if declined is None else cache.num_computed_tokens
        result = await self._pull(fetch, ticket, turn.token_ids[:wanted], turn, end_of_prompt=declined is None)
        return declined or result.outcome

    async def _pull(
        self,
        fetch: KvFetch,
        ticket: GrantTicket,
        token_ids: NDArray[np.int32],
        request: EngineRequest | TurnHandoff,
        *,
        end_of_prompt: bool,
    ) -> FetchResult:
        """Run a fetch that an abort of the request reaches, and remember what it cost."""
        started = time.monotonic()
        result = await self._pulls.run(fetch, ticket, token_ids, request, end_of_prompt=end_of_prompt)
        self.repaired_blocks += result.damaged_blocks
        if result.outcome.bytes:
            self._backflow.observe_pull(result.outcome.bytes, time.monotonic() - started)
        return result

    def _why_not(
        self, cache: SequenceCache, target: int, mode: BackflowMode, *, capacity: int
    ) -> TransferOutcome | None:
        """Make room for `capacity` tokens to pull those up to `target`, or say why they are not pulled.

        Call with the engine's lock held.
        """
        if not self.manager.config.enable_block_reuse:
            return TransferOutcome(TransferStatus.CANCELLED, "block reuse is off here")
        missing = target - cache.num_computed_tokens
        if missing and mode is BackflowMode.AUTO:
            layout, scheduler = self.manager.layout, self.engine.scheduler.stats
            blocks = -(-target // layout.tokens_per_block) - cache.num_computed_tokens // layout.tokens_per_block
            estimate = self._backflow.estimate(
                num_bytes=blocks * sum(layout.page_bytes(group) for group in range(len(layout.groups))),
                num_tokens=missing,
                computed_tokens=scheduler.computed_tokens,
                busy_s=self.engine.busy_s,
                prefills=scheduler.steps,
            )
            if self._backflow.declines(estimate):
                return TransferOutcome(TransferStatus.CANCELLED, f"computing again is cheaper: {estimate}")
        try:
            cache.resize(max(capacity, 1))
        except (OutOfPagesError, NeverFitsError) as error:  # pulled blocks are worth less than a running prompt
            return TransferOutcome(TransferStatus.CANCELLED, f"no room for a peer's blocks: {error}")
        return None

    async def _run(self, sequence: Sequence) -> SequenceEvent:
        future: asyncio.Future[SequenceEvent] = self._loop.create_future()
        self._prefills[sequence.request_id] = future
        self.engine.submit(sequence)
        try:
            return await future
        except asyncio.CancelledError:
            self.engine.request_stop(sequence.request_id, FinishReason.CANCELLED)
            if future.done() and not future.cancelled():  # the event came in the same moment: its cache is ours
                self._close_cache(sequence)
            raise
        finally:
            self._prefills.pop(sequence.request_id, None)

    def _grant_prompt(self, sequence: Sequence, cache: SequenceCache) -> GrantTicket:
        """The whole prompt stands: complete the grant that grew with it, or give an ordinary one."""
        request, num_tokens = sequence.request, sequence.num_tokens - 1
        if self._grants.is_growing(request.request_id):
            try:
                return self._grants.extend(request.request_id, cache, num_tokens, last=True)
            except NotReadyError as error:
                log.info("%s", error.message)
        if sequence.reports_chunks:
            return self._grants.give_again(request, cache, num_tokens)
        return self._grants.give(request, cache, num_tokens)

    def _chunk_computed(self, sequence: Sequence) -> None:
        """A chunk of a prompt stands in its pages: offer the prompt with the first one, then add to the grant."""
        request_id = sequence.request_id
        with self.engine.lock:
            cache = sequence.cache
            if cache is None or cache.suspended is not None:
                return
            try:
                if request_id in self._offers:
                    cache.resize(max(sequence.num_tokens, cache.capacity_tokens))
                    sequence.reserved_tokens = sequence.num_tokens
                    self._decide_offer(request_id, self._grants.open_ended(sequence.request))
                if self._grants.is_growing(request_id):
                    self._grants.extend(request_id, cache, cache.num_computed_tokens, last=False)
            except (NotReadyError, OutOfPagesError, NeverFitsError) as error:
                log.info("%s is not handed over ahead: %s", request_id, error)
                self._decide_offer(request_id, None)

    def _decide_offer(self, request_id: str, ticket: GrantTicket | None) -> None:
        """Answer `offer`, if it still waits. Idempotent."""
        offer = self._offers.pop(request_id, None)
        if offer is not None and not offer.done():
            offer.set_result(ticket)

    def _on_events(self, events: list[SequenceEvent]) -> None:
        for event in events:
            if event.finish_reason is None:
                self._chunk_computed(event.sequence)
                continue
            future = self._prefills.get(event.sequence.request_id)
            if future is not None and not future.done():
                future.set_result(event)
            else:  # nobody waits any more
                self._close_cache(event.sequence)
