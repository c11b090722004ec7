"""What the frontend needs of the cluster behind it, as protocols: the orchestrator fulfils them, and so can a test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol, runtime_checkable

from cluster.request import FinishReason
from cluster.serve_request import RequestUsage, ServeRequest, TurnRecord

__all__ = ["AnswerStream", "Backend", "CacheReset"]


class AnswerStream(Protocol):
    """One answer on its way: iterate for batches of new token ids. Raises ClusterError from the iteration."""

    @property
    def finish_reason(self) -> FinishReason | None:
        """How the answer ended, once it has."""
        ...

    @property
    def usage(self) -> RequestUsage:
        """What was reused, moved and computed; complete once the answer has ended."""
        ...

    def __aiter__(self) -> AsyncIterator[tuple[int, ...]]: ...

    async def stop(self, keep_tokens: int) -> None:
        """End the answer early, as after a stop string: the client was given its first `keep_tokens` tokens."""
        ...

    async def cancel(self) -> None:
        """Give the answer up on every worker. Idempotent."""
        ...


class Backend(Protocol):
    """The orchestrator as the frontend sees it."""

    @property
    def ready(self) -> bool:
        """Whether a request could be served now."""
        ...

    async def serve(self, request: ServeRequest) -> AnswerStream:
        """Start serving. Raises ClusterError (queue full, not ready, never fits)."""
        ...

    async def end_conversation(self, conversation_id: str) -> None:
        """Release what is retained for a conversation; an unknown id is no error."""
        ...

    async def turn_record(self, request_id: str, wait_s: float) -> TurnRecord | None:
        """What a finished turn moved, waiting up to `wait_s` for its back-flow; None for an unknown request."""
        ...


@runtime_checkable
class CacheReset(Protocol):
    """A backend that can drop every cached block."""

    async def reset_prefix_cache(self) -> None:
        """Drop every block that no running request holds, on all workers."""
        ...
