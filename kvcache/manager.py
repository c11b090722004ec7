"""The cache manager of one worker: pools, tree, conversations and open sequences behind one small interface.

The worker holds one lock around every call (calls are short; none blocks). A broken invariant poisons the manager:
it then records the reason and refuses every later call. It never imports torch, a network or Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.block_pool import BlockPool
from kvcache.config import EvictionPolicyName, KvCacheConfig, ReusePolicy
from kvcache.conversation_manager import ConversationManager
from kvcache.counters import CacheCounters
from kvcache.errors import (
    CorruptedCacheError,
    InvalidArgumentError,
    InvalidSizeError,
    InvalidTokensError,
    UnknownLifeCycleError,
)
from kvcache.events import EventKind, EventLog, KvEvent
from kvcache.eviction import EvictionOrder, LruOrder, TurnAwareOrder
from kvcache.integrity import find_fault
from kvcache.layout import KvLayout
from kvcache.onboarding import estimate_onboarded, onboard, tier_keys
from kvcache.page_room import PageRoom
from kvcache.peer_pins import PeerPins
from kvcache.poison_guard import PoisonGuard
from kvcache.provenance import BlockProvenance
from kvcache.radix_evict import evict, evict_all, evictable_pages
from kvcache.radix_match import Match, TreeShape
from kvcache.radix_node import Tokens
from kvcache.radix_path import block_provenance
from kvcache.radix_tree import RadixTree
from kvcache.reuse_scope import ReuseScope
from kvcache.sequence_cache import SequenceCache
from kvcache.sequence_pages import own_everything, stay
from kvcache.stats import CacheStats, collect_stats
from kvcache.storage.page_storage import PageStorage
from kvcache.tier_setup import set_up_tiers
from kvcache.token_ids import check_conversation_id, check_signs, checked_tokens
from kvcache.totals import CacheTotals, collect_totals

__all__ = ["KvCacheManager"]

_NO_SCOPE = ReuseScope()
_NO_SCOPE_DIGEST = _NO_SCOPE.digest()


class KvCacheManager:
    """See the module. `storage` must have been made for `layout`; the pools have the storage's sizes."""

    def __init__(
        self,
        layout: KvLayout,
        config: KvCacheConfig,
        storage: PageStorage,
        *,
        clock: Callable[[], float] = time.monotonic,
        worker_id: str = "",
    ) -> None:
        if storage.layout != layout:
            raise InvalidSizeError("the storage was made for another layout than the manager's")
        if config.tokens_per_block != layout.tokens_per_block:
            raise InvalidSizeError(
                f"tokens_per_block is {config.tokens_per_block} in the configuration and {layout.tokens_per_block} in "
                "the layout: make them equal"
            )
        self.layout = layout
        self.config = config
        self.storage = storage
        self.policy = config.block_reuse_config.policy
        self.pools = [BlockPool(storage.num_pages(g), storage.generations(g)) for g in range(len(layout.groups))]
        order: EvictionOrder = LruOrder()
        if config.eviction_policy is EvictionPolicyName.TURN_AWARE:
            order = TurnAwareOrder(clock, self.pools[0].num_pages)
        self.tree = RadixTree(TreeShape.of(layout.tokens_per_block, layout.groups), self.pools, order)
        self.worker_id = worker_id
        self.events: EventLog | None = None
        if config.event_buffer_max_size:
            self.events = self.tree.events = EventLog(config.event_buffer_max_size)
            self.tree.keep_keys = True
            self.events.add(EventKind.CREATED, pages=tuple(pool.num_pages for pool in self.pools))
        self.tiers = set_up_tiers(config, self.tree, storage, clock)
        self.counters = CacheCounters()
        self._seen_totals: CacheTotals | None = None
        self.ledger: ConversationManager | None = None
        if config.enable_block_reuse and self.policy is ReusePolicy.PER_CONVERSATION:
            self.ledger = ConversationManager(
                config.block_reuse_config.max_num_turns,
                config.max_tracked_conversations,
                config.conversation_idle_timeout_s,
                clock,
            )
        self.no_rows: NDArray[np.int32] = np.zeros((len(self.tree.shape.attention), 0), dtype=np.int32)
        self._sequences: dict[int, SequenceCache] = {}
        self.cleared: set[SequenceCache] = set()  # open, and `clear` took blocks of theirs out of the tree
        self._guard = PoisonGuard()
        self.room = PageRoom(self.tree)
        self.pins = PeerPins(self.tree, self._guard, config.max_peer_pins)
        self._scopes: dict[ReuseScope, bytes] = {}

    # requests

    def probe_reuse(self, tokens: Tokens, scope: ReuseScope = _NO_SCOPE) -> int:
        """How many leading tokens `create` would reuse now (an estimate for blocks in lower tiers). No side effects."""
        self._guard.check()
        checked, digest = checked_tokens(tokens), self._digest(scope)
        match = self._match(checked, digest)
        found = 0 if match is None else match.num_tokens
        if self.tiers is not None and len(self.tiers) and len(checked) > 1 and self.tree.shape.plain:
            found = max(found, estimate_onboarded(self, self.tiers, checked[:-1], digest))
        return found

    def prefetch(self, tokens: Tokens, scope: ReuseScope = _NO_SCOPE, *, most: int | None = None) -> int:
        """Lift blocks of a queued prompt, `most` now, from disk into host memory. Returns how many. Reads files."""
        with self._guard:
            checked, digest = checked_tokens(tokens), self._digest(scope)
            if self.tiers is None or len(checked) < 2:
                return 0
            _, keys = tier_keys(self, self.tiers, checked[:-1], digest)
            return self.tiers.lift(keys, digest, most)

    def close(self) -> None:
        """Take no request any more, remove the files of the disk tier. Sequences must be closed. Idempotent."""
        self._guard.closed = True
        if self.tiers is not None:
            self.tiers.clear()

    def provenance(self, tokens: Tokens, scope: ReuseScope = _NO_SCOPE) -> list[BlockProvenance]:
        """Where the cached blocks of the longest reusable prefix of ``tokens[:-1]`` came from. No side effects."""
        self._guard.check()
        match = self._match(checked_tokens(tokens), self._digest(scope))
        return [] if match is None else block_provenance(match.node, match.offset, self.layout.tokens_per_block)

    def poll_events(self, most: int | None = None) -> list[KvEvent]:
        """The oldest buffered events (at most `most`), which leave the buffer. Empty when `event_buffer_max_size` is
        0. Raises InvalidSizeError.
        """
        if most is not None and most < 0:
            raise InvalidSizeError(f"poll_events takes 0 or more events, not {most}")
        return [] if self.events is None else self.events.poll(most)

    def create(
        self,
        request_id: str,
        tokens: Tokens,
        *,
        scope: ReuseScope = _NO_SCOPE,
        conversation_id: str | None = None,
    ) -> SequenceCache:
        """Open a request's cache and hold the pages of the longest reusable prefix of ``tokens[:-1]``.

        tokens   int32 (n,), n >= 1, kept without a copy: never change it. Allocates no page. Raises ClosedManagerError.
        """
        with self._guard:
            self._guard.check_open()
            checked, digest = checked_tokens(tokens), self._digest(scope)
            check_conversation_id(conversation_id)
            conversation = None
            if self.ledger is not None:
                self.ledger.expire_idle()
                if conversation_id:
                    conversation = self.ledger.prepare(conversation_id, request_id)
            if self.tiers is not None and len(self.tiers) and len(checked) > 1:
                onboard(self, self.tiers, checked[:-1], digest)
            match = self._match(checked, digest)
            try:
                check_signs(checked[0 if match is None else match.token_match :])
            except InvalidTokensError:
                if conversation is not None:
                    self.require_ledger().finish(conversation, request_id)
                raise
            sequence = SequenceCache(self, request_id, checked, digest, match, conversation, conversation_id)
            self._sequences[id(sequence)] = sequence
            if conversation is not None:
                self.require_ledger().bound()  # after the matched pages are held
            self.tree.order.request_began(sequence.owner)
            return sequence

    def end_conversation(self, conversation_id: str) -> bool:
        """Drop the conversation's retained turns and forget it. False for an unknown id."""
        with self._guard:
            check_conversation_id(conversation_id)
            return self.ledger is not None and self.ledger.end(conversation_id)

    def expire_idle(self) -> int:
        """End conversations idle for longer than the configured time-out. Returns how many. `create` does it too."""
        with self._guard:
            return 0 if self.ledger is None else self.ledger.expire_idle()

    def set_budget(self, num_pages: int, group: int = 0) -> int:
        """Use at most `num_pages` pages of a pool from now on (up to the storage's size), while serving. Cached blocks
        give way at once; pages of open sequences when they close. Returns the pages still above the budget.
        """
        with self._guard:
            pool = self.pools[self.check_group(group)]
            if not isinstance(num_pages, int | np.integer) or not 1 <= num_pages <= pool.num_pages:
                raise InvalidSizeError(f"a budget lies in 1 .. {pool.num_pages} pages of life cycle {group}")
            pool.reserved = pool.num_pages - num_pages
            excess = pool.lacking(0)
            if excess > 0:
                excess -= evict(self.tree, group, min(excess, evictable_pages(self.tree, group)))
            return max(0, excess)

    def clear(self) -> None:
        """Forget all cached blocks and conversations; open sequences and pins keep their pages."""
        with self._guard:
            if self.ledger is not None:
                self.ledger.clear()
            if self.tiers is not None:
                self.tiers.clear()
            places = [(sequence, own_everything(sequence)) for sequence in self._sequences.values()]
            evict_all(self.tree)
            for sequence, place in places:
                if place is not None:
                    self.cleared.add(sequence)
                    stay(sequence, *place)

    # checks and numbers

    @property
    def poison_reason(self) -> str | None:
        """Why the manager refuses to work, or None."""
        return self._guard.reason

    @poison_reason.setter
    def poison_reason(self, reason: str | None) -> None:
        self._guard.reason = reason

    def check_integrity(self) -> None:
        """Recount everything. Raises CorruptedCacheError, and poisons the manager, at the first broken invariant."""
        self._guard.check()
        fault = find_fault(self)
        if fault is not None:
            self.poison_reason = fault
            raise CorruptedCacheError(f"{fault}: restart the worker")

    def stats(self) -> CacheStats:
        """Numbers of the moment; works on a poisoned manager too."""
        return collect_stats(self, len(self._sequences), self.pins)

    def iteration_stats(self) -> CacheTotals:
        """What happened since the previous call (the first time: since the start). For one reader, at its own pace;
        works on a poisoned manager too.
        """
        now = collect_totals(self)
        before, self._seen_totals = self._seen_totals, now
        return now if before is None else now.since(before)

    # for the sequences and pins of this package

    def guard(self) -> PoisonGuard:
        """To be entered around every change: refuses on a poisoned manager; anything but a named error poisons it."""
        return self._guard

    def check_group(self, group: int) -> int:
        """Raises UnknownLifeCycleError for a group that the layout does not have."""
        if not isinstance(group, int) or not 0 <= group < len(self.pools):
            raise UnknownLifeCycleError(f"no life cycle {group!r}: the layout has 0 .. {len(self.pools) - 1}")
        return group

    def copy_page(self, source: int, target: int, group: int) -> None:
        """Copy a page's content within the device, and count it."""
        self.storage.copy_page(source, target, group)
        self.counters.copied_pages[group] += 1

    def require_ledger(self) -> ConversationManager:
        """The ledger of a manager whose policy has one."""
        if self.ledger is None:
            raise CorruptedCacheError("a sequence belongs to a conversation and the manager has no ledger")
        return self.ledger

    def forget(self, sequence: SequenceCache) -> None:
        """A sequence was closed."""
        del self._sequences[id(sequence)]
        self.cleared.discard(sequence)
        self.tree.order.request_closed(sequence.owner)
        if sequence.conversation is not None and self.ledger is not None:
            self.ledger.finish(sequence.conversation, sequence.request_id)

    def _digest(self, scope: ReuseScope) -> bytes:
        if scope is _NO_SCOPE:
            return _NO_SCOPE_DIGEST
        if not isinstance(scope, ReuseScope):
            raise InvalidArgumentError(f"a scope is a ReuseScope, not {scope!r}")
        digest = self._scopes.get(scope)
        if digest is None:
            if len(self._scopes) > 4096:
                self._scopes.clear()
            digest = self._scopes[scope] = scope.digest()
        return digest

    def _match(self, tokens: Tokens, scope: bytes) -> Match | None:
        if not self.config.enable_block_reuse or len(tokens) < 2:
            return None
        return self.tree.match(scope, tokens[:-1], self.config.enable_partial_reuse)
