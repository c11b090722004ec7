"""Digests of the blocks that a holder grants: made before anybody asks, found when somebody does.

Hashing happens in the digest thread. Used by `HolderSide`, in the loop, and by `CacheTransceiver.prepare`, anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from kvcache.block_table import BlockTable
from transceiver.loop_context import LoopContext
from transceiver.page_part import PartView
from transceiver.publication import Publication

__all__ = ["BlockKey", "hash_ahead", "known_digests", "warm_digests"]

_log = logging.getLogger(__name__)
_PART = 16  # blocks hashed in one go, so that a grant that ended stops the rest
BlockKey = tuple[int, int, int, int]  # group, page, generation, valid tokens


def known_digests(context: LoopContext, keys: list[BlockKey], parts: tuple[PartView | None, ...]) -> bytes | None:
    """All digests one after the other, or None when one is not computed yet."""
    digests = []
    for key in keys:
        digest = context.digests.find(*key, parts[key[0]] if parts else None)
        if digest is None:
            return None
        digests.append(digest)
    return b"".join(digests)


def warm_digests(context: LoopContext, tables: Iterable[BlockTable], publication: Publication) -> None:
    """Hash published blocks before anybody asks; returns at once. A grant that has ended stops it."""
    missing = [key for key in _keys(tables) if context.digests.find(*key) is None]
    for start in range(0, len(missing), _PART):
        _hash(context, missing[start : start + _PART], lambda: not publication.future.done())


def hash_ahead(context: LoopContext, tables: Iterable[BlockTable]) -> None:
    """Hash committed blocks that nobody has published yet; returns at once. Any thread."""
    _hash(context, _keys(tables), lambda: True)


def _keys(tables: Iterable[BlockTable]) -> list[BlockKey]:
    return [
        key
        for table in tables
        for key in zip(
            [table.group] * len(table), table.pages.tolist(), table.generations.tolist(), table.valid_tokens.tolist(),
            strict=True,
        )
    ]  # fmt: skip


def _hash(context: LoopContext, keys: list[BlockKey], wanted: Callable[[], bool]) -> None:
    def work() -> None:
        if wanted():
            context.digests.compute(keys)

    def done(result: BaseException | None) -> None:
        if isinstance(result, BaseException):
            _log.error("hashing blocks ahead of their transfer failed: %r", result)

    context.in_background(work, done)
