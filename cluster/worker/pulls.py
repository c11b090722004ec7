"""The transfers into a worker's caches, by request: begun with the worker's deadline, found by an abort, waited for.

A cache that a transfer may still write into is not closed before that is over.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.engine_loop import EngineLoop
from cluster.request import EngineRequest
from cluster.worker.kv_fetch import FetchResult, KvFetch
from cluster.worker.live_requests import LiveRequests
from cluster.worker.messages import TurnHandoff
from kvcache import BlockOrigin, SequenceCache
from transceiver import CacheTransceiver, GrantTicket, Pull

__all__ = ["Pulls"]


class Pulls:
    """Used on the worker's event loop only.

    timeout_s  how long one transfer may take
    spawn      runs a coroutine on the worker's loop until it ends
    """

    def __init__(
        self,
        engine: EngineLoop,
        transceiver: CacheTransceiver | None,
        live: LiveRequests,
        timeout_s: float,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._engine = engine
        self._transceiver = transceiver
        self._live = live
        self._spawn = spawn
        self._open: dict[str, Pull] = {}
        self.timeout_s = timeout_s

    def prepare(self, cache: SequenceCache, origin: BlockOrigin) -> KvFetch:
        """A transfer into `cache`, not begun yet."""
        assert self._transceiver is not None  # an aggregated worker has no peers
        return KvFetch(self._engine, self._transceiver, cache, origin=origin)

    async def run(
        self,
        fetch: KvFetch,
        ticket: GrantTicket,
        token_ids: NDArray[np.int32],
        request: EngineRequest | TurnHandoff,
        *,
        end_of_prompt: bool = True,
    ) -> FetchResult:
        """`KvFetch.run` for a request, within the worker's deadline; `cancel` and an abort of the request reach it."""
        try:
            return await fetch.run(
                ticket,
                token_ids,
                conversation_id=request.conversation_id,
                cache_salt=request.cache_salt,
                timeout_s=self.timeout_s,
                end_of_prompt=end_of_prompt,
                register=lambda pull: self._register(request.request_id, pull),
            )
        finally:
            self._open.pop(request.request_id, None)

    def cancel(self, request_id: str) -> None:
        """Nobody wants the request's blocks any more. Unknown ids are ignored."""
        pull = self._open.get(request_id)
        if pull is not None:
            pull.cancel()

    def close_when_idle(self, cache: SequenceCache, fetch: KvFetch) -> None:
        """Close a cache once no transfer can touch its pages any more; until then they stay quarantined."""

        async def close() -> None:
            await fetch.memory_idle()
            with self._engine.lock:
                cache.close()
            self._engine.wake()

        self._spawn(close())

    def _register(self, request_id: str, pull: Pull) -> None:
        self._open[request_id] = pull
        if self._live.is_aborted(request_id):
            pull.cancel()
