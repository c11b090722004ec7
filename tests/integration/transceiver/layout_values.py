"""What every byte of a model's KV must be, told from its global place alone: the reference that transfers are held to.

A token's row of one (request, group, layer, k/v, head) and a layer's state of one (request, group, section) are random
bytes of a seed made of just these numbers. Which layers and heads a rank holds is dealt out here once more, from the
definitions. Nothing of the transceiver's mapping is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.layout import DTYPE_BYTES, KvLayout, LayerGroup, LifeCycleKind
from transceiver.parallel_layout import Interval, ParallelLayout, RankShare

__all__ = ["TOKENS", "Group", "Model", "Request", "live_blocks"]

Bytes = NDArray[np.uint8]
TOKENS = 8  # in a block
_PAST_THE_END = 1 << 20  # added to a request's number: what a holder has behind its last token


@dataclass(frozen=True)
class Group:
    """One life cycle of a whole model. `sections`: bytes of one layer's state over all ranks, if it is recurrent."""

    layers: tuple[int, ...]
    heads: int = 4
    dim: int = 8
    kind: LifeCycleKind = LifeCycleKind.FULL
    window: int | None = None
    kv: int = 2
    dtype: str = "float32"
    sections: tuple[int, ...] = ()

    @property
    def recurrent(self) -> bool:
        return self.kind is LifeCycleKind.RECURRENT

    @property
    def row_bytes(self) -> int:
        """Of one token and head."""
        return self.dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class Request:
    """A prompt of `length` tokens. The receiver has the first `cached` of them; the holder computed `held` (0: all).

    `keeps_stale`: the holder still has the blocks that left the window. `state`: recurrent state is kept and wanted.
    `chunks`: where the holder's prefill steps end; a block is granted with the step that fills it.
    """

    number: int
    length: int
    cached: int = 0
    held: int = 0
    keeps_stale: bool = False
    state: bool = True
    chunks: tuple[int, ...] = ()

    @property
    def computed(self) -> int:
        """Tokens on the holding side."""
        return self.held or self.length


def live_blocks(length: int, window: int | None) -> list[int]:
    """Blocks with a token that the next one, at position `length`, may still look at."""
    oldest = 0 if window is None else length + 1 - window
    blocks = range(-(-length // TOKENS))
    return [b for b in blocks if any(token >= oldest for token in range(b * TOKENS, (b + 1) * TOKENS))]


@lru_cache(maxsize=1024)
def _rows(request: int, group: int, layer: int, kv: int, head: int, tokens: int, row_bytes: int) -> Bytes:
    """[token][byte] of one head."""
    rng = np.random.default_rng((request, group, layer, kv, head))
    return rng.integers(0, 256, (tokens, row_bytes), dtype=np.uint8)


@lru_cache(maxsize=1024)
def _section(request: int, group: int, layer: int, section: int, nbytes: int) -> Bytes:
    return np.random.default_rng((request, group, layer, section)).integers(0, 256, nbytes, dtype=np.uint8)


@dataclass(frozen=True)
class Model:
    """All life cycles of a model of `num_layers` layers; a layer may have KV in more than one (index keys).

    `backwards`: the last layer is in a rank's first slot.
    """

    num_layers: int
    groups: tuple[Group, ...]
    backwards: bool = False

    def layers(self, server: ParallelLayout, rank: int, group: int) -> list[int]:
        """Global ids of the rank's layers of a group; the first stages hold one layer more where it does not divide."""
        dealt: list[list[int]] = [[] for _ in range(server.pp)]
        layer = count()
        for stage in range(server.pp):
            for _ in range(self.num_layers // server.pp + (stage < self.num_layers % server.pp)):
                dealt[stage].append(next(layer))
        mine = dealt[rank // server.tp]
        return [layer for layer in self.groups[group].layers[:: -1 if self.backwards else 1] if layer in mine]

    def heads(self, server: ParallelLayout, rank: int, group: int) -> list[int]:
        """Global heads of the rank; ranks beyond the number of heads hold one together with their neighbours."""
        heads, ranks = self.groups[group].heads, 1 if server.attention_dp else server.tp
        at = 0 if server.attention_dp else rank % server.tp
        if heads >= ranks:
            return [head for head in range(heads) if head // (heads // ranks) == at]
        return [at // (ranks // heads)]

    def tokens(self, server: ParallelLayout, rank: int, group: int, request: Request, *, past: bool = False) -> Bytes:
        """[layer][k/v][head][token][byte] of a rank; `past`: what a holder has at places that do not count."""
        shape = self.groups[group]
        number = request.number + (_PAST_THE_END if past else 0)
        size = (-(-request.computed // TOKENS) * TOKENS, shape.row_bytes)
        heads = self.heads(server, rank, group)
        return np.stack(
            [
                [[_rows(number, group, layer, kv, head, *size) for head in heads] for kv in range(shape.kv)]
                for layer in self.layers(server, rank, group)
            ]
        )

    def state(self, server: ParallelLayout, rank: int, group: int, request: Request) -> Bytes:
        """[layer][byte] of a rank: its part of every section, one after the other."""
        ranks = 1 if server.attention_dp else server.tp
        at = 0 if server.attention_dp else rank % server.tp
        rows = []
        for layer in self.layers(server, rank, group):
            parts = []
            for number, size in enumerate(self.groups[group].sections):
                owner = np.arange(size) // (size // ranks)
                parts.append(_section(request.number, group, layer, number, size)[owner == at])
            rows.append(np.concatenate(parts))
        return np.stack(rows)

    def rank_layout(self, server: ParallelLayout, rank: int, side: str) -> tuple[KvLayout, tuple[RankShare, ...]]:
        """How a rank describes itself. A group of which it has no layer gets one that no peer has."""
        ranks = 1 if server.attention_dp else server.tp
        at = 0 if server.attention_dp else rank % server.tp
        groups, shares = [], []
        for index, group in enumerate(self.groups):
            nobodys = self.num_layers + (1 if side == "ctx" else 2)
            layers = tuple(self.layers(server, rank, index)) or (nobodys,)
            common: dict[str, Any] = {"dtype": group.dtype, "kv_factor": group.kv, "window": group.window}
            if group.recurrent:
                common["state_bytes_per_layer"] = sum(size // ranks for size in group.sections)
                shares.append(RankShare(ranks, Interval(at, at + 1), group.sections))
            else:
                heads = self.heads(server, rank, index)
                common |= {"num_kv_heads": len(heads), "head_dim": group.dim}
                shares.append(RankShare(group.heads, Interval(heads[0], heads[-1] + 1)))
            groups.append(LayerGroup(group.kind, layers, **common))
        return KvLayout("m", TOKENS, tuple(groups)), tuple(shares)
