"""Device -> host -> disk: takes whole blocks that the tree gives up for want of room, and brings them back.

Called by the tree (on eviction) and the manager (before a match). Content is verified on the way back; what is not
intact is a miss and a counter. It never allocates or frees a device page itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.block_keys import chain_keys
from kvcache.block_pool import BlockPool
from kvcache.events import EventKind, EventLog, Tier
from kvcache.radix_match import TreeShape
from kvcache.radix_node import RadixNode, Tokens
from kvcache.storage.page_storage import PageStorage
from kvcache.tiers.disk_tier import DiskTier
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.tier_block import TierBlock

__all__ = ["LowerTiers"]


class LowerTiers:
    """Counters are in blocks: offloaded (device -> host), onboarded (back), dropped (left the last tier), corrupt."""

    def __init__(
        self,
        shape: TreeShape,
        storage: PageStorage,
        pools: Sequence[BlockPool],
        host: HostTier,
        disk: DiskTier | None,
        events: EventLog | None,
    ) -> None:
        self._shape = shape
        self._storage = storage
        self._pools = pools
        self.host = host
        self.disk = disk
        self._events = events
        self.offloaded = 0
        self.onboarded = 0
        self.dropped = 0
        self._corrupt = 0

    @property
    def corrupt(self) -> int:
        """Blocks that came back changed and were refused."""
        return self._corrupt + (0 if self.disk is None else self.disk.corrupt)

    def __len__(self) -> int:
        return len(self.host) + (0 if self.disk is None else len(self.disk))

    def __contains__(self, key: bytes) -> bool:
        return key in self.host or (self.disk is not None and key in self.disk)

    def offload(self, node: RadixNode, first: int, scope: bytes) -> set[bytes]:
        """Copy the whole blocks of a run from block `first` on into the host tier. Returns the keys now kept."""
        block = self._shape.block
        kept: set[bytes] = set()
        rows = node.rows(len(node.digests))
        for index in range(first, len(node.digests)):
            parts = [
                (group, -1, self._covered(row, group, int(page)), self._bytes(int(page), group))
                for row, group in enumerate(self._shape.attention)
                if (page := rows[row, index]) >= 0
            ]
            start = node.start + index * block
            parts.extend(
                (group, position, 0, self._bytes(page, group))
                for (group, position), page in sorted(node.states.items())
                if start < position <= start + block
            )
            tier_block = TierBlock.of(node.digests[index], scope, 0 if node.superseded else 1, tuple(parts))
            self.offloaded += 1
            kept.add(tier_block.key)
            for lost in self._push(tier_block):
                kept.discard(lost)
        if self._events is not None and kept:
            self._events.add(EventKind.UPDATED, tier=Tier.HOST, keys=tuple(sorted(kept)))
        return kept

    def _push(self, block: TierBlock) -> list[bytes]:
        """Into the host tier; what gives way goes to disk. Returns the keys that are in no tier any more."""
        lost: list[bytes] = []
        for down in self.host.put(block):
            if self.disk is None:
                lost.append(down.key)
                continue
            gone = self.disk.put(down)
            lost.extend(gone)
            if self._events is not None and down.key not in gone:
                self._events.add(EventKind.UPDATED, tier=Tier.DISK, keys=(down.key,))
        self.dropped += len(lost)
        earlier = tuple(key for key in lost if key != block.key)
        if self._events is not None and earlier:
            self._events.add(EventKind.REMOVED, keys=earlier)
        return lost

    def _covered(self, row: int, group: int, page: int) -> int:
        return self._shape.block if row in self._shape.full_rows else int(self._pools[group].coverage[page])

    def _bytes(self, page: int, group: int) -> bytes:
        return bytes(self._storage.page(page, group))

    def available(self, parent: bytes, tokens: Tokens) -> list[bytes]:
        """Keys of the leading whole blocks of `tokens` that some tier holds, behind the block with key `parent`."""
        block, keys = self._shape.block, []
        for start in range(0, len(tokens) - block + 1, block):
            (parent,) = chain_keys(parent, tokens[start : start + block], block)
            if parent not in self:
                break
            keys.append(parent)
        return keys

    def take(self, key: bytes, scope: bytes) -> TierBlock | None:
        """Remove a block from its tier and verify it; None (and forgotten) when it is not what it was."""
        block = self.host.take(key)
        if block is None and self.disk is not None:
            block = self.disk.take(key, scope)
        if block is not None and (block.scope != scope or not block.intact()):
            self._corrupt += 1
            block = None
        if block is None and self._events is not None:
            self._events.add(EventKind.REMOVED, keys=(key,))
        return block

    def lift(self, keys: Sequence[bytes], scope: bytes) -> int:
        """Bring blocks from disk into host memory before they are needed. Returns how many."""
        lifted = 0
        for key in keys:
            if self.disk is None or key not in self.disk:
                continue
            block = self.disk.take(key, scope)
            if block is None:
                break
            lifted += 1
            if self._events is not None:
                self._events.add(EventKind.UPDATED, tier=Tier.HOST, keys=(key,))
            self._push(block)
        return lifted

    def put_back(self, block: TierBlock) -> None:
        """A block that was taken and could not be used after all."""
        self._push(block)

    def write_page(self, block: TierBlock, group: int, position: int, page: int) -> bool:
        """Copy a part's content into a device page. False when the block has no such part."""
        for owner, at, _, raw in block.parts:
            if (owner, at) == (group, position):
                self._storage.page(page, group)[:] = raw
                return True
        return False

    def clear(self) -> None:
        """Forget everything."""
        keys = self.host.clear() + ([] if self.disk is None else self.disk.clear())
        if self._events is not None and keys:
            self._events.add(EventKind.REMOVED, keys=tuple(keys))
