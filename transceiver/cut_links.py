"""The end of all links of a transport. Used by the transports when they close."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

__all__ = ["cut_links"]

_log = logging.getLogger(__name__)
_FLUSH_S = 0.2  # how long the last messages may take to leave
AnyLink = TypeVar("AnyLink", bound=Any)


def cut_links(
    links: Callable[[], Iterable[AnyLink]], waiting: Callable[[AnyLink], object], turn: Callable[[], None],
    drop: Callable[[AnyLink], None],
) -> None:  # fmt: skip
    """Give the fabric its `turn` while messages are `waiting`, for a fifth of a second; then `drop` every link.

    Blocks. A link that cannot be dropped is logged; the others are dropped all the same.
    """
    limit = time.monotonic() + _FLUSH_S
    while any(waiting(link) for link in links()) and time.monotonic() < limit:
        turn()
    for link in list(links()):
        try:
            drop(link)
        except Exception:
            _log.exception("the link to %s could not be dropped", link.peer)
