"""How far the cached tree agrees with a prompt: the token walk, then the length that every life cycle supports.

Pure reading: nothing here changes a node or a pool, so `probe_reuse` has no side effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.block_pool import BlockPool
from kvcache.layout import LayerGroup, LifeCycleKind
from kvcache.radix_node import RadixNode, Tokens
from kvcache.radix_path import path_rows

__all__ = ["Match", "TreeShape", "walk"]

_MOST_TIES = 32
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class TreeShape:
    """What the tree needs to know of a layout.

    attention    groups that have a page a block, in row order; recurrent: groups that have snapshots
    full_rows    rows whose pages every block must have; window_rows: (row, group, window)
    plain        every life cycle keeps all blocks: nothing shortens a token match
    """

    block: int
    attention: tuple[int, ...]
    recurrent: tuple[int, ...]
    full_rows: tuple[int, ...]
    window_rows: tuple[tuple[int, int, int], ...]
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "plain", not self.window_rows and not self.recurrent)

    @staticmethod
    def of(block: int, groups: Sequence[LayerGroup]) -> TreeShape:
        """The shape for a layout's groups."""
        attention = tuple(i for i, g in enumerate(groups) if g.kind is not LifeCycleKind.RECURRENT)
        recurrent = tuple(i for i, g in enumerate(groups) if g.kind is LifeCycleKind.RECURRENT)
        windows = tuple(
            (row, group, window)
            for row, group in enumerate(attention)
            if (window := groups[group].window) is not None and groups[group].kind is LifeCycleKind.SLIDING
        )
        windowed = {row for row, _, _ in windows}
        return TreeShape(
            block, attention, recurrent, tuple(r for r in range(len(attention)) if r not in windowed), windows
        )


class Match(NamedTuple):
    """`num_tokens` leading tokens can be reused.

    node, offset     deepest node and the tokens matched in it, the partial block included
    token_match      tokens that agree before life cycles shorten it (shows a missing window or snapshot)
    forks            other tokens are cached behind those that agree: the prompt leaves a cached path there. False where
                     the cached path only ends, because it was never longer or its end was evicted
    """

    node: RadixNode
    offset: int
    num_tokens: int
    token_match: int
    forks: bool = False


def walk(root: RadixNode, tokens: Tokens, shape: TreeShape, pools: Sequence[BlockPool], partial: bool) -> Match:
    """The longest reusable prefix of `tokens` in the tree under `root`."""
    node, position, block = root, 0, shape.block
    count = len(tokens)
    inside: tuple[RadixNode, int] | None = None
    raw = tokens.data.cast("B") if count else memoryview(b"")
    while count - position >= block:
        at = position * _TOKEN_BYTES
        child = node.children.get(raw[at : at + block * _TOKEN_BYTES].tobytes())
        if child is None:
            break
        same = child.agreement(raw, at)
        if same < child.length:
            inside = (child, same)
            break
        node, position = child, position + same
        if same % block:
            break
    candidates: list[tuple[RadixNode, int]] = []
    if inside is not None:
        candidates.append(inside)
    else:
        if position < count and node.children:
            shared, ties = node.nearest(tokens[position : position + block].tobytes(), _MOST_TIES)
            candidates.extend((tie, shared) for tie in ties)
        if not candidates:
            candidates.append((node, node.length))
    if shape.plain:
        node, offset = candidates[0]
        return _finished(node, offset if partial else offset - offset % block, node.start + offset)
    best: Match | None = None
    for node, offset in candidates:
        found = _supported(node, offset, shape, pools, partial)
        if best is None or found.num_tokens > best.num_tokens:
            best = found
    assert best is not None
    return best


def _finished(node: RadixNode, offset: int, token_match: int) -> Match:
    """Normalise so that offset 0 stands only at a root."""
    if offset <= 0 and node.parent is not None:
        node = node.parent
        offset = node.length
    return Match(node, offset, node.start + offset, token_match)


def _supported(node: RadixNode, offset: int, shape: TreeShape, pools: Sequence[BlockPool], partial: bool) -> Match:
    """Shorten a token match to the longest prefix that every life cycle supports."""
    block = shape.block
    matched = node.start + offset
    length = matched if partial else matched - matched % block
    candidates = _candidate_lengths(node, offset, length, shape)
    if shape.window_rows and len(candidates):
        rows = path_rows(node, offset, block)
        if not shape.recurrent:
            ends = [_coverage(rows[row], pools[group], length, block)[1] for row, group, _ in shape.window_rows]
            candidates = np.concatenate([candidates, *ends])
        for row, group, window in shape.window_rows:
            covered, _ = _coverage(rows[row], pools[group], length, block)
            candidates = candidates[_window_holds(candidates, covered, block, window)]
    if not partial and len(candidates):
        candidates = candidates[candidates % block == 0]
    reused = int(candidates.max()) if len(candidates) else 0
    forks = offset < node.length or bool(node.children)
    while node.parent is not None and reused <= node.start:
        node = node.parent
    return Match(node, reused - node.start, reused, matched, forks)


def _candidate_lengths(node: RadixNode, offset: int, length: int, shape: TreeShape) -> NDArray[np.int64]:
    """Lengths at which a match may end: every snapshot position (all groups), or the full length."""
    if not shape.recurrent:
        return np.array([length], dtype=np.int64)
    common: set[int] | None = None
    for group in shape.recurrent:
        positions: set[int] = set()
        below: RadixNode | None = node
        while below is not None:
            positions.update(at for owner, at in below.states if owner == group and at <= length)
            below = below.parent
        common = positions if common is None else common & positions
    return np.array(sorted(common or ()), dtype=np.int64)


def _coverage(
    row: NDArray[np.int32], pool: BlockPool, length: int, block: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tokens of each block that its page holds (0: no page), and the lengths at which those pages end."""
    row = row[: -(-length // block)]
    covered = np.where(row >= 0, pool.coverage[row], 0).astype(np.int64)
    starts = np.arange(len(row), dtype=np.int64) * block
    covered = np.minimum(covered, length - starts)
    return covered, (starts + covered)[covered > 0]


def _window_holds(lengths: NDArray[np.int64], covered: NDArray[np.int64], block: int, window: int) -> NDArray[np.bool_]:
    """For each length: does every live block hold what a match of that length needs?"""
    index = np.arange(len(covered) + 1, dtype=np.int64)
    gap = np.where(covered >= block, np.int64(-1), index[:-1])
    # last_gap[b]: the last block before b that is not whole
    last_gap = np.concatenate([np.array([-1], dtype=np.int64), np.maximum.accumulate(gap)]) if len(gap) else index - 1
    last, rest = lengths // block, lengths % block
    first = np.maximum(0, (lengths + 1 - window) // block)  # as first_live_block
    whole = last_gap[np.minimum(last, len(covered))] < first
    tail = np.concatenate([covered, np.zeros(1, dtype=np.int64)])[np.minimum(last, len(covered))]
    return np.asarray(whole & ((rest == 0) | (tail >= rest)) & (last <= len(covered)) & (lengths > 0))
