"""The live end of one served request: token ids as they come, then how it ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

from cluster.errors import ClusterError
from cluster.request import FinishReason
from cluster.serve_request import RequestUsage, ServeRequest

__all__ = ["ServeStream"]


class ServeStream:
    """Async iterator of tuples of new token ids, made by `Orchestrator.serve`.

    After the last item `finish_reason` and `usage` are set. A ClusterError that ended the request is raised from the
    iterator once, after every token that was produced before it.
    """

    def __init__(
        self,
        request: ServeRequest,
        observe_token_s: Callable[[float], None] = lambda seconds: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.usage = RequestUsage(prompt_tokens=len(request.prompt_ids))
        self.stop_requested = False
        self._keep_tokens: int | None = None
        self._clock = clock
        self._started = self._last_emit = clock()
        self._observe_token_s = observe_token_s
        self._items: asyncio.Queue[tuple[int, ...] | ClusterError | None] = asyncio.Queue()
        self._task: asyncio.Task[None] | None = None
        self._on_stop: Callable[[], Awaitable[None]] | None = None

    def __aiter__(self) -> AsyncIterator[tuple[int, ...]]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[tuple[int, ...]]:
        while (item := await self._items.get()) is not None:
            if isinstance(item, ClusterError):
                raise item
            yield item

    async def stop(self, keep_tokens: int | None = None) -> None:
        """End the answer now, as after a stop string; the turn is kept with everything computed so far.

        keep_tokens  answer tokens that the client sees, for `usage.completion_tokens`. Waits until the end is known,
        which it soon is: an answer that is complete is never tried again. Raises nothing.
        """
        self.stop_requested = True
        self._keep_tokens = keep_tokens
        if self._on_stop is not None:
            with contextlib.suppress(ClusterError):  # its worker died: the serving task learns it too
                await self._on_stop()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def cancel(self) -> None:
        """Give the request up on every worker; nothing more of it is kept. Idempotent. Waits for the clean-up."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task})
            if self.finish_reason is None:  # cancelled before it ever ran
                self.finish(FinishReason.CANCELLED)

    # --- for the orchestrator ---

    def attach(self, task: asyncio.Task[None]) -> None:
        """The task that serves this stream."""
        self._task = task

    def on_stop(self, action: Callable[[], Awaitable[None]] | None) -> None:
        """How to stop the answer where it is now being decoded."""
        self._on_stop = action

    def emit(self, token_ids: tuple[int, ...]) -> None:
        """Give tokens to the client."""
        if not token_ids:
            return
        now = self._clock()
        if self.usage.ttft_s is None:
            self.note(ttft_s=now - self._started)
        else:
            for _ in token_ids:
                self._observe_token_s((now - self._last_emit) / len(token_ids))
        self._last_emit = now
        self.token_ids.extend(token_ids)
        self._items.put_nowait(token_ids)

    def note(self, **usage: object) -> None:
        """Set fields of `usage`."""
        self.usage = replace(self.usage, **usage)  # type: ignore[arg-type]

    def finish(self, reason: FinishReason) -> None:
        """The last token was emitted."""
        self.finish_reason = reason
        kept = len(self.token_ids) if self._keep_tokens is None else self._keep_tokens
        self.note(completion_tokens=kept, e2e_s=self._clock() - self._started)
        self._items.put_nowait(None)

    def fail(self, error: ClusterError) -> None:
        """The request ended with an error."""
        self.finish_reason = FinishReason.ERROR
        self.note(completion_tokens=len(self.token_ids), e2e_s=self._clock() - self._started)
        self._items.put_nowait(error)
