"""What must be equal, besides the tokens, for KV to be shared between requests of one manager.

Model fingerprint and KV dtype are equal within a manager by construction; adapter and salt come with the request.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

__all__ = ["ReuseScope"]


@dataclass(frozen=True, slots=True)
class ReuseScope:
    """Requests share KV only within one scope; an empty string differs from None."""

    adapter: str | None = None
    cache_salt: str | None = None

    def digest(self) -> bytes:
        """SHA-256 (32 bytes) over presence and content of every field: no two different scopes share one."""
        hasher = hashlib.sha256(b"kvferry-scope-1")
        for value in (self.adapter, self.cache_salt):
            if value is None:
                hasher.update(b"\x00")
                continue
            raw = value.encode("utf-8", "surrogatepass")  # any text has a digest, a broken one too
            hasher.update(b"\x01" + len(raw).to_bytes(8, "little") + raw)
        return hasher.digest()
