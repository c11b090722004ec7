"""What a model's KV cache looks like: the one description both sides of a transfer compare.

A `KvLayout` is a value. It names the layer groups (life cycles) of a model and the byte geometry of one page of
each; it owns no memory. The manager, the storage, the transceiver's handshake and the model runner all read it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

__all__ = ["DTYPE_BYTES", "KvLayout", "LayerGroup", "LifeCycleKind"]

DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "uint8": 1}


class LifeCycleKind(StrEnum):
    """Why the pages of a group of layers live and die together."""

    FULL = "full_attention"
    SLIDING = "sliding_window"
    RECURRENT = "recurrent"
    MLA = "mla"


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one life cycle, in slot order.

    A page holds one block of every layer of the group, block-major:
    ``[layer][k/v][kv_head][token][head_dim]`` of `dtype` (``kv_factor`` 2 for K and V, 1 for an MLA latent).
    A recurrent group has no token axis: its page is one state of ``state_bytes_per_layer`` bytes a layer.
    """

    kind: LifeCycleKind
    layers: tuple[int, ...]
    num_kv_heads: int = 0
    head_dim: int = 0
    dtype: str = "float32"
    kv_factor: int = 2
    window: int | None = None
    state_bytes_per_layer: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("a layer group needs at least one layer")
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown KV dtype {self.dtype!r}: use one of {', '.join(DTYPE_BYTES)}")
        if self.kind is LifeCycleKind.SLIDING and (self.window is None or self.window < 1):
            raise ValueError("a sliding-window group needs window >= 1 (tokens)")
        if self.kind is LifeCycleKind.RECURRENT:
            if self.state_bytes_per_layer < 1:
                raise ValueError("a recurrent group needs state_bytes_per_layer >= 1")
        elif self.num_kv_heads < 1 or self.head_dim < 1:
            raise ValueError("an attention group needs num_kv_heads >= 1 and head_dim >= 1")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV over all layers of the group (0 for a recurrent group)."""
        if self.kind is LifeCycleKind.RECURRENT:
            return 0
        return len(self.layers) * self.kv_factor * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def page_bytes(self, tokens_per_block: int) -> int:
        """Bytes of one page."""
        if self.kind is LifeCycleKind.RECURRENT:
            return len(self.layers) * self.state_bytes_per_layer
        return self.token_bytes * tokens_per_block


@dataclass(frozen=True, slots=True)
class KvLayout:
    """The KV geometry of a model (or of one rank's share of it).

    `model_fingerprint` identifies the weights: KV made by different weights must never be mixed.
    """

    model_fingerprint: str
    tokens_per_block: int
    groups: tuple[LayerGroup, ...]

    def __post_init__(self) -> None:
        if self.tokens_per_block < 1:
            raise ValueError("tokens_per_block must be >= 1")
        if not self.groups:
            raise ValueError("a KV layout needs at least one layer group")

    def page_bytes(self, group: int = 0) -> int:
        """Bytes of one page of `group`."""
        return self.groups[group].page_bytes(self.tokens_per_block)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for msgpack and JSON; `from_dict` is the inverse."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> KvLayout:
        """Inverse of `to_dict`. Raises ValueError, KeyError or TypeError on anything else."""
        groups = tuple(
            LayerGroup(**{**group, "kind": LifeCycleKind(group["kind"]), "layers": tuple(group["layers"])})
            for group in data["groups"]
        )
        return KvLayout(data["model_fingerprint"], data["tokens_per_block"], groups)

    def fingerprint(self) -> str:
        """SHA-256 (hex) over every field: equal iff pages can be exchanged byte for byte."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True).encode()).hexdigest()
