"""Blocks in host memory, bounded in bytes: lowest priority goes first, then least recently used."""

from __future__ import annotations

from collections import OrderedDict

from kvcache.tiers.tier_block import TierBlock

__all__ = ["HostTier"]


class HostTier:
    """`put` returns what had to give way; nothing here touches a disk or the device."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._by_priority: dict[int, OrderedDict[bytes, TierBlock]] = {}
        self._priority: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._priority)

    def __contains__(self, key: bytes) -> bool:
        return key in self._priority

    def put(self, block: TierBlock) -> list[TierBlock]:
        """Keep `block` (the newest of its priority). Returns the blocks given up for it, itself if it is too large."""
        self.take(block.key)
        if block.nbytes > self.capacity_bytes:
            return [block]
        self._by_priority.setdefault(block.priority, OrderedDict())[block.key] = block
        self._priority[block.key] = block.priority
        self.used_bytes += block.nbytes
        gone = []
        while self.used_bytes > self.capacity_bytes:
            lowest = min(self._by_priority)
            gone.append(self.take(next(iter(self._by_priority[lowest]))))
        return [one for one in gone if one is not None]

    def take(self, key: bytes) -> TierBlock | None:
        """Remove and return a block."""
        priority = self._priority.pop(key, None)
        if priority is None:
            return None
        queue = self._by_priority[priority]
        block = queue.pop(key)
        if not queue:
            del self._by_priority[priority]
        self.used_bytes -= block.nbytes
        return block

    def clear(self) -> list[bytes]:
        """Forget everything; returns the keys."""
        keys = list(self._priority)
        self._by_priority.clear()
        self._priority.clear()
        self.used_bytes = 0
        return keys
