"""One try at a request, from prompt to last token. Read `run` first: it is the life of a request in one function."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cluster.dispatcher import Dispatcher
from cluster.errors import ClusterError, EngineFailedError, TransferFailedError, WorkerLostError
from cluster.prefix_loans import PrefixLoans
from cluster.request import EngineRequest, FinishReason
from cluster.serve_metrics import ServeMetrics
from cluster.serve_request import ServeRequest, TurnRecord
from cluster.serve_stream import ServeStream
from cluster.turns import Turns
from cluster.worker import Admission, AdmissionStatus, TurnHandoff, WorkerRole
from cluster.worker_handle import WorkerHandle
from transceiver import GrantTicket

__all__ = ["Attempt", "AttemptContext"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """What every attempt works with.

    max_local_prefill_length  at most so many uncached tokens are prefilled on a generation worker that has the rest
    pipeline_from  prompts of more tokens are pulled while they are computed; None = never
    release  withdraws a worker's grant in the background
    """

    dispatcher: Dispatcher
    loans: PrefixLoans
    turns: Turns
    metrics: ServeMetrics
    aggregated: bool
    max_local_prefill_length: int
    pipeline_from: int | None
    release: Callable[[WorkerHandle, str], None]


class Attempt:
    """Moves one request through the workers and its tokens to its stream.

    Tokens that the client already has are given along, never sent again. Whatever a worker granted and nobody fetches
    is released here, also when the task is cancelled.
    """

    def __init__(self, request_id: str, request: ServeRequest, stream: ServeStream, context: AttemptContext) -> None:
        self._request = request
        self._stream = stream
        self._with = context
        self._engine_request = EngineRequest(
            request_id=request_id,
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            conversation_id=request.conversation_id,
            cache_salt=request.cache_salt,
            first_token_ids=tuple(stream.token_ids),
        )

    async def run(self) -> None:
        """Serve. Raises WorkerLostError and TransferFailedError, after which another attempt may follow, and other
        ClusterErrors.
        """
        dispatcher, request = self._with.dispatcher, self._request
        role = WorkerRole.AGGREGATED if self._with.aggregated else WorkerRole.GENERATION
        async with dispatcher.worker(role, request) as generation:
            if self._with.aggregated or await self._prefers_local_prefill(generation):
                await self._decode(generation, None, None)
                return
            self._engine_request = replace(self._engine_request, kv_receiver=generation.worker_id)
            async with dispatcher.worker(WorkerRole.CONTEXT, request) as context:
                received = False
                try:
                    if self._is_pipelined():
                        ticket, received = await self._prefill_and_receive(context, generation)
                    else:
                        ticket = await self._prefill(context)
                except asyncio.CancelledError:
                    await context.give_up(self._engine_request.request_id)
                    raise
            if ticket is None:
                return
            try:
                await self._decode(generation, context, None if received else ticket)
            except BaseException:
                await context.give_up(self._engine_request.request_id)
                raise

    def _is_pipelined(self) -> bool:
        limit = self._with.pipeline_from
        return limit is not None and len(self._request.prompt_ids) > limit

    async def _prefill_and_receive(
        self, context: WorkerHandle, generation: WorkerHandle
    ) -> tuple[GrantTicket | None, bool]:
        """`_prefill`, while the generation worker pulls the blocks that are computed already. True: it has them all;
        False: the hand-over ahead came to nothing, and the ticket is as good as an ordinary one.
        """
        request = self._engine_request
        offering = asyncio.ensure_future(context.offer(request))
        prefilling = asyncio.ensure_future(self._prefill(context))
        tasks: list[asyncio.Future[Any]] = [offering, prefilling]
        received = False
        try:
            offered = await _first_of(offering, prefilling)
            if offered is not None:
                receiving = asyncio.ensure_future(generation.receive(request, offered))
                tasks.append(receiving)
                received = await self._received(generation, receiving, prefilling)
            ticket = await prefilling
            received = received and ticket is not None
            return ticket, received
        except BaseException:
            received = False
            await context.give_up(request.request_id)
            raise
        finally:
            if not received:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                if len(tasks) > 2:
                    await generation.give_up(request.request_id)

    async def _received(
        self,
        generation: WorkerHandle,
        receiving: asyncio.Future[Admission],
        prefilling: asyncio.Future[GrantTicket | None],
    ) -> bool:
        """Whether the generation worker has the prompt. Raises at once when one of the two workers is lost."""
        started = time.monotonic()
        both: set[asyncio.Future[Any]] = {receiving, prefilling}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if prefilling.done():
            if await prefilling is None:  # the answer has ended: nobody decodes
                return False
            started = time.monotonic()
        try:
            self._note_transfer(generation, await receiving, time.monotonic() - started)
        except WorkerLostError:
            raise
        except ClusterError as error:  # no pages in time, or the transfer failed: the prompt is handed over as ever
            log.info("request %s is not handed over ahead: %s", self._request.request_id, error.message)
            return False
        return True

    async def _prefers_local_prefill(self, generation: WorkerHandle) -> bool:
        """Conditional disaggregation: the generation side has most of the prompt, the rest is short."""
        limit = self._with.max_local_prefill_length
        if limit == 0:
            return False
        cached = await generation.probe(self._request.prompt_ids[:-1], self._request.cache_salt)
        return cached > 0 and len(self._request.prompt_ids) - cached <= limit

    async def _prefill(self, context: WorkerHandle) -> GrantTicket | None:
        """The prompt's KV and the first token, on a context worker. No ticket = the answer ended with that token."""
        request, usage = self._request, self._stream.usage
        prefill = await self._with.loans.prefill(context, self._engine_request)
        prompt_tokens = len(request.prompt_ids)
        cached = min(prefill.cached_tokens, prompt_tokens)
        pulled = min(prefill.pulled_tokens, prompt_tokens - cached)
        if usage.retries and usage.ctx_worker is not None:  # what an earlier try computed was computed
            cached, pulled = min(cached, usage.ctx_cached_tokens), min(pulled, usage.ctx_pulled_tokens)
        self._with.loans.holds(context.worker_id, request.prompt_ids, request.cache_salt)
        self._stream.note(
            ctx_cached_tokens=cached,
            ctx_pulled_tokens=pulled,
            recomputed_tokens=prompt_tokens - cached - pulled,
            ctx_worker=context.worker_id,
        )
        self._with.metrics.prefills.labels("context").inc()
        self._stream.emit((prefill.token_id,))
        if prefill.ticket is None:
            self._close_turn(context, None, None, prefill.finish_reason)
        known = self._engine_request.first_token_ids
        self._engine_request = replace(self._engine_request, first_token_ids=(*known, prefill.token_id))
        return prefill.ticket

    async def _decode(self, generation: WorkerHandle, context: WorkerHandle | None, ticket: GrantTicket | None) -> None:
        """The rest of the answer on a generation worker, which pulls the blocks it lacks under `ticket` first.

        Without a ticket it has received them, or computes the prompt itself.
        """
        stream, request_id = self._stream, self._engine_request.request_id
        stream.note(gen_worker=generation.worker_id)
        generation.open_stream(request_id)
        try:
            started = time.monotonic()
            receiver = None if context is None else context.worker_id
            admission = await generation.generate(replace(self._engine_request, kv_receiver=receiver), ticket)
            if ticket is not None:
                self._note_transfer(generation, admission, time.monotonic() - started)
            stream.on_stop(lambda: generation.stop(request_id))
            if stream.stop_requested:
                await generation.stop(request_id)
            await self._relay(generation, context)
        except (asyncio.CancelledError, TransferFailedError):
            await generation.give_up(request_id)
            raise
        finally:
            stream.on_stop(None)
            generation.close_stream(request_id)

    def _note_transfer(self, generation: WorkerHandle, admission: Admission, seconds: float) -> None:
        """Enter a hand-off into the request's usage. Raises TransferFailedError when the KV did not arrive."""
        usage, moved = self._stream.usage, admission.transfer
        prompt_tokens = len(self._request.prompt_ids)  # a retry also moves the tokens that the client has
        cached = min(admission.cached_tokens, prompt_tokens)
        self._stream.note(
            gen_cached_tokens=cached,
            transferred_tokens=min(admission.transferred_tokens, prompt_tokens - cached),
            repaired_tokens=admission.repaired_tokens,
            ctx_to_gen_blocks=usage.ctx_to_gen_blocks + (moved.blocks if moved else 0),
            ctx_to_gen_bytes=usage.ctx_to_gen_bytes + (moved.bytes if moved else 0),
            transport=moved.transport if moved else None,
        )
        if admission.status is AdmissionStatus.TRANSFER_FAILED:
            self._with.metrics.transfer_failures.labels("ctx_to_gen").inc()
            reason = moved.reason if moved else "unknown"
            raise TransferFailedError(f"{generation.worker_id} could not fetch the prompt's KV: {reason}")
        self._with.metrics.handoff.observe(seconds)

    async def _relay(self, generation: WorkerHandle, context: WorkerHandle | None) -> None:
        """Pass the generation worker's tokens on to the stream, until the last one."""
        async for delta in generation.outputs(self._engine_request.request_id):
            self._stream.emit(delta.token_ids)
            if delta.finish_reason is None:
                continue
            if delta.finish_reason is FinishReason.ERROR:
                raise EngineFailedError(f"{generation.worker_id}: {delta.error}")
            if context is None:
                prompt_tokens = len(self._request.prompt_ids)
                cached = min(delta.cached_tokens or 0, prompt_tokens)
                self._stream.note(ctx_cached_tokens=cached, recomputed_tokens=prompt_tokens - cached)
                self._with.metrics.prefills.labels("local").inc()
                context = self._with.dispatcher.context_for_turn(self._request)
            self._close_turn(context, generation, delta.ticket, delta.finish_reason)

    def _close_turn(
        self,
        context: WorkerHandle | None,
        generation: WorkerHandle | None,
        ticket: GrantTicket | None,
        reason: FinishReason,
    ) -> None:
        """The answer is complete: tell the client, then let the context side take what it lacks of the turn."""
        request, stream = self._request, self._stream
        stream.finish(reason)
        record = TurnRecord(request.request_id, request.conversation_id, reason, stream.usage)
        turn = TurnHandoff(
            request_id=self._engine_request.request_id,
            conversation_id=request.conversation_id,
            cache_salt=request.cache_salt,
            token_ids=np.concatenate([request.prompt_ids, np.asarray(stream.token_ids, np.int32)]),
            ticket=ticket,
            prompt_tokens=len(request.prompt_ids),
            finish_reason=reason,
        )
        context_id = None if context is None else context.worker_id
        self._with.dispatcher.turn_ended(turn, stream.usage.gen_worker, context_id)
        if context is not None:
            self._with.turns.close(context, generation, turn, record)
            return
        self._with.turns.keep(record)
        if ticket is not None and generation is not None:  # nobody will fetch it
            self._with.release(generation, turn.request_id)


async def _first_of(
    offering: asyncio.Future[GrantTicket | None], prefilling: asyncio.Future[GrantTicket | None]
) -> GrantTicket | None:
    """The offer; None when the prefill ended without one. Raises what the prefill raises."""
    await asyncio.wait({offering, prefilling}, return_when=asyncio.FIRST_COMPLETED)
    if prefilling.done():
        await prefilling
    return await offering
