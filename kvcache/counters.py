"""What a cache manager counts while it works: plain integers, written where things happen and read by `stats`.

Only the manager, its sequences, the tree and the drop handles write here. A request counts from its first computed
token on: one that was opened and closed, or whose pages were given back before anything stood in them, leaves no
trace. Life cycles that keep every block share the sequence's own numbers; windows and recurrent states have theirs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from kvcache.live_range import first_live_block
from kvcache.provenance import BlockOrigin

if TYPE_CHECKING:
    from kvcache.sequence_cache import SequenceCache

__all__ = ["BlockCounts", "CacheCounters", "EvictionCounts", "count_blocks"]


@dataclass(slots=True)
class BlockCounts:
    """Blocks (or pages) since the start.

    reused_full, reused_partial   found in the cache; a partial one was copied into a page of the request's own
    missed                        blocks of prompts that were not found, so they were computed or received
    answers                       blocks of answers beyond the prompts' last ones
    """

    reused_full: int = 0
    reused_partial: int = 0
    missed: int = 0
    answers: int = 0


@dataclass(slots=True)
class CacheCounters:
    """Totals since the start.

    blocks        by ordinal: what every full-attention life cycle sees; own: the others, by group. A recurrent group
                  counts requests: reused_full (state found at a block's end), reused_partial (within one), missed
    received      of `missed` and `answers`, those whose KV came from another worker or a lower tier
    copied_pages  pages copied within the device (partial blocks, snapshots), by group
    """

    requests: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    shortened_tokens: int = 0
    received: int = 0
    snapshots_skipped: int = 0
    suspended: int = 0
    resumed: int = 0
    blocks: BlockCounts = field(default_factory=BlockCounts)
    own: dict[int, BlockCounts] = field(default_factory=dict)
    copied_pages: Counter[int] = field(default_factory=Counter)


@dataclass(slots=True)
class EvictionCounts:
    """What the tree gave up since the start; only `radix_evict` and the drop handles write them.

    blocks                for want of room, `superseded` ones among them
    pruned                blocks that no match could end in any more, since their window or snapshot was gone
    window_pages          windows and snapshots for want of room, by group
    dropped_turn_pages    windows and snapshots of turns that are retained no more, by group
    """

    blocks: int = 0
    superseded: int = 0
    pruned: int = 0
    window_pages: Counter[int] = field(default_factory=Counter)
    dropped_turn_pages: Counter[int] = field(default_factory=Counter)

    def by_reason(self) -> dict[str, int]:
        """Over all life cycles; a block counts once."""
        return {
            "capacity": self.blocks - self.superseded,
            "superseded": self.superseded,
            "pruned": self.pruned,
            "window": self.window_pages.total(),
            "dropped_turn": self.dropped_turn_pages.total(),
        }

    def of_group(self, group: int, full: bool) -> dict[str, int]:
        """One life cycle's pages; `full`: it has a page for every block."""
        return {
            "capacity": self.blocks - self.superseded if full else 0,
            "superseded": self.superseded if full else 0,
            "pruned": self.pruned if full else 0,
            "window": self.window_pages[group],
            "dropped_turn": self.dropped_turn_pages[group],
        }


def count_blocks(sequence: SequenceCache, blocks: int, origin: BlockOrigin) -> None:
    """A sequence's computed tokens reach into block `blocks` - 1, the last one counted was `counted_blocks` - 1."""
    manager = sequence._manager
    counters, shape = manager.counters, sequence._shape
    if sequence.counted_blocks < 0:
        _count_request(sequence, counters)
    first, sequence.counted_blocks = sequence.counted_blocks, max(blocks, sequence.counted_blocks)
    fresh = sequence.counted_blocks - first
    _add(counters.blocks, fresh, sequence.prompt_ended)
    if origin is not BlockOrigin.COMPUTED:
        counters.received += fresh
    for row, group, _ in shape.window_rows:
        pages = int(np.count_nonzero(sequence.rows[row, first:blocks] >= 0))
        _add(counters.own[group], pages, sequence.prompt_ended)


def _add(counts: BlockCounts, blocks: int, answer: bool) -> None:
    if answer:
        counts.answers += blocks
    else:
        counts.missed += blocks


def _count_request(sequence: SequenceCache, counters: CacheCounters) -> None:
    """The first tokens of a request: what it found is final now."""
    shape, reused = sequence._shape, sequence.num_reused_tokens
    full, rest = divmod(reused, shape.block)
    sequence.counted_blocks = full + (1 if rest else 0)
    counters.requests += 1
    counters.prompt_tokens += sequence.prompt_tokens
    counters.reused_tokens += reused
    counters.shortened_tokens += sequence.matched_tokens - reused
    counters.blocks.reused_full += full
    counters.blocks.reused_partial += 1 if rest else 0
    for _, group, window in shape.window_rows:
        own = counters.own.setdefault(group, BlockCounts())
        own.reused_full += full - min(full, first_live_block(reused, shape.block, window))
        own.reused_partial += 1 if rest else 0
    for group in shape.recurrent:
        own = counters.own.setdefault(group, BlockCounts())
        own.reused_full += 1 if reused and not rest else 0
        own.reused_partial += 1 if rest else 0
        own.missed += 0 if reused else 1
