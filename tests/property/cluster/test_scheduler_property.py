"""Whatever is batched, chunked, preempted, cancelled or reused: every finished answer is the one computed alone."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.engine import HashRunner
from cluster.request import EngineRequest, FinishReason, SamplingParams
from cluster.scheduler import Scheduler
from cluster.sequence import Sequence
from kvcache import BlockReuseConfig, BytesPageStorage, KvCacheConfig, KvCacheManager, ReusePolicy

BLOCK = 4


class Engine:
    """A scheduler over a hash model and a pool of `pages`."""

    def __init__(
        self, pages: int, policy: ReusePolicy, *, reuse: bool = True, disk: Path | None = None, **limits: object
    ) -> None:
        self.runner = HashRunner(BLOCK, max_position=256)
        tiers = {}
        if disk is not None:
            page = self.runner.layout.page_bytes(0)
            tiers = {"host_cache_size": 2 * page, "disk_cache_size": 100 * page, "disk_cache_path": str(disk)}
        config = KvCacheConfig(
            tokens_per_block=BLOCK,
            enable_block_reuse=reuse,
            block_reuse_config=BlockReuseConfig(policy=policy),
            **tiers,
        )
        self.storage = BytesPageStorage(self.runner.layout, (pages,))
        self.runner.bind(self.storage)
        self.manager = KvCacheManager(self.runner.layout, config, self.storage)
        self.scheduler = Scheduler(self.manager, **{"max_batch_size": 4, "max_num_tokens": 8, **limits})

    def sequence(self, name: str, prompt: np.ndarray, max_tokens: int, conversation: str | None = None) -> Sequence:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        request = EngineRequest(name, prompt, sampling, conversation)
        return Sequence(request, eos_token_ids=self.runner.eos_token_ids, max_position=256)

    def step(self) -> list[tuple[str, FinishReason]]:
        """One step; returns who finished."""
        step = self.scheduler.schedule()
        if step is not None:
            self.scheduler.apply(step, self.runner.execute(step.plan))
        ended = []
        for event in self.scheduler.drain_events():
            if event.finish_reason is not None:
                if event.sequence.cache is not None:
                    event.sequence.cache.end_turn()
                event.sequence.close_cache()
                ended.append((event.sequence.request_id, event.finish_reason))
        return ended


@lru_cache(maxsize=4096)
def alone(prompt: bytes, max_tokens: int) -> tuple[int, ...]:
    engine = Engine(80, ReusePolicy.ALL_REUSABLE, reuse=False, max_num_tokens=256)
    sequence = engine.sequence("alone", np.frombuffer(prompt, np.int32), max_tokens)
    engine.scheduler.add(sequence)
    while engine.scheduler.has_work:
        engine.step()
    engine.storage.close()
    return tuple(int(token) for token in sequence.token_ids(sequence.num_tokens - sequence.num_sampled))


prompts = st.tuples(st.integers(1, 40), st.integers(0, 3)).map(
    # prompts of one family share a prefix; families differ from their second half on
    lambda shape: np.concatenate([np.arange(shape[0] // 2), np.full(shape[0] - shape[0] // 2, 100 + shape[1])]).astype(
        np.int32
    )
)


@settings(max_examples=60, deadline=None)
@given(
    jobs=st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(0, 12)), min_size=1, max_size=8),
    cancelled=st.sets(st.integers(0, 7), max_size=3),
    pages=st.integers(14, 30),
    budget=st.integers(1, 24),
    batch=st.integers(1, 4),
    policy=st.sampled_from(list(ReusePolicy)),
    suspended=st.sampled_from([0, 2000, 10**9]),
)
def test_answers_do_not_depend_on_the_company_they_were_computed_in(
    jobs, cancelled, pages, budget, batch, policy, suspended
):
    engine = Engine(pages, policy, max_num_tokens=budget, max_batch_size=batch, max_suspended_bytes=suspended)
    pending = [
        (arrival, engine.sequence(f"s{i}", prompt, max_tokens, f"c{i % 3}"))
        for i, (prompt, max_tokens, arrival) in enumerate(jobs)
    ]
    everything = [sequence for _, sequence in pending]
    ended: dict[str, FinishReason] = {}
    for step in range(3000):
        for arrival, sequence in list(pending):
            if arrival <= step:
                engine.scheduler.add(sequence)
                pending.remove((arrival, sequence))
        if step == 6:
            for sequence in engine.scheduler.sequences():
                if int(sequence.request_id[1:]) in cancelled:
                    sequence.stop_requested = FinishReason.CANCELLED
        ended.update(engine.step())
        engine.manager.check_integrity()
        if not pending and not engine.scheduler.has_work:
            break
    assert set(ended) == {sequence.request_id for sequence in everything}
    for sequence, (prompt, max_tokens, _) in zip(everything, jobs, strict=True):
        answer = tuple(int(t) for t in sequence.token_ids(sequence.num_tokens - sequence.num_sampled))
        expected = alone(prompt.tobytes(), max_tokens)
        if ended[sequence.request_id] is FinishReason.LENGTH:
            assert answer == expected
        else:
            assert ended[sequence.request_id] is FinishReason.CANCELLED
            assert answer == expected[: len(answer)]
    assert engine.manager.stats().open_sequences == 0
    engine.storage.close()


def test_a_sequence_that_outgrows_the_whole_pool_ends_with_an_error_and_the_rest_go_on():
    engine = Engine(8, ReusePolicy.ALL_REUSABLE)
    big = engine.sequence("big", np.zeros(20, np.int32), 100)
    small = engine.sequence("small", np.ones(6, np.int32), 5)
    engine.scheduler.add(big)
    engine.scheduler.add(small)
    ended: dict[str, FinishReason] = {}
    for _ in range(500):
        ended.update(engine.step())
    assert ended == {"big": FinishReason.ERROR, "small": FinishReason.LENGTH}
    engine.manager.check_integrity()
    assert engine.manager.stats().open_sequences == 0
    engine.storage.close()


@pytest.mark.parametrize(("host_bytes", "again"), [(10**9, False), (0, True)])
def test_a_preempted_sequence_that_is_suspended_is_not_computed_again(host_bytes: int, again: bool):
    engine = Engine(16, ReusePolicy.PER_REQUEST, max_num_tokens=32, max_suspended_bytes=host_bytes)
    for name in ("first", "second"):
        prompt = np.full(20, len(name), np.int32)
        engine.scheduler.add(engine.sequence(name, prompt, 20))
    ended: dict[str, FinishReason] = {}
    while engine.scheduler.has_work:
        ended.update(engine.step())
        engine.manager.check_integrity()
    assert ended == {"first": FinishReason.LENGTH, "second": FinishReason.LENGTH}
    stats = engine.scheduler.stats
    assert stats.preemptions > 0
    assert (stats.suspensions > 0) is not again
    assert (stats.computed_tokens > 2 * (20 + 19)) is again
    engine.storage.close()


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.CANCELLED])
def test_a_suspended_sequence_can_be_stopped_and_cancelled(reason: FinishReason):
    engine = Engine(16, ReusePolicy.PER_REQUEST, max_num_tokens=32, max_suspended_bytes=10**9)
    first, second = (engine.sequence(name, np.full(20, len(name), np.int32), 20) for name in ("first", "second"))
    engine.scheduler.add(first)
    engine.scheduler.add(second)
    ended: dict[str, FinishReason] = {}
    while not (second.cache is not None and second.cache.suspended):
        ended.update(engine.step())
    second.stop_requested = reason
    while engine.scheduler.has_work:
        ended.update(engine.step())
        engine.manager.check_integrity()
    assert ended == {"first": FinishReason.LENGTH, "second": reason}
    assert engine.manager.stats().open_sequences == 0
    engine.storage.close()


def test_a_waiting_prompt_is_lifted_from_disk_before_its_turn(tmp_path: Path):
    engine = Engine(16, ReusePolicy.ALL_REUSABLE, max_batch_size=1, disk=tmp_path)
    prompt = np.arange(24, dtype=np.int32)
    for round_ in range(3):  # the first prompt is pushed out of the pool, through host memory, to disk
        engine.scheduler.add(engine.sequence(f"{round_}", prompt + 60 * round_, 3))
        while engine.scheduler.has_work:
            engine.step()
    tiers = engine.manager.tiers
    assert tiers is not None
    busy, queued = engine.sequence("busy", (prompt + 7) % 90 + 100, 8), engine.sequence("queued", prompt, 2)
    engine.scheduler.add(busy)
    engine.scheduler.add(queued)
    while queued.cache is None:
        engine.step()
        if queued.prefetched_blocks:
            break
    assert queued.prefetched_blocks
    while engine.scheduler.has_work:
        engine.step()
    assert (queued.num_reused_tokens or 0) > 0
    engine.manager.close()
    engine.storage.close()


def test_what_is_suspended_is_given_up_only_when_nothing_else_makes_room():
    """Four prompts of 5 pages stay locked, so that 12 pages are left for 4 answers of 5: nobody needs to be dropped."""
    engine = Engine(32, ReusePolicy.PER_REQUEST, max_num_tokens=32, max_suspended_bytes=10**9)
    for index in range(4):
        engine.scheduler.add(engine.sequence(f"s{index}", np.full(20, index + 1, np.int32), 20))
    given_up = 0
    while engine.scheduler.has_work:
        before = {s.request_id for s in engine.scheduler.sequences() if s.cache is not None and s.cache.suspended}
        engine.step()
        engine.manager.check_integrity()
        given_up += sum(s.request_id in before and s.cache is None for s in engine.scheduler.sequences())
    assert engine.scheduler.stats.suspensions > 1
    assert given_up == 0
    assert engine.scheduler.stats.computed_tokens == 4 * (20 + 19)
    engine.storage.close()
