"""Events with chained keys, and where blocks came from."""

from __future__ import annotations

import hashlib

import numpy as np

from kvcache import ReuseScope
from kvcache.events import EventKind
from kvcache.provenance import BlockOrigin


def replayed(events) -> set[bytes]:
    """What a consumer believes is cached."""
    known: set[bytes] = set()
    for event in events:
        if event.kind is EventKind.STORED:
            known.update(block.key for block in event.blocks)
        elif event.kind is EventKind.REMOVED:
            known.difference_update(event.keys)
    return known


def keys_in_tree(b) -> set[bytes]:
    return {key for node in b.manager.tree.nodes() for key in node.digests}


def test_no_events_unless_asked(bench):
    b = bench()
    b.turn(range(12))
    assert b.manager.poll_events() == []
    assert not any(node.digests for node in b.manager.tree.nodes())


def test_stored_blocks_have_chained_keys(bench):
    b = bench(event_buffer_max_size=100, policy="per_request")
    scope = ReuseScope(cache_salt="x")
    b.turn(range(10), scope=scope)
    b.turn([*range(8), *range(50, 56)], scope=scope)
    created, first, second = b.manager.poll_events()
    assert (created.kind, created.pages) == (EventKind.CREATED, (64,))
    assert [event.event_id for event in (created, first, second)] == [0, 1, 2]
    key = scope.digest()
    for block in first.blocks:
        key = hashlib.sha256(key + np.array(block.token_ids, dtype="<i4").tobytes()).digest()
        assert block.key == key
    assert [block.token_ids for block in first.blocks] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert (first.parent_key, first.scope) == (None, scope.digest())
    assert second.parent_key == first.blocks[-1].key
    assert [block.token_ids for block in second.blocks] == [(50, 51, 52, 53)]
    assert b.manager.poll_events() == []


def test_a_consumer_that_follows_the_events_knows_what_is_cached(bench):
    b = bench(event_buffer_max_size=10_000, pages=12, turns=1)
    for k in range(12):
        b.turn([*range(k % 3 * 4), *range(k * 10, k * 10 + 14)], f"c{k % 4}", range(900, 905))
    events = b.manager.poll_events()
    assert any(event.kind is EventKind.REMOVED for event in events)
    assert replayed(events) == keys_in_tree(b)


def test_overflow_is_counted_and_shows_as_a_gap(bench):
    b = bench(event_buffer_max_size=2)
    for k in range(5):
        b.turn(range(k * 10, k * 10 + 8))
    events = b.manager.poll_events(1)
    assert (len(events), events[0].event_id, b.manager.stats().lost_events) == (1, 4, 4)


def test_provenance(bench):
    b = bench(turns=3)
    b.manager.worker_id = "ctx-0"
    b.turn(range(8), "c")
    cache = b.start([*range(8), *range(20, 33)], "c")
    cache.resize(21)
    for first, last, origin, worker in ((8, 12, BlockOrigin.PULLED, "ctx-1"), (12, 16, BlockOrigin.COMPUTED, None)):
        tokens = cache.tokens(first, last)
        b.model.compute(cache, tokens)
        cache.append_computed(tokens, origin=origin, worker=worker)
    b.compute(cache, cache.tokens(16, 21), end=True)
    answer = np.arange(60, 67, dtype=np.int32)
    cache.resize(28)
    b.model.compute(cache, answer)
    cache.append_computed(answer, origin=BlockOrigin.GEN_TO_CTX, worker="gen-0")
    cache.end_turn()
    cache.close()
    found = b.manager.provenance(np.array([*range(8), *range(20, 33), *answer, 1], dtype=np.int32))
    assert [(p.first, p.last, p.provenance.origin.value, p.provenance.worker, p.provenance.turn) for p in found] == [
        (0, 2, "computed", "ctx-0", 1),
        (2, 3, "pulled", "ctx-1", 2),
        (3, 5, "computed", "ctx-0", 2),
        (5, 7, "gen_to_ctx", "gen-0", 2),
    ]


def test_provenance_survives_a_split(bench):
    b = bench(policy="per_request")
    b.turn(range(16))
    b.turn([*range(8), *range(50, 58)])
    for prompt, requests in ((range(16), ["r1"] * 1), ([*range(8), *range(50, 58)], ["r1", "r2"])):
        found = b.manager.provenance(np.array([*prompt, 1], dtype=np.int32))
        assert [p.provenance.request_id for p in found if p.last > p.first][-1] == requests[-1]
        assert (found[0].first, found[-1].last) == (0, 4)


