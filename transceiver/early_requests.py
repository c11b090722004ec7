"""Requests that came before their publication: kept for a while, answered when it comes. Runs in the loop.

Used by `HolderSide`, which checks the token before a request gets here. Bounded; whoever waits too long is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from transceiver.loop_context import LoopContext, Timer
from transceiver.messages import PullRequest
from transceiver.page_part import PartView
from transceiver.transport import Link

__all__ = ["EarlyRequest", "EarlyRequests"]

_MAX_WAITING = 1024


@dataclass(slots=True, eq=False)
class EarlyRequest:
    """A receiver that waits for a publication."""

    link: Link
    request: PullRequest
    parts: tuple[PartView | None, ...]
    timer: Timer
    worker_id: str


class EarlyRequests:
    """Waiting requests by transfer id. ``refuse(link, pull_id, field, reason)`` tells a receiver that it is over."""

    def __init__(self, context: LoopContext, refuse: Callable[[Link, int, str, str], None]) -> None:
        self._ctx = context
        self._refuse = refuse
        self._waiting: dict[str, list[EarlyRequest]] = {}

    def __len__(self) -> int:
        return sum(map(len, list(self._waiting.values())))

    def add(self, link: Link, request: PullRequest, parts: tuple[PartView | None, ...], worker_id: str) -> None:
        """Keep a request until `take`, `remove`, or its time is over; refuses it when too many are waiting."""
        if len(self) >= _MAX_WAITING:
            self._ctx.stats.refused_pulls += 1
            self._refuse(link, request.pull_id, "queue", "too many early requests")
            return
        waiting = self._waiting.setdefault(request.transfer_id, [])
        if any(entry.link is link and entry.request.pull_id == request.pull_id for entry in waiting):
            self._ctx.stats.stale_messages += 1
            return
        ttl = min(self._ctx.config.early_request_ttl_ms, max(1, request.timeout_ms)) / 1000
        timer = self._ctx.after(ttl, lambda: self._too_late(request.transfer_id, link, request.pull_id))
        waiting.append(EarlyRequest(link, request, parts, timer, worker_id))

    def take(self, transfer_id: str) -> list[EarlyRequest]:
        """The requests of a transfer, in order of arrival, taken out."""
        entries = self._waiting.pop(transfer_id, [])
        for entry in entries:
            entry.timer.cancel()
        return entries

    def remove(self, link: Link, pull_id: int | None) -> bool:
        """Forget a pull of a link (None: all of them); False when none was waiting."""
        removed = [self._remove(transfer_id, link, pull_id) for transfer_id in list(self._waiting)]
        return any(removed)

    def clear(self) -> None:
        """Forget everything."""
        for transfer_id in list(self._waiting):
            self.take(transfer_id)

    def _remove(self, transfer_id: str, link: Link, pull_id: int | None) -> bool:
        kept: list[EarlyRequest] = []
        dropped: list[EarlyRequest] = []
        for entry in self._waiting.get(transfer_id, ()):
            same = entry.link is link and (pull_id is None or entry.request.pull_id == pull_id)
            (dropped if same else kept).append(entry)
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
