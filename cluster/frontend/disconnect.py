"""Runs work for a client only as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from cluster.frontend.errors import ClientGoneError

__all__ = ["run_while_connected"]

_T = TypeVar("_T")


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`; ClientGoneError, with `work` cancelled and ended, when the client closes first.

    `receive` must be at the end of the request's body: the next message can only be the disconnect.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_closed(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
