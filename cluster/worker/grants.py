"""The grants a worker has given: each holds its pages pinned until a peer has fetched them or nobody will."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from cluster.engine_loop import EngineLoop
from cluster.errors import NotReadyError
from cluster.request import EngineRequest
from kvcache import PagePin, PinLimitError, ReuseScope, SequenceCache
from transceiver import CacheTransceiver, GrantTicket, Publication, TransceiverError

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

    def __len__(self) -> int:
        return len(self._open)

    def ids(self) -> list[str]:
        """Requests with an open grant."""
        return list(self._open)

    def give(self, request: EngineRequest, cache: SequenceCache, num_tokens: int) -> GrantTicket:
        """Offer the first `num_tokens` of a sequence to a peer; its pages stay pinned until that is settled.

        Call with the engine's lock held. The sequence itself may be closed afterwards. Raises NotReadyError when too
        many grants are open.
        """
        assert self._transceiver is not None  # an aggregated worker has no peers
        groups = range(len(self._engine.manager.layout.groups))
        try:
            pin = cache.pin_for_peer()
        except PinLimitError as error:
            raise NotReadyError(f"{self._worker_id} has too many open grants: {error}") from error
        try:
            publication = self._transceiver.publish(
                request.request_id,
                tuple(cache.block_table(0, num_tokens, group) for group in groups),
                conversation_id=request.conversation_id,
                scope=ReuseScope(cache_salt=request.cache_salt).digest(),
                lease_s=self._lease_s,
            )
        except TransceiverError as error:
            pin.release()
            raise NotReadyError(f"{self._worker_id} cannot grant its blocks: {error}") from error
        self._open[request.request_id] = publication
        self._spawn(self._unpin_when_settled(request.request_id, publication, pin))
        return publication.ticket

    def withdraw(self, request_id: str) -> None:
        """Nobody will fetch it. Unknown ids are ignored."""
        publication = self._open.get(request_id)
        if publication is not None:
            publication.cancel()

    def withdraw_all(self) -> None:
        """The worker ends."""
        for request_id in self.ids():
            self.withdraw(request_id)

    async def _unpin_when_settled(self, request_id: str, publication: Publication, pin: PagePin) -> None:
        try:
            outcome = await asyncio.wrap_future(publication.future)
            log.debug("grant of %s: %s %s", request_id, outcome.status, outcome.reason)
        finally:
            self._open.pop(request_id, None)
            with self._engine.lock:
                pin.release()
            self._engine.wake()
