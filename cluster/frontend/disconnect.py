"""Runs work for a client only as long as the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from cluster.frontend.errors import ClientGoneError

__all__ = ["run_while_connected"]

_T = TypeVar("_T")


async def run_while_connected(
    receive: Receive, work: Coroutine[Any, Any, _T], discard: Callable[[_T], Awaitable[None]] | None = None
) -> _T:
    """The result of `work`; ClientGoneError, with `work` cancelled and ended, when the client closes first.

    `receive` must be at the end of the request's body: the next message can only be the disconnect. `discard` gets a
    result that came too late to be returned, because this call was cancelled in that moment.
    """
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_closed(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
    except BaseException:
        working.cancel()
        watching.cancel()
        outcome, _ = await asyncio.gather(working, watching, return_exceptions=True)
        if discard is not None and not isinstance(outcome, BaseException):
            await discard(outcome)
        raise
    watching.cancel()
    return working.result()  # nothing was awaited since the work was done: the result cannot get lost


async def _closed(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
