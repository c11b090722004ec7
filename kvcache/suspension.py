"""A suspended sequence's own pages in host memory: copied out, verified and copied back.

Called by `SequenceCache` under the manager's guard. Matched tree blocks stay locked on the device; only what the
sequence holds page by page moves.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvcache.errors import SuspendedSequenceError

if TYPE_CHECKING:
    from kvcache.sequence_cache import SequenceCache

__all__ = ["SuspendedPages", "bring_back", "take_out"]


@dataclass(frozen=True, slots=True)
class SuspendedPages:
    """(group, row, ordinal, content, CRC-32); row -1 is a recurrent group's state."""

    parts: tuple[tuple[int, int, int, bytes, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of content."""
        return sum(len(part[3]) for part in self.parts)


def take_out(sequence: SequenceCache) -> SuspendedPages:
    """Copy the sequence's own pages and release them."""
    manager, shape = sequence._manager, sequence._shape
    parts = []
    for row, group in enumerate(shape.attention):
        pages = sequence.rows[row, : sequence.blocks]
        mine = pages >= 0
        if row in shape.full_rows:
            mine[: sequence.owned_from] = False
        for ordinal in np.flatnonzero(mine).tolist():
            raw = bytes(manager.storage.page(int(pages[ordinal]), group))
            parts.append((group, row, ordinal, raw, zlib.crc32(raw)))
        manager.pools[group].release(pages[mine].copy())
        pages[mine] = -1
    for group, page in sequence.state_pages.items():
        raw = bytes(manager.storage.page(page, group))
        parts.append((group, -1, 0, raw, zlib.crc32(raw)))
        manager.pools[group].release(np.array([page], dtype=np.int32))
    sequence.state_pages = {}
    return SuspendedPages(tuple(parts))


def bring_back(sequence: SequenceCache, suspended: SuspendedPages) -> bool:
    """Allocate and fill pages again. False, with nothing changed or looked at, for want of pages or above
    `max_util_for_resume`.
    Raises SuspendedSequenceError when the content in host memory is not what it was.
    """
    manager = sequence._manager
    need = Counter(group for group, *_ in suspended.parts)
    for group, count in need.items():
        pool = manager.pools[group]
        held = int(np.count_nonzero(pool.refs > 0))
        if count and held + count > manager.config.max_util_for_resume * pool.budget:
            return False
    if not manager.room.try_reserve({group: need[group] for group in range(len(manager.pools))}):
        return False
    filled: list[int] = []
    for group, _, _, raw, crc in suspended.parts:
        filled.append(int(manager.pools[group].allocate(1)[0]))
        manager.storage.page(filled[-1], group)[:] = raw
        if zlib.crc32(raw) != crc:
            for page, part in zip(filled, suspended.parts, strict=False):
                manager.pools[part[0]].release(np.array([page], dtype=np.int32))
            raise SuspendedSequenceError(
                f"request {sequence.request_id}: content of a suspended page was lost, close it and compute it again"
            )
    for page, (group, row, ordinal, _, _) in zip(filled, suspended.parts, strict=True):
        if row < 0:
            sequence.state_pages[group] = page
        else:
            sequence.rows[row, ordinal] = page
    return True
