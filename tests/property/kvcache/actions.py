"""Everything that a worker, its peers and its operator do with a cache manager, one method a step.

Where nothing was evicted the reused length of a full-attention manager must equal the model's. Whoever lacks pages is
cancelled or tries again later, as a scheduler does.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import BlockOrigin, ClosedSequenceError, NeverFitsError, OutOfPagesError, SequenceCache
from kvcache.block_keys import chain_keys
from kvcache.tiers import TierBlock
from tests.property.kvcache.cache_model import SCOPES, Open
from tests.property.kvcache.checked_manager import MOST_PINS, CheckedManager
from tests.property.kvcache.choices import Choices
from tests.property.kvcache.wrong_calls import wrong_calls

__all__ = ["Actions"]

CONVERSATIONS = (None, "a", "b", "c")
MOST_OPEN = 4
LONGEST = 48


class Actions(CheckedManager):
    """`can_X` says whether step X makes sense now."""

    # requests

    def can_create(self) -> bool:
        return len(self.open) < MOST_OPEN

    def create(self, choose: Choices) -> Open:
        """A first turn, a next one, a rewind or a branch, alone or beside another turn of its conversation."""
        scope, base = choose.pick([0, 0, 0, 1, 2]), []
        if self.published.known and choose.number(0, 3):
            scope, base = choose.pick(self.published.known[-60:])
        keep = choose.number(0, len(base))
        return self.begin(scope, choose.pick(CONVERSATIONS), [*base[:keep], *choose.tokens(1, 11)])

    def begin(self, scope: int, conversation: str | None, tokens: list[int]) -> Open:
        tokens = tokens[:LONGEST]
        array = np.array(tokens, dtype=np.int32)
        self.manager.expire_idle()  # `create` does so first
        tracked = self.tracked()
        self.published.keep_turns_of(tracked)
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
        return self.open[-1]

    def turn(self, choose: Choices) -> None:
        """A whole turn, prompt in chunks, answer and end, or a cancel for want of pages."""
        self.finish(choose, self.create(choose))

    can_turn = can_create

    def can_next_turn(self) -> bool:
        return self.can_create() and bool(self.last)

    def next_turn(self, choose: Choices) -> None:
        """A conversation goes on where its last turn ended."""
        conversation = choose.pick(sorted(self.last))
        scope, tokens = self.last[conversation]
        self.finish(choose, self.begin(scope, conversation, [*tokens, *choose.tokens(1, 6)]))

    def finish(self, choose: Choices, one: Open) -> None:
        answer = choose.number(0, 7)
        while one.cache.num_computed_tokens < one.prompt:
            if not self.chunk(choose, one, choose.number(4, 20), 0):
                self.drop(one)
                return
        if answer:
            self.chunk(choose, one, answer, 0)
        self.end(choose, one)
        self.drop(one)

    def can_step(self) -> bool:
        return bool(self.running())

    def step(self, choose: Choices) -> None:
        """A chunk of a prompt, or tokens of an answer."""
        self.chunk(choose, choose.pick(self.running()), choose.number(1, 9), choose.number(0, 6))

    def chunk(self, choose: Choices, one: Open, count: int, more: int) -> bool:
        cache = one.cache
        if not self.grow(cache, cache.num_computed_tokens + count + more):
            return False
        done = cache.num_computed_tokens
        if done < one.prompt:
            end = min(one.prompt, done + count)
            tokens = one.tokens[done : cache.chunk_end(end) if choose.number(0, 4) else end]
        else:
            tokens = choose.tokens(0, count)
            one.tokens = one.tokens[:done] + tokens
        self.computed(one, tokens)
        return True

    def waiting_for_a_transfer(self) -> list[Open]:
        if self.exact and self.windows:
            return []  # the window's earlier blocks do not come
        return [one for one in self.running() if one.cache.num_computed_tokens < one.prompt]

    def can_receive(self) -> bool:
        return bool(self.waiting_for_a_transfer())

    def receive(self, choose: Choices) -> None:
        """A peer's blocks arrive: windows need only the live range at the prompt's end."""
        one = choose.pick(self.waiting_for_a_transfer())
        if self.grow(one.cache, one.prompt, history=one.prompt):
            self.computed(one, one.tokens[one.cache.num_computed_tokens : one.prompt], BlockOrigin.CTX_TO_GEN)

    def grow(self, cache: SequenceCache, size: int, history: int | None = None) -> bool:
        """Pages for `size` tokens: exactly what lacks is evicted, superseded blocks first."""
        tree, plain = self.manager.tree, self.manager.tree.shape.plain
        done, need = cache.num_computed_tokens, max(0, -(-size // self.block) - cache.blocks)
        lack = max(0, *(pool.lacking(need) for pool in self.manager.pools)) if need else 0  # above a new budget
        before = tree.evictions.by_reason()
        first = [n for n in tree.nodes() if n.superseded and not n.children and not n.locks]
        try:
            cache.resize(size, history=history)
        except (OutOfPagesError, NeverFitsError):
            assert cache.num_computed_tokens <= done
            return False
        gone = {reason: count - before[reason] for reason, count in tree.evictions.by_reason().items()}
        if plain and cache.num_computed_tokens == done:
            assert gone["capacity"] + gone["superseded"] == lack
        if plain and gone["capacity"]:
            assert not any(node.alive for node in first), "a block was evicted before a superseded one"
        return True

    def computed(self, one: Open, tokens: list[int], origin: BlockOrigin = BlockOrigin.COMPUTED) -> None:
        cache, array = one.cache, np.array(tokens, dtype=np.int32)
        self.model.compute(cache, array)
        ends = cache.num_computed_tokens + len(tokens) >= one.prompt
        committed = cache.num_committed_tokens
        cache.append_computed(array, end_of_prompt=ends and not cache.prompt_ended, origin=origin)
        assert cache.num_committed_tokens >= committed
        self.published.remember(one)

    def can_end_turn(self) -> bool:
        return any(one.can_end for one in self.open)

    def end_turn(self, choose: Choices) -> None:
        self.end(choose, choose.pick([one for one in self.open if one.can_end]))

    def end(self, choose: Choices, one: Open) -> None:
        reason = choose.pick(["stop", "tool_use", None])
        one.cache.end_turn(stop_reason=reason, output_tokens=len(one.tokens))
        one.ended = True
        self.published.remember(one)
        assert one.cache.num_committed_tokens == (one.cache.num_computed_tokens if self.reuse else 0)
        if one.conversation is not None and one.accepted:
            self.last[one.conversation] = (one.scope, one.tokens[: one.cache.num_computed_tokens])
            if one.cache.conversation is not None and not one.cache.conversation.ended:
                self.published.turn_completed(one)

    def can_close(self) -> bool:
        return bool(self.open)

    def close(self, choose: Choices) -> None:
        """After the turn, or a cancel at any time."""
        self.drop(choose.pick(self.open))

    def drop(self, one: Open) -> None:
        self.open.remove(one)
        one.cache.close()
        one.cache.close()
        with pytest.raises(ClosedSequenceError):
            one.cache.resize(1)

    # suspension, peers, tiers

    def can_move(self) -> bool:
        return bool(self.open)

    def move(self, choose: Choices) -> None:
        """Suspend, resume or shrink a request."""
        one = choose.pick(self.open)
        cache, done = one.cache, one.cache.num_computed_tokens
        if cache.suspended is not None:
            cache.resume()
        elif choose.number(0, 1):
            cache.suspend()
        elif self.eviction_possible and done and cache.blocks * self.block >= done:
            cache.resize(done)

    def can_peer(self) -> bool:
        return bool(self.pins or self.awake())

    def peer(self, choose: Choices) -> None:
        """A peer begins or ends reading."""
        if self.awake() and len(self.pins) < MOST_PINS and (not self.pins or choose.number(0, 2)):
            self.pins.append(choose.pick(self.awake()).cache.pin_for_peer())
        elif self.pins:
            pin = choose.pick(self.pins)
            self.pins.remove(pin)
            pin.release()
            pin.release()

    def can_tier(self) -> bool:
        return self.manager.tiers is not None and bool(self.published.known)

    def tier(self, choose: Choices) -> None:
        """Prefetch; a bit flips in host memory or in a file; the disk is full, or works again."""
        tiers = self.manager.tiers
        assert tiers is not None
        what, disk = choose.number(0, 5), tiers.disk
        if what == 0 and len(tiers.host):
            block = tiers.host.take(choose.pick(list(tiers.host._priority)))
            assert block is not None
            parts = tuple((*part[:3], bytes([part[3][0] ^ 1]) + part[3][1:]) for part in block.parts)
            tiers.host.put(TierBlock(block.key, block.scope, block.priority, parts, block.digest))
        elif what == 1 and disk is not None and len(disk):
            key = choose.pick(list(disk._sizes))
            path = disk.path(key, disk._sizes[key][1])
            raw = path.read_bytes()
            path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        elif what == 2 and disk is not None:
            disk.__dict__["_write"] = _full
        elif what == 3 and disk is not None:
            disk.__dict__.pop("_write", None)
        else:
            scope, tokens = choose.pick(self.below() or self.published.known[-20:])
            self.manager.prefetch(np.array([*tokens, 1], dtype=np.int32), SCOPES[scope])

    def below(self) -> list[tuple[int, list[int]]]:
        """Prompts of which the disk has a block."""
        tiers, known = self.manager.tiers, self.published.known[-60:]
        if tiers is None or tiers.disk is None or not len(tiers.disk):
            return []
        there = set(tiers.disk._sizes)
        keys = [chain_keys(SCOPES[s].digest(), np.array(tokens, dtype=np.int32), self.block) for s, tokens in known]
        return [one for one, blocks in zip(known, keys, strict=True) if there & set(blocks)]

    # operations and mistakes

    def can_operate(self) -> bool:
        return True

    def operate(self, choose: Choices) -> None:
        """Time passes, conversations end, budgets change, everything is cleared."""
        what = choose.number(0, 19)
        if what < 6:
            self.now += choose.pick([1.0, 1.0, 1.0, 60.0])
            self.manager.expire_idle()
        elif what < 10:
            conversation = choose.pick(["a", "b", "c"])
            self.manager.end_conversation(conversation)
            self.published.turns.pop(conversation, None)
        elif what < 19 and self.eviction_possible:
            group = choose.number(0, len(self.manager.pools) - 1)
            total = self.storage.num_pages(group)
            self.manager.set_budget(choose.pick([total, total, total, max(1, total * 3 // 4)]), group)
        elif what == 19 and (self.eviction_possible or not (self.open or self.pins)):
            unused = not self.open and not self.pins
            self.manager.clear()
            self.published.forget(everything=unused)
            assert not unused or not any(pool.tree_pages for pool in self.manager.pools)

    can_misuse = can_operate

    def misuse(self, choose: Choices) -> None:
        """Whatever a caller gets wrong is a named error and changes nothing."""
        self.manager.expire_idle()  # every `create` does so, a refused one too
        error, call = choose.pick(wrong_calls(self, choose.pick(self.open) if self.open else None))
        before = self.picture()
        with pytest.raises(error):
            call()
        assert self.picture() == before


def _full(target: object, data: bytes) -> None:
    raise OSError(28, "No space left on device")
