"""Server-sent events: framing, keep-alive comments while nothing comes, errors as a last event, client disconnect.

The first item is awaited before the status line is sent (`KeepAlive.prime`), so an error that comes early is an
ordinary HTTP error. Knows nothing of tokens.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Generic, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from cluster.frontend.disconnect import run_while_connected
from cluster.frontend.errors import ClientGoneError, error_object
from cluster.frontend.metrics import FrontendMetrics

__all__ = ["EventStreamResponse", "KeepAlive", "event"]

_T = TypeVar("_T")
_KEEP_ALIVE = b": keep-alive\n\n"
_DONE = b"data: [DONE]\n\n"


def event(payload: Mapping[str, Any]) -> bytes:
    """One event with a JSON payload."""
    return b"data: " + json.dumps(payload, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


class KeepAlive(Generic[_T]):
    """Iterates over `source` and yields None whenever nothing came for `interval_s`. Close it with `aclose`."""

    def __init__(
        self, source: AsyncGenerator[_T, None], interval_s: float, on_close: Callable[[], Awaitable[None]]
    ) -> None:
        """`on_close` is awaited once the source has been closed, even if it was never begun."""
        self._source = source
        self._interval_s = interval_s
        self._on_close = on_close
        self._next: asyncio.Task[_T] | None = None

    async def prime(self) -> None:
        """Wait up to one interval for the first item; it stays to be iterated. Raises what the source raises."""
        pending = self._pending()
        await asyncio.wait({pending}, timeout=self._interval_s)
        if pending.done() and (error := pending.exception()) is not None and not isinstance(error, StopAsyncIteration):
            raise error

    async def __aiter__(self) -> AsyncIterator[_T | None]:
        while True:
            pending = self._pending()
            await asyncio.wait({pending}, timeout=self._interval_s)
            if not pending.done():
                yield None
                continue
            self._next = None
            try:
                item = pending.result()
            except StopAsyncIteration:
                return
            yield item

    async def aclose(self) -> None:
        """End the source: what it has in `finally` has run when this returns. Idempotent."""
        if self._next is not None:
            self._next.cancel()
            await asyncio.gather(self._next, return_exceptions=True)
            self._next = None
        await self._source.aclose()
        await self._on_close()

    def _pending(self) -> asyncio.Task[_T]:
        if self._next is None:
            self._next = asyncio.create_task(self._advance())
        return self._next

    async def _advance(self) -> _T:
        return await anext(self._source)


class EventStreamResponse(Response):
    """Sends chunks as they come, ended by [DONE] or by an event that holds the error; closes them in any case."""

    media_type = "text/event-stream"

    def __init__(self, chunks: KeepAlive[bytes], headers: Mapping[str, str], metrics: FrontendMetrics) -> None:
        self._chunks = chunks
        self._metrics = metrics
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-store", "x-accel-buffering": "no", **headers})

    async def aclose(self) -> None:
        """Close the chunks without sending anything. Idempotent."""
        await self._chunks.aclose()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the whole stream. Returns early, the source closed, on a disconnect."""
        try:
            await run_while_connected(receive, self._send_all(send))
        except (ClientGoneError, OSError):
            self._metrics.client_disconnects.inc()  # nobody is there to be told
        finally:
            await self.aclose()

    async def _send_all(self, send: Send) -> None:
        async def part(body: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        chunks = aiter(self._chunks)
        while True:
            try:
                chunk = await anext(chunks)
            except StopAsyncIteration:
                await part(_DONE)
                break
            except Exception as error:  # the status line is out: an event is the only place left for it
                self._metrics.stream_errors.inc()
                await part(event(error_object(error)))
                break
            await part(_KEEP_ALIVE if chunk is None else chunk)
        await part(b"", more=False)
