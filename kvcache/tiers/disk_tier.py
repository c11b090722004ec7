"""Blocks as files, one folder a reuse scope: the last tier. A full or read-only disk costs blocks, never a request.

A file is written under a temporary name and renamed, and read back only if key, scope and digest agree. After a
failed write the tier stops writing for a while and goes on reading.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvcache.tiers.tier_block import TierBlock

__all__ = ["DiskTier"]

_LOG = logging.getLogger(__name__)
_PAUSE_S = 30.0


class DiskTier:
    """At most `capacity_bytes` of content under `folder`, least recently used files go first. Files of earlier
    processes are removed at the start: their pages mean nothing to this one's weights unless proved.
    """

    def __init__(self, folder: Path, capacity_bytes: int, clock: Callable[[], float]) -> None:
        self._folder = folder / f"kvferry-{os.getpid()}-{id(self):x}"
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.errors = 0
        self.corrupt = 0
        self._clock = clock
        self._paused_until = float("-inf")
        self._sizes: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, key: bytes) -> bool:
        return key in self._sizes

    def path(self, key: bytes, scope: bytes) -> Path:
        """Where a block's file lies."""
        return self._folder / scope.hex() / f"{key.hex()}.kv"

    def put(self, block: TierBlock) -> list[bytes]:
        """Write a block. Returns the keys of blocks given up for it (its own when it could not be written)."""
        size = block.nbytes
        if block.key in self._sizes:
            self._sizes.move_to_end(block.key)
            return []
        if size > self.capacity_bytes or self._clock() < self._paused_until:
            return [block.key]
        gone = []
        while self.used_bytes + size > self.capacity_bytes:
            oldest = next(iter(self._sizes))
            self.forget(oldest)
            gone.append(oldest)
        target = self.path(block.key, block.scope)
        try:
            self._write(target, block.encode())
        except OSError as error:
            self.errors += 1
            self._paused_until = self._clock() + _PAUSE_S
            _LOG.warning("disk tier: cannot write %s (%s): no writes for %.0f s", target, error, _PAUSE_S)
            return [*gone, block.key]
        self._sizes[block.key] = (size, block.scope)
        self.used_bytes += size
        return gone

    def _write(self, target: Path, data: bytes) -> None:
        """All of it or no file at all."""
        temporary = target.with_suffix(".tmp")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(target)
        except OSError:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def take(self, key: bytes, scope: bytes) -> TierBlock | None:
        """Read a block and remove its file; None when it is not there, unreadable or not what it was."""
        if key not in self._sizes or self._sizes[key][1] != scope:
            return None
        block = None
        try:
            block = TierBlock.decode(self.path(key, scope).read_bytes(), key, scope)
            if block is None:
                self.corrupt += 1
        except OSError as error:
            self.errors += 1
            _LOG.warning("disk tier: cannot read a block (%s)", error)
        self.forget(key)
        return block

    def forget(self, key: bytes) -> None:
        """Remove a block's file."""
        size, scope = self._sizes.pop(key)
        self.used_bytes -= size
        try:
            self.path(key, scope).unlink(missing_ok=True)
        except OSError:
            self.errors += 1

    def clear(self) -> list[bytes]:
        """Remove every file; returns the keys."""
        keys = list(self._sizes)
        for key in keys:
            self.forget(key)
        for folder in sorted(self._folder.glob("*"), reverse=True):
            with suppress(OSError):
                folder.rmdir()
        with suppress(OSError):
            self._folder.rmdir()
        return keys
