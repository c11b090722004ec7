"""Which blocks a life cycle still needs at a given history: pure arithmetic, used by matching and by sequences."""

from __future__ import annotations

__all__ = ["first_live_block"]


def first_live_block(history: int, tokens_per_block: int, window: int | None) -> int:
    """First block that the next token can still attend to; earlier ones are stale. `window` None: nothing is stale.

    One token in flight counts: the token at position `history` sees positions history + 1 - window .. history.
    """
    if window is None:
        return 0
    return max(0, (history + 1 - window) // tokens_per_block)
