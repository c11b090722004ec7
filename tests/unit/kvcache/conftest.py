"""A manager over pattern storage, and the steps that a worker takes with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache import BlockReuseConfig, BytesPageStorage, KvCacheConfig, KvCacheManager, ReusePolicy, ReuseScope
from kvcache.sequence_cache import SequenceCache
from kvcache.testing import PatternModel, pattern_layout

NO_SCOPE = ReuseScope()


class Bench:
    """One manager under test. Every step checks integrity and the pattern."""

    def __init__(
        self,
        *,
        block: int = 4,
        pages: int = 64,
        windows: Sequence[int] = (),
        recurrent: int = 0,
        full: bool = True,
        mla: bool = False,
        policy: str = "per_conversation",
        turns: int = 1,
        clock: Callable[[], float] = lambda: 0.0,
        **config: object,
    ) -> None:
        reuse = {"policy": ReusePolicy(policy)}
        if policy == "per_conversation":
            reuse["max_num_turns"] = turns  # type: ignore[assignment]
        reuse["enable_branch_snapshot"] = bool(config.pop("enable_branch_snapshot", False))  # type: ignore[assignment]
        self.layout = pattern_layout(block, windows=windows, recurrent=recurrent, full=full, mla=mla)
        self.storage = BytesPageStorage(self.layout, [pages] * len(self.layout.groups))
        settings = KvCacheConfig(tokens_per_block=block, block_reuse_config=BlockReuseConfig(**reuse), **config)  # type: ignore[arg-type]
        self.manager = KvCacheManager(self.layout, settings, self.storage, clock=clock)
        self.model = PatternModel(self.storage)
        self.serial = 0

    def start(
        self, tokens: Sequence[int], conversation: str | None = None, scope: ReuseScope = NO_SCOPE
    ) -> SequenceCache:
        self.serial += 1
        array = np.array(tokens, dtype=np.int32)
        cache = self.manager.create(f"r{self.serial}", array, scope=scope, conversation_id=conversation)
        self.check(cache, copied=False)
        return cache

    def compute(self, cache: SequenceCache, tokens: Sequence[int], end: bool = False) -> None:
        array = np.array(tokens, dtype=np.int32)
        cache.resize(cache.num_computed_tokens + len(array))
        self.model.compute(cache, array)
        cache.append_computed(array, end_of_prompt=end)
        self.check(cache)

    def turn(
        self,
        tokens: Sequence[int],
        conversation: str | None = None,
        answer: Sequence[int] = (),
        scope: ReuseScope = NO_SCOPE,
    ) -> int:
        """Prompt, answer (without its last token, which has no KV), end of turn. Returns the reused tokens."""
        cache = self.start(tokens, conversation, scope)
        reused = cache.num_reused_tokens
        while cache.num_computed_tokens < len(tokens):
            end = cache.chunk_end(len(tokens))
            self.compute(cache, tokens[cache.num_computed_tokens : end], end=end == len(tokens))
        if len(answer) > 1:
            self.compute(cache, answer[:-1])
        cache.end_turn()
        cache.close()
        self.manager.check_integrity()
        return reused

    def probe(self, tokens: Sequence[int], scope: ReuseScope = NO_SCOPE) -> int:
        return self.manager.probe_reuse(np.array(tokens, dtype=np.int32), scope)

    def check(self, cache: SequenceCache, copied: bool = True) -> None:
        self.manager.check_integrity()
        assert self.model.find_wrong(cache, copied=copied) is None

    def cached(self, group: int = 0) -> int:
        return self.manager.stats().pools[group].cached


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(**options: object) -> Bench:
        made.append(Bench(**options))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.manager.check_integrity()
        stats = one.manager.stats()
        if stats.open_sequences == 0 and stats.peer_pins == 0:
            assert all(pool.held == 0 for pool in stats.pools), "pages leaked"
        one.storage.close()


def ids(start: int, count: int) -> NDArray[np.int32]:
    return np.arange(start, start + count, dtype=np.int32)
