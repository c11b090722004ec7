"""The grants a worker has given: each holds its pages pinned until a peer has fetched them or nobody will."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from cluster.engine_loop import EngineLoop
from cluster.errors import NotReadyError
from cluster.request import EngineRequest
from kvcache import BlockTable, PagePin, PinLimitError, ReuseScope, SequenceCache
from transceiver import CacheTransceiver, GrantTicket, Publication, TransceiverError, held_back

__all__ = ["Grants"]

log = logging.getLogger(__name__)


class Grants:
    """Open grants by request id. Used on the worker's event loop only.

    lease_s  how long a grant that no peer asks for stays open
    spawn    runs a coroutine on the worker's loop until it ends
    """

    def __init__(
        self,
        worker_id: str,
        engine: EngineLoop,
        transceiver: CacheTransceiver | None,
        lease_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._worker_id = worker_id
        self._engine = engine
        self._transceiver = transceiver
        self._lease_s = lease_s
        self._spawn = spawn
        self._open: dict[str, Publication] = {}
        self._pins: dict[str, PagePin] = {}
        self._growing: dict[str, tuple[int, SequenceCache | None]] = {}

    def __len__(self) -> int:
        return len(self._open)

    def ids(self) -> list[str]:
        """Requests with an open grant."""
        return list(self._open)

    def give_again(self, request: EngineRequest, cache: SequenceCache, num_tokens: int) -> GrantTicket:
        """`give`, after a grant of the same request that has ended early."""
        return self.give(replace(request, request_id=_whole(request.request_id)), cache, num_tokens)

    def give(self, request: EngineRequest, cache: SequenceCache, num_tokens: int) -> GrantTicket:
        """Offer the first `num_tokens` of a sequence to a peer; its pages stay pinned until that is settled.

        Call with the engine's lock held. The sequence itself may be closed afterwards. Raises NotReadyError, nothing
        granted or pinned, when too many grants are open or the transceiver refuses this one.
        """
        groups = range(len(self._engine.manager.layout.groups))
        pin = self._pin(cache)
        try:
            tables = tuple(cache.block_table(0, num_tokens, group) for group in groups)
            publication = self._publish(request, tables, open_ended=False)
        except BaseException:
            pin.release()
            raise
        self._pins[request.request_id] = pin
        return publication.ticket

    def open_ended(self, request: EngineRequest) -> GrantTicket:
        """Begin a grant that `extend` adds blocks to while they are computed; until the last ones come the sequence
        holds its pages, nothing pins them. Raises NotReadyError.
        """
        ticket = self._publish(request, (), open_ended=True).ticket
        self._growing[request.request_id] = (0, None)
        return ticket

    def is_growing(self, request_id: str) -> bool:
        """Whether blocks may still be added to the request's grant."""
        return request_id in self._growing

    def extend(self, request_id: str, cache: SequenceCache, num_tokens: int, *, last: bool) -> GrantTicket:
        """Add the blocks up to `num_tokens` that are not granted yet: whole ones, and the last one with `last`.

        Until then the sequence must hold its pages; after it they stay pinned until the grant is settled. Groups whose
        blocks may change before the prompt ends go whole with the last call. Call with the engine's lock held. Raises
        NotReadyError, the grant withdrawn, when it has ended, the sequence was preempted since the last call, or the
        transceiver refuses the blocks.
        """
        layout, publication = self._engine.manager.layout, self._open.get(request_id)
        sent, owner = self._growing.get(request_id, (0, None))
        if (
            publication is None
            or request_id not in self._growing
            or cache.suspended is not None
            or (owner is not None and owner is not cache)
        ):
            self.withdraw(request_id)  # what was granted is gone, or nobody will read it
            raise NotReadyError(f"{self._worker_id}: the grant ended before its prompt was computed")
        end = num_tokens if last else num_tokens - num_tokens % layout.tokens_per_block
        tables = []
        for group, shape in enumerate(layout.groups):
            late = held_back(shape, cache.capacity_tokens)
            if last or not late:
                tables.append(cache.block_table(0 if late else sent, end, group))
        self._growing[request_id] = (end, cache)
        if last:
            self._pins[request_id] = self._pin(cache)
            del self._growing[request_id]
        try:
            publication.extend(tuple(tables), last=last)
        except ValueError as error:
            self.withdraw(request_id)
            raise NotReadyError(f"{self._worker_id} cannot grant its blocks: {error}") from error
        return publication.ticket

    def withdraw(self, request_id: str) -> None:
        """Nobody will fetch it. Unknown ids are ignored."""
        self._growing.pop(request_id, None)
        for grant_id in (request_id, _whole(request_id)):
            publication = self._open.get(grant_id)
            if publication is not None:
                publication.cancel()

    def withdraw_all(self) -> None:
        """The worker ends."""
        for request_id in self.ids():
            self.withdraw(request_id)

    def _pin(self, cache: SequenceCache) -> PagePin:
        try:
            return cache.pin_for_peer()
        except PinLimitError as error:
            raise NotReadyError(f"{self._worker_id} has too many open grants: {error}") from error

    def _publish(self, request: EngineRequest, tables: tuple[BlockTable, ...], *, open_ended: bool) -> Publication:
        assert self._transceiver is not None  # an aggregated worker has no peers
        try:
            publication = self._transceiver.publish(
                request.request_id,
                tables,
                conversation_id=request.conversation_id,
                scope=ReuseScope(cache_salt=request.cache_salt).digest(),
                lease_s=self._lease_s,
                open_ended=open_ended,
                receiver=request.kv_receiver,
            )
        except (TransceiverError, ValueError) as error:  # too many at once, or what no grant can be made of
            raise NotReadyError(f"{self._worker_id} cannot grant its blocks: {error}") from error
        self._open[request.request_id] = publication
        self._spawn(self._unpin_when_settled(request.request_id, publication))
        return publication

    async def _unpin_when_settled(self, request_id: str, publication: Publication) -> None:
        try:
            outcome = await asyncio.wrap_future(publication.future)
            log.debug("grant of %s: %s %s", request_id, outcome.status, outcome.reason)
        finally:
            self._open.pop(request_id, None)
            self._growing.pop(request_id, None)
            pin = self._pins.pop(request_id, None)
            if pin is not None and self._engine.manager.poison_reason is None:  # else the whole worker is about to go
                with self._engine.lock:
                    pin.release()
                self._engine.wake()


def _whole(request_id: str) -> str:
    """The id of a request's second grant."""
    return f"{request_id}/whole"
