"""Conversations that promise least go first, decided per conversation and learned while serving.

What a conversation promises comes from the stop reason of its last turn, how long it stayed away after that reason
before, its output length and the time it is away (`return_hazard`). How patient the estimate is follows the measured
time in which the whole cache is turned over. While the requests carry no stop reason there is nothing to learn from,
and the order is plain LRU.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import exp, inf, log

import numpy as np

from kvcache.eviction.lru_order import LruOrder
from kvcache.eviction.return_hazard import ReturnHazard
from kvcache.radix_node import RadixNode

__all__ = ["TurnAwareOrder"]

_FIRST_TURNOVER_S = 600.0
_PATIENCE_SHARE, _LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.05, 5.0, 60.0  # of the turnover time
_REFRESH_S, _REFRESH_S_PER_OWNER = 0.25, 5e-5
_REWIND_SHARE = 0.05  # how much likelier a turn goes on from the last one than from a branch left behind
_SMOOTHING = 0.3  # weight of the newest gap
_LONGEST_GAP_S = 3600.0
_MOST_GAPS = 8  # stop reasons remembered for one conversation
_FORGET_AFTER_S = 7200.0


class _Owner:
    """One conversation: its evictable leaf runs and what is known of its rhythm.

    gaps   by stop reason: the smoothed logarithm of the time (s) that it stayed away after such turns
    """

    __slots__ = ("active", "gaps", "idle_since", "kind", "leaves", "stop_reason")

    def __init__(self, now: float) -> None:
        self.leaves: set[RadixNode] = set()
        self.idle_since = now
        self.kind = 0
        self.stop_reason: str | None = None
        self.gaps: dict[str | None, float] = {}
        self.active = 0

    def past_gap(self, stop_reason: str | None) -> float | None:
        """Seconds that it stays away after such a turn, or None when there was none yet."""
        smoothed = self.gaps.get(stop_reason)
        return None if smoothed is None else exp(smoothed)

    def came_back(self, gap: float) -> None:
        """It stayed away for `gap` seconds."""
        newest = log(min(_LONGEST_GAP_S, max(1.0, gap)))
        smoothed = self.gaps.get(self.stop_reason)
        if smoothed is None and len(self.gaps) >= _MOST_GAPS:
            return
        self.gaps[self.stop_reason] = newest if smoothed is None else smoothed + _SMOOTHING * (newest - smoothed)


class TurnAwareOrder:
    """See the module. `pool_blocks` is the size of the cache, for the turnover time."""

    def __init__(self, clock: Callable[[], float], pool_blocks: int) -> None:
        self._clock = clock
        self._pool_blocks = pool_blocks
        self._lru = LruOrder()
        self._hazard = ReturnHazard()
        self._owners: dict[str, _Owner] = {}
        self._queue: list[tuple[float, float, str, bool]] = []
        self._refreshed_at = float("-inf")
        self._turns = 0.0
        self._informed_turns = 0.0
        self._evicted = 0
        self._mark: float | None = None
        self.turnover_s = _FIRST_TURNOVER_S

    @property
    def informed(self) -> bool:
        """True while most turns carry a stop reason."""
        return self._informed_turns * 2 > self._turns

    @property
    def patience_s(self) -> float:
        """Seconds added to every wait that is weighed."""
        return min(_MOST_PATIENCE_S, max(_LEAST_PATIENCE_S, self.turnover_s * _PATIENCE_SHARE))

    def offer(self, node: RadixNode) -> None:
        """Consider `node` from now on."""
        if node.children or node.parent is None or not node.alive:
            return
        self._lru.offer(node)
        self._owner(node.owner).leaves.add(node)

    def pop(self) -> RadixNode | None:
        """The next run, or None."""
        superseded = self._lru.pop(superseded_only=True)
        if superseded is not None or not self.informed:
            return superseded if superseded is not None else self._lru.pop()
        now = self._clock()
        fresh = now - self._refreshed_at < max(_REFRESH_S, _REFRESH_S_PER_OWNER * len(self._owners))
        if not fresh:
            self._refresh(now)
        node = self._from_queue()
        if node is None and fresh:
            self._refresh(now)
            node = self._from_queue()
        return node

    def oldest_use(self) -> int | None:
        """Last use of the run that was used least recently (`pop` may give another one), or None."""
        return self._lru.oldest_use()

    def request_began(self, owner: str) -> None:
        """Learn from the gap since the last turn."""
        now, known = self._clock(), owner in self._owners
        record = self._owner(owner)
        if known and record.active == 0:
            gap = now - record.idle_since
            self._hazard.returned(record.kind, gap)
            record.came_back(gap)
        record.active += 1

    def turn_ended(self, owner: str, stop_reason: str | None, output_tokens: int | None) -> None:
        """The conversation waits from now on."""
        record = self._owner(owner)
        record.active = max(0, record.active - 1)
        record.idle_since = self._clock()
        record.stop_reason = stop_reason
        record.kind = self._hazard.class_of(stop_reason, record.past_gap(stop_reason), output_tokens)
        self._turns = self._turns * 0.999 + 1
        self._informed_turns = self._informed_turns * 0.999 + (1 if stop_reason is not None else 0)

    def evicted(self, blocks: int) -> None:
        """Measure the turnover: how long until as many blocks as the pool has were given up."""
        now = self._clock()
        if self._mark is None:
            self._mark = now
        self._evicted += blocks
        if self._evicted >= self._pool_blocks // 4 and now > self._mark:
            turnover = (now - self._mark) * self._pool_blocks / self._evicted
            self.turnover_s += 0.3 * (turnover - self.turnover_s)
            self._mark, self._evicted = now, 0

    def _owner(self, owner: str) -> _Owner:
        record = self._owners.get(owner)
        if record is None:
            record = self._owners[owner] = _Owner(self._clock())
        return record

    def _refresh(self, now: float) -> None:
        self._refreshed_at = now
        for name in [n for n, r in self._owners.items() if not r.leaves and now - r.idle_since > _FORGET_AFTER_S]:
            if self._owners[name].active == 0:
                del self._owners[name]
        away = [record for record in self._owners.values() if record.active == 0]
        kinds = np.array([record.kind for record in away], dtype=np.int64)
        ages = np.array([max(0.0, now - record.idle_since) for record in away], dtype=np.float64)
        self._hazard.learn(kinds, ages)
        holders = [(name, record) for name, record in self._owners.items() if record.active == 0 and record.leaves]
        holding = np.array([bool(record.leaves) for record in away], dtype=np.bool_)
        scores = self._hazard.worth(kinds[holding], ages[holding], self.patience_s)
        self._queue = []
        for (name, record), score in zip(holders, scores.tolist(), strict=True):
            self._queue.append((score, record.idle_since, name, False))
            if len(record.leaves) > 1:
                self._queue.append((score * _REWIND_SHARE, record.idle_since, name, True))
        self._queue.extend((inf, r.idle_since, n, False) for n, r in self._owners.items() if r.active and r.leaves)
        heapq.heapify(self._queue)

    def _from_queue(self) -> RadixNode | None:
        while self._queue:
            score, idle_since, name, left_behind = self._queue[0]
            record = self._owners.get(name)
            if record is not None and (score == inf or (not record.active and record.idle_since == idle_since)):
                node = self._leaf_of(name, record, left_behind)
                if node is not None:
                    record.leaves.discard(node)
                    return node
            heapq.heappop(self._queue)  # nothing left, or it came back since: its place is found at the next refresh
        return None

    def _leaf_of(self, name: str, record: _Owner, left_behind: bool) -> RadixNode | None:
        """The least recently used leaf; with `left_behind` only one that the last turn did not use."""
        oldest: RadixNode | None = None
        newest = 0
        for node in list(record.leaves):
            if not node.alive or node.children or node.superseded:
                record.leaves.discard(node)
            elif node.owner != name:
                record.leaves.discard(node)
                self._owner(node.owner).leaves.add(node)
            else:
                newest = max(newest, node.last_used)
                if oldest is None or node.last_used < oldest.last_used:
                    oldest = node
        return None if left_behind and oldest is not None and oldest.last_used == newest else oldest
