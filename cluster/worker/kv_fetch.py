"""Fill a sequence's cache with blocks that a peer holds: the receiving end of a hand-off and of a back-flow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.engine_loop import EngineLoop
from kvcache import BlockOrigin, ReuseScope, SequenceCache
from transceiver import CacheTransceiver, GrantTicket, Pull, TransceiverError, TransferOutcome, TransferStatus

__all__ = ["FetchResult", "KvFetch"]


@dataclass(frozen=True, slots=True)
class FetchResult:
    """How a fetch ended.

    arrived         blocks are here: all but the damaged ones are verified
    intact_tokens   the cache now holds verified KV up to here
    damaged_blocks  blocks that arrived but failed their check
    """

    outcome: TransferOutcome
    arrived: bool
    intact_tokens: int
    damaged_blocks: int


class KvFetch:
    """One pull into one open sequence cache.

    The cache must have capacity for all tokens. While the pull is under way nobody else may close the cache;
    `memory_idle` says when no operation can touch its pages any more.
    """

    def __init__(
        self,
        engine: EngineLoop,
        transceiver: CacheTransceiver,
        cache: SequenceCache,
        *,
        origin: BlockOrigin,
    ) -> None:
        self._engine = engine
        self._transceiver = transceiver
        self._cache = cache
        self._origin = origin
        self._pull: Pull | None = None

    async def run(
        self,
        ticket: GrantTicket,
        token_ids: NDArray[np.int32],
        *,
        conversation_id: str | None,
        cache_salt: str | None,
        timeout_s: float,
        end_of_prompt: bool = True,
        register: Callable[[Pull], None] = lambda pull: None,
    ) -> FetchResult:
        """Pull the blocks of `token_ids` that the cache lacks and append those that arrive intact.

        With nothing to fetch the pull is empty and only tells the holder that its pages are free again.
        `end_of_prompt`: `token_ids` are all of the prompt, which is complete when they are here.
        `register` gets the pull as soon as it exists, so that an abort can find it. A failure is a value, never an
        exception. An interior damaged block ends the intact prefix: what follows it has no KV to stand on.
        """
        cache, total = self._cache, len(token_ids)
        with self._engine.lock:
            have = cache.num_computed_tokens
            groups = range(len(self._engine.manager.layout.groups)) if total > have else ()
            wanted = tuple(cache.block_table(have, total, group) for group in groups)
        try:
            self._pull = self._transceiver.pull(
                ticket,
                wanted,
                conversation_id=conversation_id,
                scope=ReuseScope(cache_salt=cache_salt).digest(),
                timeout_s=timeout_s,
            )
        except TransceiverError as error:  # too many pulls at once, or the transceiver is closing
            return _not_begun(str(error), have)
        except ValueError as error:  # a ticket that was damaged on its way, or blocks that no transfer can bring
            return _not_begun(f"refused by this side's transceiver: {error}", have)
        register(self._pull)
        try:
            outcome = await asyncio.wrap_future(self._pull.future)
        except asyncio.CancelledError:
            self._pull.cancel()
            raise
        if outcome.status is not TransferStatus.DONE and not outcome.blocks:
            return FetchResult(outcome, False, have, 0)
        tokens_per_block = self._engine.manager.layout.tokens_per_block
        damaged = {ordinal for _, ordinal in outcome.bad_ordinals}
        intact = max(have, min(damaged) * tokens_per_block) if damaged else total
        with self._engine.lock:
            ends = end_of_prompt and intact == total
            if intact > have or ends:
                cache.append_computed(token_ids[have:intact], end_of_prompt=ends, origin=self._origin)
        return FetchResult(outcome, True, intact, len(damaged))

    async def memory_idle(self) -> None:
        """Return when no operation of this fetch can touch the cache's pages any more."""
        if self._pull is not None:
            await asyncio.shield(asyncio.wrap_future(self._pull.settled))


def _not_begun(reason: str, have: int) -> FetchResult:
    return FetchResult(TransferOutcome(TransferStatus.FAILED, reason), False, have, 0)
