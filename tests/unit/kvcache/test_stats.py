"""Numbers that the manager publishes: by life cycle and tier, as totals and as what an iteration added.

The numbers of the rows A11, A12, A20, A23 and A24 are those of the reference system's tests.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import kvcache
from kvcache import (
    BlockOrigin,
    CacheStats,
    CacheTotals,
    LifeCycleTotals,
    PoolStats,
    ReuseScope,
    Tier,
    TierStats,
    TierTotals,
)
from kvcache.stats import sum_pools

PAGE = 16  # bytes of a page of the pattern layout with blocks of 4 tokens


def found(totals: CacheTotals, group: int = 0) -> tuple[int, int, int]:
    one = totals.life_cycles[group]
    return one.reused_full, one.reused_partial, one.missed


def test_full_and_partial_reuse(bench):
    """A11"""
    b = bench(policy="per_request")
    b.turn(range(12))
    b.manager.iteration_stats()
    b.turn(range(10))
    delta = b.manager.iteration_stats()
    assert (delta.reused_full_blocks, delta.reused_partial_blocks, delta.missed_blocks) == (2, 1, 0)
    (cycle,) = delta.life_cycles
    assert (cycle.reused_full + cycle.reused_partial, cycle.allocated, cycle.copied, cycle.missed) == (3, 1, 1, 0)
    assert cycle.copied_bytes == PAGE
    assert (delta.requests, delta.prompt_tokens, delta.reused_tokens, delta.hit_rate) == (1, 10, 9, 1.0)


def test_stale_blocks_of_a_window_are_not_counted(bench):
    """A12"""
    b = bench(windows=(8,), policy="per_request")
    b.turn(range(16))
    b.manager.iteration_stats()
    assert b.turn(range(16)) == 15
    delta = b.manager.iteration_stats()
    assert found(delta, 1) == (1, 1, 0)
    assert found(delta, 0) == (3, 1, 0)


def test_prompt_then_answer(bench):
    """A20"""
    b = bench(policy="per_request")
    cache = b.start(range(8))
    b.compute(cache, range(8), end=True)
    delta = b.manager.iteration_stats()
    assert (delta.life_cycles[0].allocated, delta.missed_blocks, delta.answer_blocks) == (2, 2, 0)
    for token in range(4):  # one block, whatever the steps
        b.compute(cache, [50 + token])
    delta = b.manager.iteration_stats()
    assert (delta.life_cycles[0].allocated, delta.missed_blocks, delta.answer_blocks) == (1, 0, 1)
    assert delta.requests == 0
    cache.close()


def test_what_was_given_back_unused_is_not_reported(bench):
    """A20"""
    b = bench(policy="per_request")
    b.turn(range(8))
    before = b.manager.iteration_stats()
    assert before.requests == 1
    cache = b.start([*range(8), 50, 51, 52, 53, 54])
    cache.resize(13)
    cache.resize(9)
    cache.close()
    nothing = b.manager.iteration_stats()
    assert nothing == nothing.since(nothing)
    assert (nothing.requests, nothing.reused_tokens, nothing.hit_rate) == (0, 0, 0.0)
    assert all(getattr(nothing, name) == 0 for name in ("missed_blocks", "answer_blocks", "reused_full_blocks"))


def test_a_cancelled_prompt_counts_what_it_computed(bench):
    b = bench()
    cache = b.start(range(16), "c")
    b.compute(cache, range(5))
    cache.close()
    assert found(b.manager.stats()) == (0, 0, 2)


def test_a_match_that_is_given_up_for_want_of_pages_is_not_reported(bench):
    b = bench(pages=4, policy="per_request")
    b.turn(range(14))
    b.manager.iteration_stats()
    cache = b.start([*range(14), 90, 91])
    cache.resize(16)
    b.compute(cache, [12, 13, 90, 91], end=True)
    assert found(b.manager.iteration_stats()) == (3, 0, 1)
    cache.close()


def test_scopes_in_numbers(bench):
    """A21"""
    b = bench(policy="per_request")
    b.turn(range(12), scope=ReuseScope("7", "11"))
    b.manager.iteration_stats()
    others = [("7", "12"), ("8", "11"), ("7", None), (None, "11"), (None, None)]
    reused = [b.turn([*range(12), 99], scope=ReuseScope(*other)) for other in others]
    assert reused == [0, 0, 0, 0, 0]
    assert found(b.manager.iteration_stats()) == (0, 0, 20)


def test_two_life_cycles(bench):
    """A23"""
    b = bench(windows=(8,), policy="per_request")
    cache = b.start(range(8))
    b.compute(cache, range(8), end=True)
    cycles = b.manager.iteration_stats().life_cycles
    assert [(one.allocated, one.missed, one.kind) for one in cycles] == [
        (2, 2, "full_attention"),
        (2, 2, "sliding_window"),
    ]
    assert sum(one.allocated for one in cycles) == 4
    cache.close()


def pool(total: int, free: int, evictable: int) -> PoolStats:
    cached = total - free
    return PoolStats(0, "x", total, free, 0, cached, evictable, cached, 10)


def test_sums_over_pools():
    """A24"""
    both = sum_pools([pool(7, 2, 1), pool(11, 5, 3)])
    assert (both.total, both.free, both.evictable, both.used) == (18, 7, 4, 11)
    assert (both.group, both.kind, both.page_bytes) == (-1, "all", 10)
    assert sum_pools([]).page_bytes == 0


def test_pools_of_the_moment(bench):
    b = bench(pages=16, windows=(8,), policy="per_request")
    b.turn(range(16))
    cache = b.start([*range(16), 20])
    b.compute(cache, [20])
    stats = b.manager.stats()
    full, window = stats.pools
    assert (full.total, full.free, full.held, full.cached, full.evictable) == (16, 11, 1, 4, 0)
    assert (window.total, window.free, window.held, window.cached) == (16, 13, 1, 2)
    assert stats.all_pools.used == 5 + 3
    cache.close()
    after = b.manager.stats()
    assert [one.evictable for one in after.pools] == [4, 2]
    assert after.pools[0].peak_used == 5
    b.turn(range(100, 108))
    assert b.manager.stats().pools[0].peak_used == 6


def test_a_transfer_counts_the_windows_that_came(bench):
    b = bench(windows=(8,))
    cache = b.start(range(40))
    cache.resize(40, history=40)
    tokens = np.arange(40, dtype=np.int32)
    b.model.compute(cache, tokens)
    cache.append_computed(tokens, end_of_prompt=True, origin=BlockOrigin.CTX_TO_GEN, worker="ctx-0")
    totals = b.manager.stats()
    assert (found(totals, 0), found(totals, 1), totals.received_blocks) == ((0, 0, 10), (0, 0, 2), 10)
    b.compute(cache, [1])
    assert (b.manager.stats().received_blocks, b.manager.stats().answer_blocks) == (10, 1)
    cache.end_turn()
    cache.close()


def test_snapshots(bench):
    b = bench(recurrent=1, turns=2)
    b.turn(range(10), "c")
    b.turn(range(12), "c")  # from 10, inside a block
    b.turn(range(14), "c")  # from 12, at a block's end
    b.turn([*range(13), 99], "d")  # 13 tokens agree: state at 12 only
    totals = b.manager.stats()
    assert found(totals, 1) == (2, 1, 1)
    assert totals.life_cycles[1].allocated == 4
    assert totals.shortened_tokens == 1
    assert totals.life_cycles[1].copied >= 3  # each found state into a private page


def test_skipped_snapshots_are_counted(bench):
    b = bench(pages=64, recurrent=1, policy="per_request")
    b.manager.set_budget(1, group=1)
    cache = b.start(range(8))
    b.compute(cache, range(8), end=True)  # the only state page is the request's own: no copy at the prompt's end
    assert b.manager.stats().snapshots_skipped == 1
    cache.close()


def test_evictions_by_reason_and_life_cycle(bench):
    b = bench(pages=6, windows=(8,), turns=1)
    b.turn(range(12), "c")
    b.turn(range(100, 112), "c")  # the first turn's window is dropped, and with it its blocks are of no use
    first = b.manager.iteration_stats()
    assert first.evictions == {"capacity": 0, "superseded": 0, "pruned": 3, "window": 0, "dropped_turn": 2}
    assert first.life_cycles[0].evictions == {
        "capacity": 0,
        "superseded": 0,
        "pruned": 3,
        "window": 0,
        "dropped_turn": 0,
    }
    assert first.life_cycles[1].evictions["dropped_turn"] == 2
    b.turn(range(200, 220), "d")
    second = b.manager.iteration_stats()
    assert second.life_cycles[0].evictions["capacity"] == 2
    assert second.evictions["capacity"] == b.manager.stats().evicted_blocks == 2


def test_windows_and_states_for_want_of_room(bench):
    b = bench(pages=64, recurrent=1, policy="per_request")
    b.manager.set_budget(3, group=1)
    for k in range(4):
        b.turn(range(100 * k, 100 * k + 8))
    stats = b.manager.stats()
    assert stats.evictions["window"] == stats.life_cycles[1].evictions["window"] > 0
    assert stats.life_cycles[0].evictions["window"] == 0


def test_superseded_evictions(bench):
    b = bench(pages=8, turns=1)
    b.turn(range(16), "c")
    b.turn(range(100, 112), "c")
    b.turn(range(200, 216), "d")
    assert b.manager.stats().evictions["superseded"] == 3
    assert b.manager.stats().evicted_blocks == 3


def test_lower_tiers(bench, tmp_path):
    b = bench(
        pages=8,
        policy="per_request",
        host_cache_size=4 * PAGE,
        disk_cache_size=100 * PAGE,
        disk_cache_path=str(tmp_path),
    )
    prompts = [range(k * 100, k * 100 + 16) for k in range(5)]
    for prompt in prompts:
        b.turn(prompt)
    first = b.manager.iteration_stats()
    host, disk = first.tiers
    assert (host.tier, host.stored_blocks, host.stored_bytes) == (Tier.HOST, 12, 12 * PAGE)
    assert (disk.tier, disk.stored_blocks, disk.stored_bytes, disk.onboarded_blocks) == (Tier.DISK, 8, 8 * PAGE, 0)
    now = b.manager.stats()
    assert [(t.tier, t.capacity_bytes, t.used_bytes, t.blocks) for t in now.lower_tiers] == [
        (Tier.HOST, 4 * PAGE, 4 * PAGE, 4),
        (Tier.DISK, 100 * PAGE, 8 * PAGE, 8),
    ]
    b.manager.prefetch(np.array([*prompts[0][:4], 1, 1], dtype=np.int32))
    assert b.turn([*prompts[0], 7]) == 16
    host, disk = b.manager.iteration_stats().tiers
    assert disk.lifted_blocks == 1
    assert (host.onboarded_blocks, disk.onboarded_blocks) == (1, 3)
    assert (host.onboarded_bytes, disk.onboarded_bytes) == (PAGE, 3 * PAGE)
    stats = b.manager.stats()
    assert (stats.onboarded_blocks, stats.offloaded_blocks) == (4, host.stored_blocks + first.tiers[0].stored_blocks)
    b.manager.close()


def test_what_leaves_the_last_tier_is_counted(bench):
    b = bench(pages=4, policy="per_request", host_cache_size=4 * PAGE)
    for k in range(4):
        b.turn(range(k * 100, k * 100 + 16))
    (host,) = b.manager.stats().tiers
    assert (host.stored_blocks, host.dropped_blocks) == (12, 8)


def test_suspensions_are_counted(bench):
    b = bench(policy="per_request")
    cache = b.start(range(8))
    b.compute(cache, range(8))
    cache.suspend()
    assert (b.manager.stats().suspended, b.manager.stats().resumed) == (1, 0)
    assert cache.resume()
    assert (b.manager.stats().suspended, b.manager.stats().resumed) == (1, 1)
    cache.resume()
    assert b.manager.stats().resumed == 1
    cache.close()


def test_turns_and_pins(bench):
    b = bench(turns=2)
    b.turn(range(8), "c")
    b.turn(range(12), "c")
    b.turn(range(16), "c")
    b.turn(range(100, 104), "d")
    cache = b.start([*range(16), 50], "c")
    b.compute(cache, [50], end=True)
    pin = cache.pin_for_peer()
    stats = b.manager.stats()
    assert (stats.retained_turns, stats.tracked_conversations, stats.open_sequences) == (3, 2, 1)
    assert (stats.peer_pins, stats.pinned_pages) == (1, 5)
    cache.close()
    pin.release()
    assert (b.manager.stats().peer_pins, b.manager.stats().pinned_pages) == (0, 0)


@pytest.mark.parametrize("kind", [{}, {"windows": (8,)}, {"recurrent": 1}, {"host_cache_size": 400}])
def test_iterations_add_up_to_the_totals(bench, kind):
    b = bench(pages=12, turns=2, **kind)
    seen = []
    for k in range(12):
        b.turn([*range(k % 3 * 4), *range(k * 10, k * 10 + 14)], f"c{k % 4}", range(900, 905))
        seen.append(b.manager.iteration_stats())
    total = b.manager.stats()
    names = [field.name for field in fields(CacheTotals) if field.name not in ("evictions", "life_cycles", "tiers")]
    assert {name: sum(getattr(one, name) for one in seen) for name in names} == {
        name: getattr(total, name) for name in names
    }
    for reason, count in total.evictions.items():
        assert sum(one.evictions[reason] for one in seen) == count
    for group, cycle in enumerate(total.life_cycles):
        assert sum(one.life_cycles[group].missed for one in seen) == cycle.missed
    assert sum(t.stored_blocks for one in seen for t in one.tiers) == total.offloaded_blocks
    asked = sum(-(-(k % 3 * 4 + 14) // 4) for k in range(12))
    assert total.reused_full_blocks + total.reused_partial_blocks + total.missed_blocks == asked
    assert all(one.requests == 1 for one in seen)


def test_stats_of_a_poisoned_manager(bench):
    b = bench()
    b.turn(range(8))
    b.manager.poison_reason = "for the test"
    assert b.manager.stats().poison_reason == "for the test"
    assert b.manager.iteration_stats().requests == 1
    b.manager.poison_reason = None


def test_every_number_is_documented():
    page = (Path(__file__).resolve().parents[3] / "docs" / "kv-cache.md").read_text()
    kinds = (CacheTotals, CacheStats, LifeCycleTotals, PoolStats, TierStats, TierTotals)
    names = {field.name for kind in kinds for field in fields(kind)}
    assert sorted(name for name in names if f"`{name}`" not in page) == []


def test_the_page_runs():
    page = (Path(__file__).resolve().parents[3] / "docs" / "kv-cache.md").read_text()
    code = page.split("```python\n")[1].split("```")[0]
    names = dict(vars(kvcache), prompt=np.arange(40, dtype=np.int32))
    exec(code, names)
    assert names["manager"].stats().retained_turns == 1
    assert names["manager"].probe_reuse(np.arange(41, dtype=np.int32)) == 40
