"""The manager under test, and what must hold after every step: recounts, patterns, the model, the observers' view."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from typing import ClassVar

import numpy as np

from kvcache import (
    BlockReuseConfig,
    BytesPageStorage,
    CacheStats,
    CacheTotals,
    KvCacheConfig,
    KvCacheManager,
    PagePin,
    RecurrentStateConfig,
    ReusePolicy,
)
from kvcache.config import EvictionPolicyName
from kvcache.events import EventKind
from kvcache.testing import PatternModel, pattern_layout
from tests.property.kvcache.cache_model import SCOPES, Open, Published

MOST_PINS = 4


class CheckedManager:
    """Configured by subclasses. `steps` counts the steps of all machines of this process."""

    block = 4
    pages = 24
    full = True
    mla = False
    windows: tuple[int, ...] = ()
    recurrent = 0
    state_pages = 0  # of each recurrent life cycle, 0: as many as the others
    policy = ReusePolicy.PER_CONVERSATION
    turns = 2
    reuse = True
    partial = True
    branch_snapshot = False
    points: dict[str, object] = {}  # noqa: RUF012
    eviction_possible = True
    exact = False  # the reused length is the model's
    eviction = EvictionPolicyName.LRU
    events = 0
    host_bytes = 0
    disk_bytes = 0

    steps = 0
    reached: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        self.now = 0.0
        self.folder = tempfile.mkdtemp(prefix="kvferry-machine-") if self.disk_bytes else None
        layout = pattern_layout(
            self.block, windows=self.windows, recurrent=self.recurrent, full=self.full, mla=self.mla
        )
        counts = [self.pages] * (len(layout.groups) - self.recurrent)
        self.storage = BytesPageStorage(layout, counts + [self.state_pages or self.pages] * self.recurrent)
        reuse: dict[str, object] = {"policy": self.policy, "enable_branch_snapshot": self.branch_snapshot}
        if self.policy is ReusePolicy.PER_CONVERSATION:
            reuse["max_num_turns"] = self.turns
        config = KvCacheConfig(
            tokens_per_block=self.block,
            enable_block_reuse=self.reuse,
            enable_partial_reuse=self.partial,
            block_reuse_config=BlockReuseConfig(**reuse),  # type: ignore[arg-type]
            recurrent_state_config=RecurrentStateConfig(**self.points),  # type: ignore[arg-type]
            eviction_policy=self.eviction,
            max_peer_pins=MOST_PINS,
            event_buffer_max_size=self.events,
            host_cache_size=self.host_bytes,
            disk_cache_size=self.disk_bytes,
            disk_cache_path=self.folder,
            max_tracked_conversations=2 if self.eviction_possible else 100,
            conversation_idle_timeout_s=50.0,
        )
        self.manager = KvCacheManager(layout, config, self.storage, clock=lambda: self.now)
        self.model = PatternModel(self.storage)
        self.open: list[Open] = []
        self.pins: list[PagePin] = []
        self.published = Published(self.turns)
        self.serial = 0
        self.believed: set[bytes] = set()
        self.iterations: list[CacheTotals] = []
        self.last: dict[str, tuple[int, list[int]]] = {}

    def tracked(self) -> set[str]:
        ledger = self.manager.ledger
        return set() if ledger is None else {c.conversation_id for c in ledger.conversations()}

    def running(self) -> list[Open]:
        return [one for one in self.open if one.runs]

    def awake(self) -> list[Open]:
        return [one for one in self.open if one.cache.suspended is None]

    def picture(self) -> object:
        lengths = [
            (o.cache.num_computed_tokens, o.cache.num_committed_tokens, o.cache.capacity_tokens, o.cache.blocks)
            for o in self.open
        ]
        return self.manager.stats(), lengths, [pool.free_list().tolist() for pool in self.manager.pools]

    # after every step

    def check(self) -> None:
        """Everything that must hold after every step."""
        self.sound()
        self.a_consumer_of_the_events_knows_what_is_cached()
        self.retained_turns_are_found()
        self.anonymous_ends_are_found()
        if self.serial % 3 == 0:
            self.iterations.append(self.manager.iteration_stats())

    def sound(self) -> None:
        CheckedManager.steps += 1
        self.manager.check_integrity()
        for one in self.awake():
            copied = not one.cache.sources and not one.cache.state_sources
            wrong = self.model.find_wrong(one.cache, copied=copied)
            assert wrong is None, wrong

    def a_consumer_of_the_events_knows_what_is_cached(self) -> None:
        for event in self.manager.poll_events():
            if event.kind is EventKind.STORED:
                self.believed.update(block.key for block in event.blocks)
            elif event.kind is EventKind.REMOVED:
                self.believed.difference_update(event.keys)
        if self.events:
            here = {key for node in self.manager.tree.nodes() for key in node.digests}
            tiers = self.manager.tiers
            if tiers is not None:
                here.update(tiers.host._priority, tiers.disk._sizes if tiers.disk is not None else ())
            assert self.believed == here

    def retained_turns_are_found(self) -> None:
        ledger = self.manager.ledger
        if ledger is None:
            return
        tracked = {c.conversation_id: c for c in ledger.conversations()}
        for name, queue in list(self.published.turns.items()):
            if name not in tracked:
                del self.published.turns[name]
            elif not self.eviction_possible:
                assert [turn.num_tokens for turn in tracked[name].turns] == [len(tokens) for _, tokens in queue]
                for scope, tokens in queue:
                    probe = np.array([*tokens, 7], dtype=np.int32)
                    assert self.manager.probe_reuse(probe, SCOPES[scope]) == len(tokens)

    def anonymous_ends_are_found(self) -> None:
        if self.eviction_possible or self.policy is not ReusePolicy.PER_CONVERSATION:
            return
        for scope, ends in enumerate(self.published.anonymous_ends):
            for tokens in list(ends)[self.serial % 4 :: 4]:  # each of them every few steps
                probe = np.array([*tokens, 7], dtype=np.int32)
                match = self.manager.tree.match(SCOPES[scope].digest(), probe, True)
                assert match is not None and match.num_tokens == len(tokens)
                # inside a block any sibling that begins alike may be the one that was matched
                assert len(tokens) % self.block or not match.node.superseded

    def teardown(self) -> None:
        for one in self.open:
            one.cache.close()
        for pin in self.pins:
            pin.release()
        for group in range(len(self.manager.pools)):
            self.manager.set_budget(self.storage.num_pages(group), group)
        self.manager.check_integrity()
        stats = self.manager.stats()
        assert all(pool.held == 0 for pool in stats.pools)
        assert all(pool.free + pool.cached == pool.total for pool in stats.pools)
        self.iterations.append(self.manager.iteration_stats())
        for name in ("requests", "reused_tokens", "missed_blocks", "answer_blocks", "reused_full_blocks"):
            assert sum(getattr(one, name) for one in self.iterations) == getattr(stats, name)
        assert all(count >= 0 for one in self.iterations for count in one.evictions.values())
        self.note_what_was_reached(stats)
        self.manager.clear()
        assert all(pool.free == pool.total for pool in self.manager.stats().pools)
        self.manager.close()
        self.storage.close()
        if self.folder is not None:
            assert os.listdir(self.folder) == []
            os.rmdir(self.folder)

    def note_what_was_reached(self, stats: CacheStats) -> None:
        """So that a test can see that nothing was driven past."""
        for name in (
            "reused_full_blocks",
            "reused_partial_blocks",
            "missed_blocks",
            "answer_blocks",
            "received_blocks",
            "shortened_tokens",
            "snapshots_skipped",
            "suspended",
            "resumed",
        ):
            self.reached[name] += getattr(stats, name)
        self.reached.update({f"evicted: {reason}": count for reason, count in stats.evictions.items()})
        for cycle in stats.life_cycles:
            self.reached[f"{cycle.kind}: reused"] += cycle.reused_full + cycle.reused_partial
            self.reached[f"{cycle.kind}: copied"] += cycle.copied
        for tier in stats.tiers:
            for name in (
                "stored_blocks",
                "onboarded_blocks",
                "lifted_blocks",
                "dropped_blocks",
                "corrupt_blocks",
                "errors",
            ):
                self.reached[f"{tier.tier}: {name}"] += getattr(tier, name)
