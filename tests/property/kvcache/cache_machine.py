"""The rules of the state machine: everything that a worker and its peers do with a cache manager.

Where nothing was evicted the reused length of a full-attention manager must equal the model's, and every retained turn
must be found at its very end. Everything that a caller can get wrong is tried too: a named error, nothing changed.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from kvcache import BlockOrigin, ClosedSequenceError, NeverFitsError, OutOfPagesError, SequenceCache
from kvcache.tiers import TierBlock
from tests.property.kvcache.cache_model import SCOPES, Open
from tests.property.kvcache.checked_manager import MOST_PINS, CheckedManager
from tests.property.kvcache.wrong_calls import wrong_calls

CONVERSATIONS = (None, "a", "b", "c")


class CacheMachine(CheckedManager):
    """See the module."""

    # requests

    @precondition(lambda self: len(self.open) < 4)
    @rule(
        data=st.data(),
        scope=st.sampled_from([0, 0, 0, 1, 2]),
        conversation=st.sampled_from(CONVERSATIONS),
        keep=st.integers(0, 40),
        extra=st.lists(st.integers(0, 2), min_size=1, max_size=11),
    )
    def create(self, data: st.DataObject, scope: int, conversation: str | None, keep: int, extra: list[int]) -> None:
        """A first turn, a next one, a rewind or a branch, alone or beside another turn of its conversation."""
        base: list[int] = []
        if self.published.known and keep:
            scope, base = self.published.known[data.draw(st.integers(0, len(self.published.known) - 1))]
        tokens = [*base[:keep], *extra][:48]
        array = np.array(tokens, dtype=np.int32)
        self.manager.expire_idle()  # `create` does so first
        tracked = self.tracked()
        probed = self.manager.probe_reuse(array, SCOPES[scope])
        came = self.manager.provenance(array, SCOPES[scope])
        cache = self.manager.create(f"r{self.serial}", array, scope=SCOPES[scope], conversation_id=conversation)
        self.serial += 1
        reused = cache.num_reused_tokens
        if self.manager.tiers is None and tracked <= self.tracked():  # no conversation was ended to make room
            assert reused == probed
            assert (came[-1].last if came else 0) == -(-reused // self.block)
            assert [one.first for one in came] == [0, *(one.last for one in came[:-1])][: len(came)]
        best = self.published.longest(scope, tokens)
        assert reused <= best
        if self.exact:
            assert reused == best
        assert self.partial or reused % self.block == 0
        assert self.model.find_wrong(cache, copied=False) is None
        self.open.append(Open(cache, tokens, len(tokens), scope, conversation, cache.conversation is not None))

    @precondition(lambda self: self.running())
    @rule(
        data=st.data(),
        count=st.integers(1, 9),
        more=st.integers(0, 6),
        answer=st.lists(st.integers(0, 2), max_size=3),
        obey=st.booleans(),
    )
    def step(self, data: st.DataObject, count: int, more: int, answer: list[int], obey: bool) -> None:
        """A chunk of a prompt, or tokens of an answer."""
        one = data.draw(st.sampled_from(self.running()))
        cache = one.cache
        if not self.grow(cache, cache.num_computed_tokens + count + more):
            return
        done = cache.num_computed_tokens
        if done < one.prompt:
            end = min(one.prompt, done + count)
            tokens = one.tokens[done : cache.chunk_end(end) if obey else end]
        else:
            tokens = answer[:count]
            one.tokens = one.tokens[:done] + tokens
        self.computed(one, tokens)

    @precondition(
        lambda self: (
            not (self.exact and self.windows)  # the window's earlier blocks do not come
            and any(one.cache.num_computed_tokens < one.prompt for one in self.running())
        )
    )
    @rule(data=st.data(), answer=st.lists(st.integers(0, 2), max_size=1))
    def receive(self, data: st.DataObject, answer: list[int]) -> None:
        """A peer's blocks arrive: windows need only the live range at the prompt's end."""
        one = data.draw(st.sampled_from([o for o in self.running() if o.cache.num_computed_tokens < o.prompt]))
        if self.grow(one.cache, one.prompt, history=one.prompt):
            self.computed(one, one.tokens[one.cache.num_computed_tokens : one.prompt], BlockOrigin.CTX_TO_GEN)

    def grow(self, cache: SequenceCache, size: int, history: int | None = None) -> bool:
        """Pages for `size` tokens: exactly what lacks is evicted, superseded blocks first."""
        done, pool = cache.num_computed_tokens, self.manager.pools[0]
        need = -(-size // self.block) - cache.blocks
        lack, before = max(0, pool.lacking(max(0, need))), self.manager.tree.evictions.by_reason()
        try:
            cache.resize(size, history=history)
        except (OutOfPagesError, NeverFitsError):
            assert cache.num_computed_tokens <= done
            return False
        after = self.manager.tree.evictions.by_reason()
        gone = {reason: after[reason] - before[reason] for reason in after}
        if cache.num_computed_tokens == done and self.manager.tree.shape.plain:
            assert gone["capacity"] + gone["superseded"] == lack
        if gone["capacity"] and self.manager.tree.shape.plain:
            leaves = [n for n in self.manager.tree.nodes() if n.superseded and not n.children]
            assert all(n.locks for n in leaves), "a block was evicted before a superseded one"
        return True

    def computed(self, one: Open, tokens: list[int], origin: BlockOrigin = BlockOrigin.COMPUTED) -> None:
        cache, array = one.cache, np.array(tokens, dtype=np.int32)
        self.model.compute(cache, array)
        ends = cache.num_computed_tokens + len(tokens) >= one.prompt
        committed = cache.num_committed_tokens
        cache.append_computed(array, end_of_prompt=ends and not cache.prompt_ended, origin=origin)
        assert cache.num_committed_tokens >= committed
        self.published.remember(one)

    @precondition(lambda self: any(one.can_end for one in self.open))
    @rule(data=st.data(), reason=st.sampled_from(["stop", "tool_use", None]))
    def end_turn(self, data: st.DataObject, reason: str | None) -> None:
        one = data.draw(st.sampled_from([one for one in self.open if one.can_end]))
        one.cache.end_turn(stop_reason=reason, output_tokens=len(one.tokens))
        one.ended = True
        self.published.remember(one)
        assert one.cache.num_committed_tokens == (one.cache.num_computed_tokens if self.reuse else 0)
        if one.accepted and one.cache.conversation is not None and not one.cache.conversation.ended:
            self.published.turn_completed(one)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        """After the turn, or a cancel at any time."""
        one = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        one.cache.close()
        one.cache.close()
        with pytest.raises(ClosedSequenceError):
            one.cache.resize(1)

    @precondition(lambda self: self.awake())
    @rule(data=st.data())
    def suspend(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.awake())).cache.suspend()

    @precondition(lambda self: len(self.awake()) < len(self.open))
    @rule(data=st.data())
    def resume(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([one.cache for one in self.open if one.cache.suspended is not None])).resume()

    @precondition(lambda self: self.eviction_possible)
    @rule(data=st.data())
    def shrink(self, data: st.DataObject) -> None:
        able = [o for o in self.awake() if o.cache.blocks * self.block >= o.cache.num_computed_tokens]
        if able:
            cache = data.draw(st.sampled_from(able)).cache
            if cache.num_computed_tokens:
                cache.resize(cache.num_computed_tokens)

    # peers, tiers, operations

    @precondition(lambda self: len(self.pins) < MOST_PINS and self.awake())
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        self.pins.append(data.draw(st.sampled_from(self.awake())).cache.pin_for_peer())

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pin = self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1)))
        pin.release()
        pin.release()

    @precondition(lambda self: self.manager.tiers is not None and self.published.known)
    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        scope, tokens = data.draw(st.sampled_from(self.published.known))
        self.manager.prefetch(np.array([*tokens, 1], dtype=np.int32), SCOPES[scope])

    @precondition(lambda self: self.manager.tiers is not None and len(self.manager.tiers.host))
    @rule(really=st.integers(0, 3))
    def damage_host(self, really: int) -> None:
        """A bit flips in host memory: the block must never be used."""
        assert self.manager.tiers is not None
        host = self.manager.tiers.host
        if really == 0:
            block = host.take(next(iter(host._priority)))
            assert block is not None
            parts = tuple((*part[:3], bytes([part[3][0] ^ 1]) + part[3][1:]) for part in block.parts)
            host.put(TierBlock(block.key, block.scope, block.priority, parts, block.digest))

    @precondition(lambda self: self.disk_bytes)
    @rule(works=st.booleans())
    def disk_state(self, works: bool) -> None:
        """The disk is full or read-only, or works again."""
        assert self.manager.tiers is not None and self.manager.tiers.disk is not None
        disk = self.manager.tiers.disk

        def full(target: object, data: bytes) -> None:
            raise OSError(28, "No space left on device")

        if works:
            disk.__dict__.pop("_write", None)
        else:
            disk.__dict__["_write"] = full

    @precondition(lambda self: self.eviction_possible)
    @rule(data=st.data())
    def budget(self, data: st.DataObject) -> None:
        group = data.draw(st.integers(0, len(self.manager.pools) - 1))
        pages = data.draw(st.sampled_from([self.pages, self.pages, self.pages * 3 // 4]))
        self.manager.set_budget(pages, group)

    @rule(conversation=st.sampled_from(["a", "b", "c"]))
    def end_conversation(self, conversation: str) -> None:
        self.manager.end_conversation(conversation)
        self.published.turns.pop(conversation, None)

    @rule(seconds=st.sampled_from([1.0, 1.0, 1.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.manager.expire_idle()

    @rule(really=st.integers(0, 9))
    def clear(self, really: int) -> None:
        unused = not self.open and not self.pins
        if really == 0 and (self.eviction_possible or unused):
            self.manager.clear()
            self.published.forget(everything=unused)
            assert not unused or not any(pool.tree_pages for pool in self.manager.pools)

    @rule(which=st.integers(0, 30), data=st.data())
    def misuse(self, which: int, data: st.DataObject) -> None:
        """Whatever a caller gets wrong is a named error and changes nothing."""
        calls = wrong_calls(self, data.draw(st.sampled_from(self.open)) if self.open else None)
        error, call = calls[which % len(calls)]
        before = self.picture()
        with pytest.raises(error):
            call()
        assert self.picture() == before
