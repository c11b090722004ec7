"""A run of blocks in the radix tree: int32 tokens and one row of int32 pages a life cycle, and who relies on it.

Only the tree changes a node. Buffers grow with room to spare, so that a conversation that is extended turn by turn
stays one run and an append costs its own length. Tokens lie in a bytearray, which compares as fast as memory is read.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvcache.provenance import Provenance

__all__ = ["Anchor", "RadixNode", "common_prefix"]

Tokens: TypeAlias = NDArray[np.int32]
Rows: TypeAlias = NDArray[np.int32]

_TOKEN_BYTES = 4


def common_prefix(first: Tokens, second: Tokens) -> int:
    """How many leading tokens are equal."""
    count = min(len(first), len(second))
    if count == 0:
        return 0
    differs = first[:count] != second[:count]
    where = int(differs.argmax())
    return where if differs[where] else count


class Anchor:
    """A position in the tree that somebody relies on: the first `offset` tokens of `node` and every node above it.

    The tree moves anchors along when it splits, truncates or removes nodes. `offset` 0 stands only at a root.
    """

    __slots__ = ("node", "offset")

    def __init__(self, node: RadixNode, offset: int) -> None:
        self.node = node
        self.offset = offset


class RadixNode:
    """`length` tokens from absolute position `start` on; a root has length 0 and no parent.

    rows         int32 [attention groups, blocks]  page of each block, -1 where a window's page is gone
    states       (group, absolute position) -> page of a recurrent snapshot taken exactly there
    locks        anchors of open sequences and pins: blocks up to them are not evicted
    endpoints    anchors of retained turns
    anonymous    leading tokens that a publisher without a conversation published
    superseded   was on a retained turn's path and is on none any more
    scope        digest of the reuse scope (roots only)
    digests      chained keys of the whole blocks (only when somebody needs keys)
    origins      (block index from which on it holds, provenance), increasing
    """

    __slots__ = (
        "_raw",
        "_rows",
        "alive",
        "anonymous",
        "children",
        "digests",
        "endpoints",
        "keys",
        "last_used",
        "length",
        "locks",
        "origins",
        "owner",
        "parent",
        "queued",
        "scope",
        "start",
        "states",
        "superseded",
    )

    def __init__(self, parent: RadixNode | None, start: int, num_rows: int) -> None:
        self.parent = parent
        self.start = start
        self.length = 0
        self._raw = bytearray()
        self._rows: Rows = np.zeros((num_rows, 0), dtype=np.int32)
        self.children: dict[bytes, RadixNode] = {}
        self.keys: list[bytes] = []
        self.states: dict[tuple[int, int], int] = {}
        self.locks: list[Anchor] = []
        self.endpoints: list[Anchor] = []
        self.anonymous = 0
        self.last_used = 0
        self.owner = ""
        self.superseded = False
        self.queued: tuple[int, int] | None = None
        self.alive = True
        self.scope = b""
        self.digests: list[bytes] = []
        self.origins: list[tuple[int, Provenance]] = []

    @property
    def end(self) -> int:
        """Absolute position behind the last token."""
        return self.start + self.length

    def tokens(self) -> Tokens:
        """The run's tokens (a view; while one is about, a change leaves it the old buffer)."""
        return np.frombuffer(self._raw, dtype=np.int32)

    def agreement(self, raw: memoryview, at: int) -> int:
        """How many leading tokens of the run are equal to those in `raw` (the bytes of int32) from byte `at` on."""
        mine = self._raw
        rest = raw[at : at + len(mine)]
        if mine.startswith(rest):
            return len(rest) // _TOKEN_BYTES
        return common_prefix(self.tokens(), np.frombuffer(rest, dtype=np.int32))

    def num_blocks(self, block: int) -> int:
        """Blocks of the run, a partial last one included."""
        return -(-self.length // block)

    def rows(self, blocks: int) -> Rows:
        """Pages of the first `blocks` blocks (a view)."""
        return self._rows[:, :blocks]

    @property
    def nbytes(self) -> int:
        """Bytes of the run's buffers."""
        return self._raw.__alloc__() + self._rows.nbytes

    def append(self, offset: int, tokens: Tokens, rows: Rows, block: int) -> None:
        """Cut to `offset` tokens (a block boundary) and append."""
        if offset < self.length:
            self._cut(offset)
        try:
            self._raw.extend(tokens.data)
        except BufferError:  # somebody has a view
            self._raw = self._raw + tokens.tobytes()
        self.length = length = offset + len(tokens)
        first, blocks, columns = offset // block, -(-length // block), self._rows.shape[1]
        if blocks > columns:
            wider = np.empty((self._rows.shape[0], max(blocks, columns * 5 // 4)), dtype=np.int32)
            wider[:, :first] = self._rows[:, :first]
            self._rows = wider
        self._rows[:, first:blocks] = rows

    def cut_front(self, offset: int, block: int) -> None:
        """Drop the first `offset` tokens (a block boundary) and their pages from the buffers."""
        blocks = self.num_blocks(block)
        self._raw = self._raw[offset * _TOKEN_BYTES :]
        self._rows = self._rows[:, offset // block : blocks].copy()
        self.start += offset
        self.length -= offset

    def cut_back(self, offset: int, block: int) -> None:
        """Keep only the first `offset` tokens (a block boundary)."""
        self._cut(offset)
        if offset // block * 3 < self._rows.shape[1] * 2:
            self._rows = self._rows[:, : offset // block].copy()

    def _cut(self, length: int) -> None:
        try:
            del self._raw[length * _TOKEN_BYTES :]
        except BufferError:  # somebody has a view
            self._raw = self._raw[: length * _TOKEN_BYTES]
        self.length = length

    def cut_digests(self, blocks: int) -> list[bytes]:
        """Keep the keys and origins of the first `blocks` blocks; returns the keys cut off."""
        gone = self.digests[blocks:]
        del self.digests[blocks:]
        self.origins = [(at, origin) for at, origin in self.origins if at < blocks]
        return gone

    def add_origins(self, first: int, origins: Sequence[tuple[int, Provenance]]) -> None:
        """Blocks from `first` on come from `origins` (indices from `first`)."""
        for at, origin in origins:
            if not self.origins or self.origins[-1][1] != origin:
                self.origins.append((first + at, origin))

    def front_origins(self, blocks: int) -> list[tuple[int, Provenance]]:
        """Take the origins of the first `blocks` blocks out (for a split)."""
        front = [(at, origin) for at, origin in self.origins if at < blocks]
        rest = [(at - blocks, origin) for at, origin in self.origins if at > blocks]
        covering = [origin for at, origin in self.origins if at <= blocks]
        self.origins = [(0, covering[-1]), *rest] if covering else rest
        return front

    def add_child(self, key: bytes, child: RadixNode) -> None:
        """Hang `child` under the bytes of its first block."""
        self.children[key] = child
        insort(self.keys, key)

    def drop_child(self, key: bytes) -> None:
        """Inverse of `add_child`."""
        del self.children[key]
        del self.keys[bisect_left(self.keys, key)]

    def key(self, block: int) -> bytes:
        """What the parent files this node under: the bytes of its first block."""
        return bytes(self._raw[: block * _TOKEN_BYTES])

    def nearest(self, key: bytes, limit: int) -> tuple[int, list[RadixNode]]:
        """The children (at most `limit`) whose first block shares the most leading tokens with `key`, and how many.

        In byte order the best ones stand right beside the place where `key` would be inserted.
        """
        place = bisect_left(self.keys, key)
        query = np.frombuffer(key, dtype=np.int32)
        best = 0
        found: list[RadixNode] = []
        for step, first in ((1, place), (-1, place - 1)):
            index = first
            while 0 <= index < len(self.keys):
                other = self.keys[index]
                shared = common_prefix(query, np.frombuffer(other, dtype=np.int32))
                if shared == 0 or shared < best or (shared == best and len(found) >= limit):
                    break
                if shared > best:
                    best, found = shared, []
                found.append(self.children[other])
                index += step
        return best, found
