"""Requests that came before their publication: kept for a while, answered when it comes. Runs in the loop.

Used by `HolderSide`, which checks the token before a request gets here. Bounded; whoever waits too long is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transceiver.holder_pulls import Asked
from transceiver.loop_context import LoopContext, Timer
from transceiver.transport import Link

__all__ = ["EarlyRequests"]

_MAX_WAITING = 1024


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A receiver that waits for a publication."""

    asked: Asked
    timer: Timer

    def is_of(self, link: Link, pull_id: int | None) -> bool:
        """Whether it is this pull of the link (None: any)."""
        return self.asked.link is link and pull_id in (None, self.asked.request.pull_id)


class EarlyRequests:
    """Waiting requests by transfer id. ``refuse(link, pull_id, field, reason)`` tells a receiver that it is over."""

    def __init__(self, context: LoopContext, refuse: Callable[[Link, int, str, str], None]) -> None:
        self._ctx = context
        self._refuse = refuse
        self._waiting: dict[str, list[_Waiting]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._waiting.values())))

    def add(self, asked: Asked) -> None:
        """Keep a request until `take`, `remove`, or its time is over; refuses it when too many are waiting."""
        link, request = asked.link, asked.request
        if len(self) >= _MAX_WAITING:
            self._ctx.stats.refused_pulls += 1
            self._refuse(link, request.pull_id, "queue", "too many early requests")
            return
        waiting = self._waiting.setdefault(request.transfer_id, [])
        if any(entry.is_of(link, request.pull_id) for entry in waiting):
            self._ctx.stats.stale_messages += 1
            return
        ttl = min(self._ctx.config.early_request_ttl_ms, max(1, request.timeout_ms)) / 1000
        timer = self._ctx.after(ttl, lambda: self._too_late(request.transfer_id, link, request.pull_id))
        waiting.append(_Waiting(asked, timer))

    def take(self, transfer_id: str) -> list[Asked]:
        """The requests of a transfer, in order of arrival, taken out."""
        entries = self._waiting.pop(transfer_id, [])
        for entry in entries:
            entry.timer.cancel()
        return [entry.asked for entry in entries]

    def remove(self, link: Link, pull_id: int | None) -> bool:
        """Forget a pull of a link (None: all of them); False when none was waiting."""
        removed = [self._remove(transfer_id, link, pull_id) for transfer_id in list(self._waiting)]
        return any(removed)

    def clear(self) -> None:
        """Forget everything."""
        for transfer_id in list(self._waiting):
            self.take(transfer_id)

    def _remove(self, transfer_id: str, link: Link, pull_id: int | None) -> bool:
        kept: list[_Waiting] = []
        dropped: list[_Waiting] = []
        for entry in self._waiting.get(transfer_id, ()):
            (dropped if entry.is_of(link, pull_id) else kept).append(entry)
        for entry in dropped:
            entry.timer.cancel()
        if kept:
            self._waiting[transfer_id] = kept
        else:
            self._waiting.pop(transfer_id, None)
        return bool(dropped)

    def _too_late(self, transfer_id: str, link: Link, pull_id: int) -> None:
        if self._remove(transfer_id, link, pull_id):
            self._refuse(link, pull_id, "transfer_id", "no publication came for this early request")
