"""One block's content outside the device: pages, snapshots, and a digest that is checked on the way back."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

__all__ = ["TierBlock"]

_MAGIC = b"kvfB1\n"
_PART = struct.Struct("<iqiq")  # group, position (-1: a block page), tokens covered, bytes
_HEAD = struct.Struct("<32s32sii")  # key, scope digest, priority, parts


@dataclass(frozen=True, slots=True)
class TierBlock:
    """`parts` are (group, position, covered, bytes): a page of the block (position -1) or a snapshot at a position."""

    key: bytes
    scope: bytes
    priority: int
    parts: tuple[tuple[int, int, int, bytes], ...]
    digest: bytes

    @staticmethod
    def of(key: bytes, scope: bytes, priority: int, parts: tuple[tuple[int, int, int, bytes], ...]) -> TierBlock:
        """A block with the digest of its content."""
        return TierBlock(key, scope, priority, parts, _digest(key, scope, parts))

    @property
    def nbytes(self) -> int:
        """Bytes of content."""
        return sum(len(part[3]) for part in self.parts)

    def intact(self) -> bool:
        """True while the content is what it was."""
        return self.digest == _digest(self.key, self.scope, self.parts)

    def encode(self) -> bytes:
        """The bytes of a file of the disk tier."""
        head = _HEAD.pack(self.key, self.scope, self.priority, len(self.parts))
        body = b"".join(_PART.pack(g, p, c, len(raw)) + raw for g, p, c, raw in self.parts)
        return _MAGIC + self.digest + head + body

    @staticmethod
    def decode(raw: bytes, key: bytes, scope: bytes) -> TierBlock | None:
        """Inverse of `encode`; None unless the file is whole, intact and for this key and scope."""
        start = len(_MAGIC) + 32
        try:
            if not raw.startswith(_MAGIC):
                return None
            found_key, found_scope, priority, count = _HEAD.unpack_from(raw, start)
            at, parts = start + _HEAD.size, []
            for _ in range(count):
                group, position, covered, size = _PART.unpack_from(raw, at)
                at += _PART.size
                content = raw[at : at + size]
                if size < 0 or len(content) != size:
                    return None
                parts.append((group, position, covered, content))
                at += size
        except struct.error:
            return None
        block = TierBlock(found_key, found_scope, priority, tuple(parts), raw[len(_MAGIC) : start])
        return block if (found_key, found_scope) == (key, scope) and at == len(raw) and block.intact() else None


def _digest(key: bytes, scope: bytes, parts: tuple[tuple[int, int, int, bytes], ...]) -> bytes:
    hasher = hashlib.sha256(key + scope)
    for group, position, covered, raw in parts:
        hasher.update(_PART.pack(group, position, covered, len(raw)))
        hasher.update(raw)
    return hasher.digest()
