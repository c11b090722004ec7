"""One answer from the cluster's token stream to the client's text, for streams and whole answers alike.

Ends the stream early when a stop string is complete and cancels it when the consumer leaves; the routes only format
what comes out.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from cluster.errors import ClusterError, EngineFailedError
from cluster.frontend.backend import AnswerStream
from cluster.frontend.text_output import AnswerText, TextDelta, VisibleAnswer
from cluster.request import FinishReason
from cluster.serve_request import RequestUsage

__all__ = ["Answer"]

_LOG = logging.getLogger(__name__)


class Answer:
    """Drives one AnswerStream. `finish_reason`, `usage` and `visible` hold once `deltas` has ended."""

    def __init__(self, stream: AnswerStream, text: AnswerText, *, cancel_timeout_s: float) -> None:
        self._stream = stream
        self._text = text
        self._cancel_timeout_s = cancel_timeout_s
        self._finish_reason: FinishReason | None = None
        self._over = False  # ended, or cancelled: nothing more to be told to the cluster

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended: `stop` or `length`."""
        assert self._finish_reason is not None, "the answer has not ended"
        return self._finish_reason

    @property
    def usage(self) -> RequestUsage:
        """What the cluster did for the answer."""
        return self._stream.usage

    @property
    def text(self) -> str:
        """The text so far."""
        return self._text.text

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens so far, a stop string's included."""
        return self._text.token_ids

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far."""
        return self._text.num_tokens

    @property
    def visible(self) -> VisibleAnswer:
        """The finished answer with the tokens behind its text."""
        return self._text.visible_answer()

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Text and tokens as they come. Closing it before its end cancels the answer. Raises ClusterError."""
        try:
            async for token_ids in self._stream:
                delta = self._text.push(token_ids)
                if self._text.stopped:
                    await self._stream.stop(self._text.num_tokens)
                    self._finish_reason = FinishReason.STOP
                    self._over = True
                    yield delta
                    return
                yield delta
            self._over = True
            self._finish_reason = self._end_of(self._stream.finish_reason)
            rest = self._text.finish(at_end_token=self._finish_reason is FinishReason.STOP)
            if rest:
                yield TextDelta(rest, ())
        finally:
            await self.close()

    async def run(self) -> None:
        """Run to the end. Being cancelled cancels the answer. Raises ClusterError."""
        try:
            async for _ in self.deltas():
                pass
        finally:
            await self.close()

    async def close(self) -> None:
        """Cancel the answer unless it has ended. Idempotent; waits for the cluster only so long."""
        if self._over:
            return
        self._over = True
        try:
            async with asyncio.timeout(self._cancel_timeout_s):
                await self._stream.cancel()
        except (ClusterError, TimeoutError) as error:
            _LOG.warning("cancelling an abandoned answer failed: %s", error or type(error).__name__)

    def _end_of(self, reason: FinishReason | None) -> FinishReason:
        if reason is FinishReason.STOP or reason is FinishReason.LENGTH:
            return reason
        raise EngineFailedError(f"the answer ended early ({reason}); send the request again")
