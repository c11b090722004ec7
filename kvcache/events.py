"""What happened to cached blocks, for routers and observers: a bounded buffer that is polled.

Events speak of whole blocks only, by chained SHA-256 keys. A consumer must ignore keys that it does not know: a full
buffer drops its oldest events and says how many.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

__all__ = ["EventKind", "EventLog", "KvEvent", "StoredBlock", "Tier"]


class Tier(StrEnum):
    """Where a block's content lies."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class EventKind(StrEnum):
    """created: the pools exist; stored: new blocks; removed: blocks gone from every tier; updated: moved to a tier."""

    CREATED = "created"
    STORED = "stored"
    REMOVED = "removed"
    UPDATED = "updated"


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One whole block: its key and its tokens."""

    key: bytes
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KvEvent:
    """`event_id` increases by one from event to event; a gap means that the buffer overflowed.

    scope       digest of the reuse scope (stored)
    parent_key  key of the block before the first one, None at the start of a prompt (stored)
    blocks      stored blocks in order; keys: removed or moved blocks; pages: pages of each life cycle (created)
    """

    event_id: int
    kind: EventKind
    tier: Tier = Tier.DEVICE
    scope: bytes = b""
    parent_key: bytes | None = None
    blocks: tuple[StoredBlock, ...] = ()
    keys: tuple[bytes, ...] = ()
    pages: tuple[int, ...] = ()


class EventLog:
    """At most `limit` events wait to be polled."""

    def __init__(self, limit: int) -> None:
        self._events: deque[KvEvent] = deque(maxlen=limit)
        self._next_id = 0
        self.lost = 0

    def add(
        self,
        kind: EventKind,
        *,
        tier: Tier = Tier.DEVICE,
        scope: bytes = b"",
        parent_key: bytes | None = None,
        blocks: tuple[StoredBlock, ...] = (),
        keys: tuple[bytes, ...] = (),
        pages: tuple[int, ...] = (),
    ) -> None:
        """Append an event; the oldest one goes when the buffer is full."""
        if len(self._events) == self._events.maxlen:
            self.lost += 1
        self._events.append(KvEvent(self._next_id, kind, tier, scope, parent_key, blocks, keys, pages))
        self._next_id += 1

    def poll(self, most: int | None = None) -> list[KvEvent]:
        """Take the oldest events (at most `most`) out of the buffer."""
        count = len(self._events) if most is None else min(most, len(self._events))
        return [self._events.popleft() for _ in range(count)]
