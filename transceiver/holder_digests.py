"""Digests of the blocks that a holder grants: made before anybody asks, found when somebody does. Runs in the loop.

Hashing happens in the digest thread. Used by `HolderSide` only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvcache.block_table import BlockTable
from transceiver.loop_context import LoopContext
from transceiver.page_part import PartView
from transceiver.publication import Publication

__all__ = ["BlockKey", "known_digests", "warm_digests"]

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
    """Hash published blocks before anybody asks; returns at once."""
    keys = [
        key
        for table in tables
        for key in zip(
            [table.group] * len(table), table.pages.tolist(), table.generations.tolist(), table.valid_tokens.tolist(),
            strict=True,
        )
    ]  # fmt: skip
    missing = [key for key in keys if context.digests.find(*key) is None]
    for start in range(0, len(missing), _PART):
        _warm_part(context, publication, missing[start : start + _PART])


def _warm_part(context: LoopContext, publication: Publication, keys: list[BlockKey]) -> None:
    def work() -> None:
        if not publication.future.done():
            context.digests.compute(keys)

    def done(result: BaseException | None) -> None:
        if isinstance(result, BaseException):
            _log.error("hashing published blocks failed: %r", result)

    context.in_background(work, done)
