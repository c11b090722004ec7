"""Eviction looks at locks only: whoever holds a page of the tree has locked its block, however the page came there."""

from __future__ import annotations

import pytest

from kvcache.radix_evict import evict, evictable_pages

KINDS = [{}, {"mla": True}, {"windows": (8,)}]


def evicts_exactly(b, held: int) -> None:
    """All blocks but the `held` ones can be evicted, and each of them frees its page."""
    pool, cached = b.manager.pools[0], b.cached()
    free = pool.free_pages
    assert evictable_pages(b.manager.tree, 0) == cached - held
    for gone in range(1, cached - held + 1):
        assert evict(b.manager.tree, 0, 1) == 1
        assert (b.cached(), pool.free_pages) == (cached - gone, free + gone)
        b.manager.check_integrity()
    assert evict(b.manager.tree, 0, 1) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("conversation", [None, "c"])
def test_pages_that_were_pinned_before_they_were_published(bench, kind, conversation):
    b = bench(pages=32, **kind)
    b.turn(range(100, 120))
    cache = b.start(range(18), conversation)
    b.compute(cache, range(10))
    pin = cache.pin_for_peer()  # two and a half blocks, nothing is published yet
    b.compute(cache, range(10, 18), end=True)
    cache.end_turn()
    cache.close()
    assert b.cached() == 10
    evicts_exactly(b, held=3)
    if "windows" not in kind:  # the window's last blocks are among those that went
        assert b.probe([*range(18), 1]) == 12
    pin.release()
    evicts_exactly(b, held=0)


def test_a_pin_locks_no_block_that_another_request_published(bench):
    b = bench(pages=32)
    first, second = b.start(range(12)), b.start(range(12))
    b.compute(first, range(12))
    pin = first.pin_for_peer()
    b.compute(second, range(12), end=True)
    second.close()
    b.compute(first, [], end=True)
    first.close()
    assert b.manager.stats().pools[0].held == 3  # the pinned ones: the tree has the other request's
    evicts_exactly(b, held=0)
    pin.release()


def test_after_a_clear_a_request_keeps_its_place_where_a_pin_keeps_the_blocks(bench):
    b = bench(pages=32)
    b.turn(range(12))
    first = b.start([*range(12), 50, 51])
    b.compute(first, [50, 51])
    second = b.start([*range(8), 60, 61])
    second.resize(10)
    pin = second.pin_for_peer()
    second.close()
    b.manager.clear()
    b.check(first)
    assert (b.cached(), b.probe([*range(12), 1])) == (2, 8)
    pin.release()
    evicts_exactly(b, held=2)
    first.close()
    evicts_exactly(b, held=0)


def test_after_a_clear_two_requests_share_pages_and_one_publishes_them_again(bench):
    b = bench(pages=32)
    b.turn(range(12))
    first, second = b.start([*range(12), 50]), b.start([*range(8), 60, 61])
    b.compute(first, [50])
    b.compute(second, [60, 61])
    b.manager.clear()
    assert b.cached() == 0
    b.compute(second, [], end=True)
    second.close()
    assert b.cached() == 3
    b.check(first)
    evicts_exactly(b, held=2)
    first.close()
    evicts_exactly(b, held=0)
