"""What pulls, grants and folded pulls share: a future that only their own end resolves, and ``await`` on it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from concurrent.futures import Future
from typing import Any, TypeVar

from transceiver.transfer_types import TransferOutcome

__all__ = ["AwaitsOutcome", "unshakable_future"]

T = TypeVar("T")


def unshakable_future() -> Future[T]:
    """A future that nobody can cancel, in particular no asyncio wrapper of it that was cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    return future


class AwaitsOutcome:
    """`future` resolves once with how the transfer ended."""

    def __init__(self) -> None:
        self.future: Future[TransferOutcome] = unshakable_future()

    def __await__(self) -> Generator[Any, None, TransferOutcome]:
        """``outcome = await it``; cancelling the waiting task does not cancel the transfer."""
        return asyncio.wrap_future(self.future).__await__()
