"""Where a cached block came from: which worker and request computed it, and how it reached this memory."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

__all__ = ["BlockOrigin", "BlockProvenance", "Provenance"]


class BlockOrigin(StrEnum):
    """How the content came into this manager's pages."""

    COMPUTED = "computed"
    CTX_TO_GEN = "ctx_to_gen"
    GEN_TO_CTX = "gen_to_ctx"
    PULLED = "pulled"  # from another worker of the same kind
    TIER = "tier"


class Provenance(NamedTuple):
    """`worker` computed the block for `request_id`; `turn` counts the conversation's completed turns from 1, or 0."""

    origin: BlockOrigin
    worker: str
    request_id: str
    turn: int = 0


@dataclass(frozen=True, slots=True)
class BlockProvenance:
    """Blocks `first` .. `last` - 1 of a sequence share one provenance."""

    first: int
    last: int
    provenance: Provenance
