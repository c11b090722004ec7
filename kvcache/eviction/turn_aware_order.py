"""Conversations that promise least go first, decided per conversation and learned while serving.

What a conversation promises comes from the stop reason of its last turn, how long it stayed away after that reason
before, its output length and the time it is away (`return_hazard`). How patient the estimate is follows the measured
time in which the whole cache is turned over. Only `end_turn` says that a turn is over: a request that is closed
without it (a prefill whose answer is generated elsewhere, a loan, a preemption) teaches nothing. While the turns
carry no stop reason there is nothing to learn from, and the order is plain LRU.

What is remembered is bounded: an entry for each cached run, what requests without a conversation leave goes with
their last run, and of conversations without a run at most `_MOST_AWAY` are known.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from math import inf

import numpy as np

from kvcache.eviction.idle_owner import IdleOwner, is_anonymous
from kvcache.eviction.lru_order import LruOrder
from kvcache.eviction.return_hazard import ReturnHazard
from kvcache.radix_node import RadixNode

__all__ = ["TurnAwareOrder"]

_FIRST_TURNOVER_S = 600.0
_PATIENCE_SHARE, _LEAST_PATIENCE_S, _MOST_PATIENCE_S = 0.05, 5.0, 60.0  # of the turnover time
_REFRESH_S, _REFRESH_S_PER_OWNER = 0.25, 5e-5
_REWIND_SHARE = 0.05  # how much likelier a turn goes on from the last one than from a branch left behind
_FORGET_AFTER_S = 7200.0
_MOST_AWAY = 16_384  # conversations remembered without a cached run
_PRUNE_FROM = 1024


class TurnAwareOrder:
    """See the module. `pool_blocks` is the size of the cache, for the turnover time."""

    def __init__(self, clock: Callable[[], float], pool_blocks: int) -> None:
        self._clock = clock
        self._pool_blocks = pool_blocks
        self._lru = LruOrder()
        self._hazard = ReturnHazard()
        self._owners: dict[str, IdleOwner] = {}
        self._homes: dict[RadixNode, IdleOwner] = {}  # among whose `runs` a run counts
        self._prune_at = _PRUNE_FROM
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
        self._house(node)

    def removed(self, node: RadixNode) -> None:
        """`node` left the tree."""
        home = self._homes.pop(node, None)
        if home is not None:
            home.leaves.discard(node)
            home.runs -= 1
            self._drop_if_done(home)

    def pop(self) -> RadixNode | None:
        """The next run, or None."""
        superseded = self._lru.pop(superseded_only=True)
        if superseded is not None or not self.informed:
            return superseded if superseded is not None else self._lru.pop()
        now = self._clock()
        fresh = 0 <= now - self._refreshed_at < max(_REFRESH_S, _REFRESH_S_PER_OWNER * len(self._owners))
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
        """Learn from the gap since the last turn's end, unless another request did."""
        now = self._clock()
        if len(self._owners) >= self._prune_at:
            self._prune(now)
        record = self._owner(owner)
        if record.away and record.active == 0:
            gap = max(0.0, now - record.idle_since)
            self._hazard.returned(record.kind, gap)
            record.came_back(gap)
            record.away = False
        record.active += 1
        record.seen = now

    def turn_ended(self, owner: str, stop_reason: str | None, output_tokens: int | None) -> None:
        """The conversation waits from now on."""
        record = self._owner(owner)
        record.away = True
        record.idle_since = record.seen = self._clock()
        record.stop_reason = stop_reason
        record.kind = self._hazard.class_of(stop_reason, record.past_gap(stop_reason), output_tokens)
        self._turns = self._turns * 0.999 + 1
        self._informed_turns = self._informed_turns * 0.999 + (1 if stop_reason is not None else 0)

    def request_closed(self, owner: str) -> None:
        """One open request less. What is known of the last turn's end stays."""
        record = self._owner(owner)
        record.active = max(0, record.active - 1)
        record.seen = self._clock()
        self._drop_if_done(record)

    def evicted(self, blocks: int) -> None:
        """Measure the turnover: how long until as many blocks as the pool has were given up."""
        now = self._clock()
        if self._mark is None or now < self._mark:
            self._mark, self._evicted = now, 0
        self._evicted += blocks
        if self._evicted >= self._pool_blocks // 4 and now > self._mark:
            turnover = (now - self._mark) * self._pool_blocks / self._evicted
            self.turnover_s += 0.3 * (turnover - self.turnover_s)
            self._mark, self._evicted = now, 0

    def _owner(self, owner: str) -> IdleOwner:
        record = self._owners.get(owner)
        if record is None:
            record = self._owners[owner] = IdleOwner(owner, self._clock())
        return record

    def _house(self, node: RadixNode) -> None:
        """Put a leaf among those of its owner."""
        record, home = self._owner(node.owner), self._homes.get(node)
        if home is not record:
            self.removed(node)
            self._homes[node] = record
            record.runs += 1
        record.leaves.add(node)

    def _drop_if_done(self, record: IdleOwner) -> None:
        """A request without a conversation is forgotten with its last run."""
        if is_anonymous(record.name) and not record.runs and not record.active:
            self._owners.pop(record.name, None)

    def _prune(self, now: float) -> None:
        """Forget conversations without a run that were not seen for long, or are too many."""
        without = [record for record in self._owners.values() if not record.runs and not record.active]
        gone = [record for record in without if now - record.seen > _FORGET_AFTER_S]
        if len(without) - len(gone) > _MOST_AWAY:
            gone = sorted(without, key=lambda record: record.seen)[: len(without) - _MOST_AWAY // 2]
        for record in gone:
            del self._owners[record.name]
        self._prune_at = max(_PRUNE_FROM, 2 * len(self._owners))

    def _refresh(self, now: float) -> None:
        self._refreshed_at = now
        self._prune(now)
        idle = [record for record in self._owners.values() if record.active == 0]
        kinds = np.array([record.kind for record in idle], dtype=np.int64)
        ages = np.array([record.age(now) for record in idle], dtype=np.float64)
        away = np.array([record.away for record in idle], dtype=np.bool_)
        self._hazard.learn(kinds[away], ages[away])
        holders = [record for record in idle if record.leaves]
        holding = np.array([bool(record.leaves) for record in idle], dtype=np.bool_)
        scores = self._hazard.worth(kinds[holding], ages[holding], self.patience_s)
        self._queue = []
        for record, score in zip(holders, scores.tolist(), strict=True):
            self._queue.append((score, record.seen, record.name, False))
            if len(record.leaves) > 1:
                self._queue.append((score * _REWIND_SHARE, record.seen, record.name, True))
        self._queue.extend((inf, r.seen, r.name, False) for r in self._owners.values() if r.active and r.leaves)
        heapq.heapify(self._queue)

    def _from_queue(self) -> RadixNode | None:
        while self._queue:
            score, seen, name, left_behind = self._queue[0]
            record = self._owners.get(name)
            if record is not None and (score == inf or (not record.active and record.seen == seen)):
                node = self._leaf_of(record, left_behind)
                if node is not None:
                    return node
            heapq.heappop(self._queue)  # nothing left, or it came back since: its place is found at the next refresh
        return None

    def _leaf_of(self, record: IdleOwner, left_behind: bool) -> RadixNode | None:
        """Take out the least recently used leaf; with `left_behind` only one that the last turn did not use."""
        oldest = self._oldest_of(record)
        if oldest is None:
            return None
        record.leaves.discard(oldest)
        if left_behind and self._oldest_of(record) is None:  # the only one
            record.leaves.add(oldest)
            return None
        return oldest

    def _oldest_of(self, record: IdleOwner) -> RadixNode | None:
        """The least recently used leaf, after what is none any more, or is another's, was taken out."""
        while (node := record.leaves.oldest()) is not None:
            if node.alive and not node.children and not node.superseded:
                if node.owner == record.name:
                    return node
                self._house(node)
            else:
                self.removed(node)
        return None
