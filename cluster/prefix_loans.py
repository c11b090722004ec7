"""Prefill that takes what any other worker holds of the prompt: who probably holds it, and the loan of its blocks.

The orchestrator's view is an index of what each worker was last known to hold. It may be wrong, which costs a call or a
recomputation, never a wrong answer: the lender says what it really has, the context worker what it really lacks.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ClusterError, EngineFailedError
from cluster.fleet import Fleet
from cluster.request import EngineRequest
from cluster.routing import PrefixIndex
from cluster.worker import CacheShortfall, PrefillResult, PrefixLoan, WorkerRole
from cluster.worker_handle import WorkerHandle
from transceiver import TransferStatus

__all__ = ["PrefixLoans"]

_GRAIN_TOKENS = 64  # the index counts in about so many tokens: a loan of less is not worth a call, nor its hashing


@dataclass(frozen=True, slots=True)
class _Lender:
    """A worker that probably holds the first `grains` of `keys`; the context worker should hold `own`."""

    worker: WorkerHandle
    keys: list[bytes]
    grains: int
    own: int


class PrefixLoans:
    """Lives on the orchestrator's event loop. With `enabled` false nothing is lent."""

    def __init__(self, fleet: Fleet, tokens_per_block: int, *, enabled: bool = True) -> None:
        self._fleet = fleet
        self._grain = tokens_per_block * max(1, _GRAIN_TOKENS // tokens_per_block)
        self._index = PrefixIndex(self._grain)
        self._enabled = enabled
        self._ids = itertools.count()

    def holds(self, worker_id: str, token_ids: NDArray[np.int32], cache_salt: str | None) -> None:
        """A worker's cache has the KV of these tokens now."""
        if self._enabled:
            self._index.add(self._index.keys(token_ids, cache_salt), worker_id)

    def lost(self, worker_id: str) -> None:
        """A worker came back with an empty cache."""
        self._index.remove_worker(worker_id)

    async def prefill(self, context: WorkerHandle, request: EngineRequest) -> PrefillResult:
        """`ContextWorker.prefill`, with a loan where another worker holds more of the prompt. Raises what it raises."""
        lender = self._lender(context, request) if self._enabled else None
        if lender is None:
            return _done(await context.prefill(request))
        cached = 0
        if lender.grains <= lender.own:  # no loan, unless the context worker has less than it was given
            result = await context.prefill(request, None, lender.grains * self._grain)
            if isinstance(result, PrefillResult):
                return result
            cached = result.cached_tokens
            self._index.discard(lender.keys[cached // self._grain :], context.worker_id)
        loan = await self._borrow(lender, request, context.worker_id)
        if loan is None or loan.num_tokens <= cached:
            if loan is not None:
                await lender.worker.let_go(loan.loan_id)
            return _done(await context.prefill(request))
        settled = False
        try:
            done = _done(await context.prefill(request, loan))
            settled = done.pull is not None and done.pull.status is TransferStatus.DONE
            return done
        finally:
            if not settled:  # a context worker that ended before it asked never told the lender
                await lender.worker.let_go(loan.loan_id)

    def _lender(self, context: WorkerHandle, request: EngineRequest) -> _Lender | None:
        """Who is known to hold most of the prompt besides the context worker. Of several a generation worker, which has
        answers for certain; then the least busy one.
        """
        keys = self._index.keys(request.known_ids[:-1], request.cache_salt)
        depths = self._index.matched_blocks(keys)
        own = depths.pop(context.worker_id, 0)
        ready = [h for role in (WorkerRole.CONTEXT, WorkerRole.GENERATION) for h in self._fleet.ready(role)]
        holders = [handle for handle in ready if depths.get(handle.worker_id)]
        if not holders:
            return None

        def rank(handle: WorkerHandle) -> tuple[int, bool, int]:
            generation = handle.role is WorkerRole.GENERATION
            return depths[handle.worker_id], generation, -handle.active_requests

        best = max(holders, key=rank)
        return _Lender(best, keys, depths[best.worker_id], own)

    async def _borrow(self, lender: _Lender, request: EngineRequest, borrower: str) -> PrefixLoan | None:
        """Ask for a loan. None when the lender has nothing or is gone: then its share is computed."""
        asked = replace(request, request_id=f"{request.request_id}/loan{next(self._ids)}", kv_receiver=borrower)
        try:
            loan = await lender.worker.lend(asked)
        except ClusterError:
            return None
        except asyncio.CancelledError:  # the call goes on there, and may end in a grant
            await lender.worker.let_go(asked.request_id)
            raise
        held = 0 if loan is None else loan.num_tokens // self._grain
        self._index.discard(lender.keys[held:], lender.worker.worker_id)
        return loan


def _done(result: PrefillResult | CacheShortfall) -> PrefillResult:
    """A prefill that was told to compute in any case."""
    if isinstance(result, CacheShortfall):
        raise EngineFailedError("a context worker did not compute a prompt that it was told to compute")
    return result
