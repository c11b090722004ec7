"""Device -> host -> disk: takes whole blocks that the tree gives up for want of room, and brings them back.

Called by the tree (on eviction) and the manager (before a match). Content is verified on the way back; what is not
intact is a miss and a counter. It never allocates or frees a device page itself.
"""

from __future__ import annotations

from collections.abc import Container, Sequence

from kvcache.block_keys import chain_keys
from kvcache.block_pool import BlockPool
from kvcache.events import EventKind, EventLog, Tier
from kvcache.radix_match import TreeShape
from kvcache.radix_node import RadixNode, Tokens
from kvcache.storage.page_storage import PageStorage
from kvcache.tiers.disk_tier import DiskTier
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.tier_block import TierBlock
from kvcache.tiers.tier_traffic import TierTraffic

__all__ = ["LowerTiers"]

LOWER = (Tier.HOST, Tier.DISK)


class LowerTiers:
    """Counts what moves, a `TierTraffic` a tier."""

    def __init__(
        self,
        shape: TreeShape,
        storage: PageStorage,
        pools: Sequence[BlockPool],
        host: HostTier,
        disk: DiskTier | None,
        events: EventLog | None,
        on_device: Container[bytes] = (),
    ) -> None:
        self._shape = shape
        self._storage = storage
        self._pools = pools
        self.host = host
        self.disk = disk
        self._events = events
        self._on_device = on_device
        self.traffic = {Tier.HOST: TierTraffic()} if disk is None else {tier: TierTraffic() for tier in LOWER}

    def contents(self) -> list[tuple[Tier, int, int, int]]:
        """(tier, capacity in bytes, bytes used, blocks) of each tier."""
        tiers: list[tuple[Tier, HostTier | DiskTier]] = [(Tier.HOST, self.host)]
        if self.disk is not None:
            tiers.append((Tier.DISK, self.disk))
        return [(name, tier.capacity_bytes, tier.used_bytes, len(tier)) for name, tier in tiers]

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
            self.traffic[Tier.HOST].store(tier_block)
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
                self.traffic[Tier.HOST].dropped_blocks += 1
                lost.append(down.key)
                continue
            gone = self.disk.put(down)
            self.traffic[Tier.DISK].dropped_blocks += len(gone)
            lost.extend(gone)
            if down.key in gone:
                continue
            self.traffic[Tier.DISK].store(down)
            if self._events is not None:
                self._events.add(EventKind.UPDATED, tier=Tier.DISK, keys=(down.key,))
        self._removed([key for key in lost if key != block.key])
        return lost

    def _removed(self, keys: Sequence[bytes]) -> None:
        """Tell that blocks are gone, but for those that another tier or the device has too."""
        gone = tuple(key for key in keys if key not in self._on_device and key not in self)
        if self._events is not None and gone:
            self._events.add(EventKind.REMOVED, keys=gone)

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
        source = self.tier_of(key)
        block = self.host.take(key)
        if block is None and self.disk is not None:
            block = self.disk.take(key, scope)
        if block is not None and (block.scope != scope or not block.intact()):
            self.traffic[source].corrupt_blocks += 1
            block = None
        if block is None:
            self._removed([key])
        return block

    def lift(self, keys: Sequence[bytes], scope: bytes, most: int | None = None) -> int:
        """Bring blocks, `most` at a time, from disk into host memory before they are needed. Returns how many."""
        lifted = 0
        for key in keys:
            if lifted == most:
                break
            if self.disk is None or key not in self.disk:
                continue
            block = self.disk.take(key, scope)
            if block is None:
                self._removed([key])
                break
            lifted += 1
            self.traffic[Tier.DISK].lifted_blocks += 1
            self.traffic[Tier.HOST].store(block)
            if self._events is not None:
                self._events.add(EventKind.UPDATED, tier=Tier.HOST, keys=(key,))
            self.put_back(block)
        return lifted

    def put_back(self, block: TierBlock) -> None:
        """A block that was taken and goes into the host tier (again), or is lost."""
        if block.key in self._push(block):
            self._removed([block.key])

    def tier_of(self, key: bytes) -> Tier:
        """The tier that a block would be taken from."""
        return Tier.HOST if key in self.host or self.disk is None else Tier.DISK

    def onboarded(self, block: TierBlock, source: Tier) -> None:
        """A block that was taken is in the tree again."""
        self.traffic[source].onboarded_blocks += 1
        self.traffic[source].onboarded_bytes += block.nbytes

    def write_page(self, block: TierBlock, group: int, position: int, page: int) -> bool:
        """Copy a part's content into a device page. False when the block has no such part."""
        for owner, at, _, raw in block.parts:
            if (owner, at) == (group, position):
                self._storage.page(page, group)[:] = raw
                return True
        return False

    def clear(self) -> None:
        """Forget everything."""
        self._removed(self.host.clear() + ([] if self.disk is None else self.disk.clear()))
