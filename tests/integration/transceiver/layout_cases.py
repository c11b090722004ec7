"""Models and pairs of layouts that transfers are tested with: those of the acceptance cases, and more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from kvcache.layout import LifeCycleKind
from tests.integration.transceiver.layout_values import Group, Model
from transceiver.parallel_layout import ParallelLayout as P

__all__ = [
    "BOUNDARY_LENGTHS",
    "BOUNDARY_PAIRS",
    "DUPLICATED",
    "FORMS",
    "INDEX_PAIRS",
    "LAYOUTS",
    "PAIRS",
    "STATE_PAIRS",
    "UNEVEN",
    "WINDOWS",
    "Pair",
    "attention",
    "hybrid",
    "pair_id",
    "with_index_keys",
]

Pair: TypeAlias = tuple[str, P, P]  # kind of attention, ctx, gen
PAIRS: TypeAlias = tuple[P, P]
K = LifeCycleKind

WINDOWS: dict[str, tuple[int | None, ...]] = {"full": (None,), "24": (24,), "256+24": (256, 24)}
BOUNDARY_LENGTHS = (1, 7, 8, 9, 23, 24, 25, 32, 33)
FORMS = [(False, False), (True, False), (False, True), (True, True)]


def dp(tp: int, pp: int = 1) -> P:
    return P(tp, pp, attention_dp=True)


SYMMETRIC = [P(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)]
#: The acceptance cases' layouts; four layers, four KV heads (MLA: one latent).
LAYOUTS: list[Pair] = [
    *(("mha", side, side) for side in SYMMETRIC),
    ("mha", P(1, 2), P(1)), ("mha", P(2), P(1, 2)), ("mha", P(4), P(2, 2)), ("mha", P(4), P(1, 4)),
    ("mha", P(2, 2), P(4)), ("mha", P(1, 4), P(4)), ("mha", P(4, 2), P(2, 4)),
    *(("mha", side, side) for side in (dp(2), dp(4), dp(2, 2), dp(4, 2))),
    ("mha", dp(2), P(1, 2)), ("mha", dp(4), P(2, 2)),
    *(("mla", side, side) for side in (P(1), P(2), P(4), P(2, 2), P(4, 2), dp(4))),
    ("mla", dp(2), P(2)), ("mla", P(2), P(1, 2)), ("mla", dp(4), P(8)), ("mla", P(4), P(8)),
]  # fmt: skip
#: Of these 5 or 7 layers, so that the first stages hold one more.
UNEVEN: list[Pair] = [
    *(("mha", P(1, pp), P(1, pp)) for pp in (2, 3, 4)),
    ("mha", P(2), P(1, 2)), ("mha", P(1, 2), P(2)), ("mha", P(4), P(1, 4)), ("mha", P(1, 4), P(4)),
    ("mha", P(2, 2), P(1, 4)), ("mha", P(1, 3), P(1, 2)), ("mla", P(1, 2), P(1, 3)), ("mla", P(2, 2), P(1, 4)),
]  # fmt: skip
#: More ranks than heads on one side or both: (KV heads, ctx, gen). Fully duplicated, and partly.
DUPLICATED: list[tuple[int, P, P]] = [
    (2, P(4), P(2)), (4, P(8), P(2)), (2, P(4), P(4)), (2, P(2), P(8)), (4, P(2), P(8)), (1, P(4), P(2)),
    (2, P(4), dp(2)), (2, P(8), P(4, 2)), (2, P(2, 2), P(4)),
]  # fmt: skip
BOUNDARY_PAIRS: list[PAIRS] = [
    (P(1), P(1)), (P(2), P(2)), (P(1, 2), P(1)), (P(2), P(1, 2)), (P(4), P(2, 2)),
]  # fmt: skip
INDEX_PAIRS: list[PAIRS] = [
    (P(1), P(1)), (P(2), P(2)), (P(2), P(1)), (P(1), P(2)), (P(1, 2), P(1)), (P(1), P(1, 2)), (P(2, 2), P(1)),
    (P(2), dp(2)),
]  # fmt: skip
STATE_PAIRS: list[PAIRS] = [
    (P(a), P(b)) for a in (1, 2, 4) for b in (1, 2, 4)
] + [(P(1, 2), P(2)), (P(2, 2), P(1, 4)), (dp(2), P(2)), (P(4), dp(2)), (P(4, 2), P(2, 3))]  # fmt: skip


def pair_id(value: object) -> str | None:
    """Names for pytest: tp2pp2, dp4, ctx->gen."""
    if isinstance(value, P):
        name = f"{'dp' if value.attention_dp else 'tp'}{value.tp}"
        return name + (f"pp{value.pp}" if value.pp > 1 else "")
    if isinstance(value, tuple) and value and all(isinstance(part, P) for part in value):
        return "->".join(pair_id(part) or "" for part in value)
    if isinstance(value, tuple) and all(isinstance(part, bool) for part in value):
        return "->".join("layer" if part else "block" for part in value)
    if isinstance(value, tuple):
        return "+".join(str(part or "full") for part in value)
    return None


def attention(
    windows: Sequence[int | None], *, mla: bool = False, layers: int = 4, heads: int = 4, dim: int = 8
) -> Model:
    """Layers in turn of each window (None: full attention); an MLA latent is one head without K and V apart."""
    kinds = [K.SLIDING if window else K.MLA if mla else K.FULL for window in windows]
    return Model(
        layers,
        tuple(
            Group(tuple(range(index, layers, len(windows))), 1 if mla else heads, dim, kind, window, kv=1 if mla else 2)
            for index, (window, kind) in enumerate(zip(windows, kinds, strict=True))
        ),
    )


def with_index_keys(model: Model, layers: Sequence[int]) -> Model:
    """Index keys of some layers beside their KV: one head, replicated over the tensor ranks, of another dtype."""
    keys = Group(tuple(layers), heads=1, dim=16, kv=1, dtype="float8_e4m3fn")
    return Model(model.num_layers, (*model.groups, keys))


def hybrid(*, dim: int = 8, layers: int = 6) -> Model:
    """Full attention, a window, SSM state by heads, convolution state by sections, index keys: dtypes of all kinds."""
    every, size = range(layers), dim // 8
    return Model(
        layers,
        (
            Group(tuple(every[::3]), 4, dim, K.FULL),
            Group(tuple(every[1::3]), 4, dim, K.SLIDING, window=24, dtype="bfloat16"),
            Group(tuple(every[2::3]), kind=K.RECURRENT, sections=(size * 4 * 96,)),
            Group(tuple(every[2::3]), kind=K.RECURRENT, dtype="bfloat16", sections=(size * 64, size * 16, size * 16)),
            Group(tuple(every[::3]), heads=1, dim=16, kv=1, dtype="uint8"),
        ),
    )
