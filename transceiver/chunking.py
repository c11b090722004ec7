"""Which blocks leave with which prefill chunk when blocks are sent while the next chunk computes.

Interior boundaries round down to a block (a partial block goes with the next chunk), the last chunk rounds up; groups
whose window is shorter than the prompt are held back and go whole with the last chunk. Every block leaves exactly once.
Pure; called by whoever runs the chunks.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from transceiver.parallel_layout import Interval

__all__ = ["chunk_blocks", "held_back"]


def held_back(group: LayerGroup, num_tokens: int) -> bool:
    """True when blocks of this group may change or die before the prompt ends, so that they leave at its end."""
    if group.kind is LifeCycleKind.RECURRENT:
        return True
    return group.window is not None and group.window < num_tokens


def chunk_blocks(
    layout: KvLayout, group: int, num_tokens: int, chunk_ends: Sequence[int], first_block: int = 0
) -> tuple[Interval, ...]:
    """Per chunk, the ordinals of `group` that leave with it (an empty interval: nothing yet).

    `chunk_ends` are increasing token positions, the last one `num_tokens`. `first_block`: blocks before it are not
    wanted. Raises ValueError for ends that are not increasing or do not reach the prompt's end.
    """
    ends = list(chunk_ends)
    if not ends or ends[-1] != num_tokens or any(b <= a for a, b in zip([0, *ends], ends, strict=False)):
        raise ValueError(f"chunk ends {ends} must increase and end at the prompt's {num_tokens} tokens")
    shape, tokens = layout.groups[group], layout.tokens_per_block
    if shape.kind is LifeCycleKind.RECURRENT:
        last = Interval(0, 1)
        return (*(Interval(0, 0) for _ in ends[:-1]), last)
    total = -(-num_tokens // tokens)
    if shape.window is not None:  # blocks that lie before the window never move
        first_block = max(first_block, max(0, (num_tokens + 1 - shape.window) // tokens))
    start = min(first_block, total)
    chunks = []
    for end in ends[:-1]:
        stop = start if held_back(shape, num_tokens) else max(start, min(end // tokens, total))
        chunks.append(Interval(start, stop))
        start = stop
    return (*chunks, Interval(start, total))