def test_a_block_of_two_origins_has_one(bench):
    """The block is said to come from where its last tokens do."""
    b = bench(policy="per_request")
    cache = b.start(range(12))
    cache.resize(12)
    for end, origin in ((2, BlockOrigin.CTX_TO_GEN), (3, BlockOrigin.PULLED), (6, BlockOrigin.COMPUTED)):
        tokens = cache.tokens(cache.num_computed_tokens, end)
        b.model.compute(cache, tokens)
        cache.append_computed(tokens, origin=origin)
    cache.append_computed(np.zeros(0, dtype=np.int32), origin=BlockOrigin.GEN_TO_CTX)  # no token, no origin
    b.compute(cache, range(6, 12), end=True)
    cache.end_turn()
    cache.close()
    found = b.manager.provenance(np.arange(13, dtype=np.int32))
    assert [(p.first, p.last, p.provenance.origin) for p in found] == [(0, 3, BlockOrigin.COMPUTED)]


def test_provenance_of_matched_blocks_outlives_a_cleared_cache(bench):
    b = bench(policy="per_request")
    b.turn(range(8))
    cache = b.start([*range(8), 50, 51])
    b.compute(cache, [50])
    b.manager.clear()
    b.compute(cache, [51], end=True)
    cache.end_turn()
    cache.close()
    found = b.manager.provenance(np.array([*range(8), 50, 51, 1], dtype=np.int32))
    assert [(p.first, p.last, p.provenance.request_id) for p in found] == [(0, 2, "r1"), (2, 3, "r2")]


def test_a_block_that_leaves_a_tier_while_it_is_on_the_device_again_is_not_removed(bench):
    b = bench(pages=4, policy="per_request", host_cache_size=4 * 16, event_buffer_max_size=1000)
    b.turn(range(16))
    b.turn(range(100, 116))  # the first prompt's blocks go to host memory
    cache = b.start(range(16))  # comes back; the second one's go down
    b.compute(cache, range(cache.num_computed_tokens, 16), end=True)
    cache.close()
    b.turn(range(200, 216))
    b.turn(range(16))
    here = keys_in_tree(b) | set(b.manager.tiers.host._priority)
    assert replayed(b.manager.poll_events()) == here


def test_a_block_that_is_computed_while_a_tier_holds_it(bench):
    """It lies in both places then; it is removed when it has left both."""
    b = bench(pages=8, policy="per_request", host_cache_size=2 * 16, event_buffer_max_size=1000)
    cache = b.start(range(8))  # matched nothing: computes what another request publishes meanwhile
    b.turn(range(8))
    b.manager.set_budget(2)
    tree_keys = keys_in_tree(b)
    b.turn(range(100, 108))  # pushes the two blocks down to host memory
    assert set(b.manager.tiers.host._priority) == tree_keys
    b.manager.set_budget(8)
    b.compute(cache, range(8), end=True)  # now they are on the device too
    cache.close()
    b.manager.poll_events()
    known = keys_in_tree(b) | set(b.manager.tiers.host._priority)
    b.manager.set_budget(2)
    b.manager.set_budget(1)
    for event in b.manager.poll_events():
        if event.kind is EventKind.REMOVED:
            known.difference_update(event.keys)
    assert known == keys_in_tree(b) | set(b.manager.tiers.host._priority)


def test_the_origin_of_a_block_that_is_not_published_yet_stays_with_the_sequence(bench):
    b = bench(policy="all_reusable")
    cache = b.start(range(12))
    cache.resize(12)
    for end, origin in ((4, BlockOrigin.COMPUTED), (6, BlockOrigin.PULLED)):
        tokens = cache.tokens(cache.num_computed_tokens, end)
        b.model.compute(cache, tokens)
        cache.append_computed(tokens, origin=origin)  # of the pulled half block nothing is published yet
        b.check(cache)
    b.compute(cache, range(6, 12), end=True)
    cache.close()
    found = b.manager.provenance(np.arange(13, dtype=np.int32))
    assert [(p.first, p.last, p.provenance.origin) for p in found] == [(0, 3, BlockOrigin.COMPUTED)]


def test_a_damaged_file_that_is_prefetched_is_told_removed(bench, tmp_path):
    b = bench(
        pages=4,
        policy="per_request",
        disk_cache_size=1000,
        disk_cache_path=str(tmp_path),
        host_cache_size=64,
        event_buffer_max_size=1000,
    )
    for first in (0, 100, 200, 300):
        b.turn(range(first, first + 16))
    disk = b.manager.tiers.disk
    for path in tmp_path.rglob("*.kv"):
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    assert b.manager.prefetch(np.arange(17, dtype=np.int32)) == 0
    here = keys_in_tree(b) | set(b.manager.tiers.host._priority) | set(disk._sizes)
    assert replayed(b.manager.poll_events()) == here
    assert b.manager.stats().tiers[1].corrupt_blocks == 1
    b.manager.close()
