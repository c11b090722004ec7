"""One side of a turn cell: a real cache manager over pattern-filled pages, and the steps of a conversation's turn.

Lives in a rank process. "Computing" KV is writing the pattern of its token; everything else is what a worker does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cluster.transceiver_test.pattern import block_pattern
from kvcache import BlockReuseConfig, KvCacheConfig, KvCacheManager, PagePin, ReusePolicy, ReuseScope, SequenceCache
from kvcache.layout import KvLayout
from kvcache.storage import BytesPageStorage
from transceiver import CacheTransceiver, CacheTransceiverConfig, GrantTicket, Publication

__all__ = ["TurnEnd"]

_CONVERSATION = "turns"
_SCOPE = ReuseScope()


class TurnEnd:
    """Holds one sequence at a time: `begin` a turn, compute or pull its blocks, `end` it."""

    def __init__(
        self,
        name: str,
        layout: KvLayout,
        pages: int,
        policy: ReusePolicy,
        max_num_turns: int,
        config: CacheTransceiverConfig,
        secret: bytes,
        host: str,
    ) -> None:
        self.layout = layout
        self.storage = BytesPageStorage(layout, [pages], shared=config.wants_shared_pools)
        reuse = BlockReuseConfig(policy=policy, max_num_turns=max_num_turns)
        cache = KvCacheConfig(
            tokens_per_block=layout.tokens_per_block,
            max_tokens=pages * layout.tokens_per_block,
            block_reuse_config=reuse,
        )
        self.manager = KvCacheManager(layout, cache, self.storage)
        self.transceiver = CacheTransceiver(
            worker_id=name, storage=self.storage, config=config, secret=secret, host=host
        )
        self.transceiver.start()
        self._sequence: SequenceCache | None = None
        self._tokens: NDArray[np.int32] = np.empty(0, np.int32)
        self._publication: Publication | None = None
        self._pin: PagePin | None = None

    def close(self) -> None:
        """Stop the transceiver, then free the pages."""
        self.transceiver.close()
        self.storage.close()

    def begin(self, request: str, tokens: list[int]) -> int:
        """Match the prompt and take pages for all of it; returns the reused tokens."""
        self._tokens = np.array(tokens, np.int32)
        self._sequence = self.manager.create(request, self._tokens, scope=_SCOPE, conversation_id=_CONVERSATION)
        reused = self._sequence.num_reused_tokens
        self._sequence.resize(len(tokens))
        return int(reused)

    def compute(self, end: int, end_of_prompt: bool) -> None:
        """Write the KV of the tokens up to `end` that are not there yet, and publish as the policy says."""
        sequence = self._live()
        sequence.resize(max(end, sequence.capacity_tokens))
        start = sequence.num_computed_tokens
        size = self.layout.tokens_per_block
        pages = sequence.pages(0)
        for ordinal in range(start // size, -(-end // size)):
            first, last = max(start, ordinal * size), min(end, (ordinal + 1) * size)
            low, high = first - ordinal * size, last - ordinal * size
            self._cells(int(pages[ordinal]))[:, :, :, low:high, :] = self._expected(first, last)
        sequence.append_computed(self._tokens[start:end], end_of_prompt=end_of_prompt)

    def extend(self, tokens: list[int]) -> None:
        """The answer's tokens follow the prompt's."""
        self._tokens = np.concatenate([self._tokens, np.array(tokens, np.int32)])

    def publish(self, transfer: str, start: int, end: int, lease_s: float) -> GrantTicket:
        """Offer the blocks of tokens `start` .. `end`."""
        sequence = self._live()
        self._pin = sequence.pin_for_peer()
        table = sequence.block_table(start, end, 0)
        self._publication = self.transceiver.publish(
            transfer, (table,), conversation_id=_CONVERSATION, scope=_SCOPE.digest(), lease_s=lease_s
        )
        return self._publication.ticket

    def published(self, timeout_s: float) -> str:
        """How the offer ended; its pages are unpinned. Raises TimeoutError."""
        assert self._publication is not None
        assert self._pin is not None
        outcome = self._publication.future.result(timeout_s)
        self._pin.release()
        return str(outcome.status)

    def pull(self, ticket: GrantTicket, start: int, end: int, timeout_s: float, end_of_prompt: bool) -> dict[str, Any]:
        """Pull the blocks of tokens `start` .. `end`, check every byte of the sequence, publish as the policy says."""
        sequence = self._live()
        sequence.resize(max(end, sequence.capacity_tokens))
        table = sequence.block_table(start, end, 0)
        pull = self.transceiver.pull(
            ticket, (table,), conversation_id=_CONVERSATION, scope=_SCOPE.digest(), timeout_s=timeout_s
        )
        outcome = pull.future.result(timeout_s + 3.0)
        pull.settled.result(timeout_s + 3.0)
        status = str(outcome.status)
        wrong = self._wrong_blocks(end) if status == "done" else []
        if status == "done":
            have = sequence.num_computed_tokens
            sequence.append_computed(self._tokens[have:end], end_of_prompt=end_of_prompt)
        return {
            "status": status,
            "reason": outcome.reason,
            "blocks": outcome.blocks,
            "bytes": outcome.bytes,
            "transport": outcome.transport,
            "wrong": wrong,
        }

    def damage(self) -> None:
        """Flip one bit of the sequence's first page (--force-mismatch): the check of `end` must find it."""
        self.storage.page(int(self._live().pages(0)[0]), 0)[0] ^= 1

    def end(self) -> list[int]:
        """End the turn and the sequence; returns wrong blocks (none) after a check of the whole sequence."""
        sequence = self._live()
        wrong = self._wrong_blocks(sequence.num_computed_tokens)
        sequence.end_turn()
        sequence.close()
        self._sequence = None
        self.manager.check_integrity()
        return wrong

    def _live(self) -> SequenceCache:
        assert self._sequence is not None, "begin a turn first"
        return self._sequence

    def _wrong_blocks(self, end: int) -> list[int]:
        size = self.layout.tokens_per_block
        pages = self._live().pages(0)
        wrong = []
        for ordinal in range(-(-end // size)):
            first, last = ordinal * size, min(end, (ordinal + 1) * size)
            cells = self._cells(int(pages[ordinal]))[:, :, :, : last - first, :]
            if not np.array_equal(cells, self._expected(first, last)):
                wrong.append(ordinal)
        return wrong

    def _cells(self, page: int) -> NDArray[np.uint64]:
        group = self.layout.groups[0]
        words = np.frombuffer(self.storage.page(page, 0), np.uint64)
        shape = (len(group.layers), group.kv_factor, group.num_kv_heads, self.layout.tokens_per_block, -1)
        return words.reshape(shape)

    def _expected(self, first: int, last: int) -> NDArray[np.uint64]:
        positions = np.arange(first, last, dtype=np.uint64)
        seeds = self._tokens[first:last].astype(np.uint64) * np.uint64(1 << 20) + positions
        return block_pattern(self.layout.groups[0], 0, seeds)
