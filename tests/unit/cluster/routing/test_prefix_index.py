"""Which worker was given which prefix: depths, scopes, what turned out to be gone, the bound."""

from __future__ import annotations

import numpy as np

from cluster.routing import PrefixIndex

TOKENS = np.arange(64, dtype=np.int32)


def test_depth_is_counted_in_leading_blocks_for_each_worker():
    index = PrefixIndex(16)
    index.add(index.keys(TOKENS, None), "a")
    index.add(index.keys(TOKENS[:40], None), "b")
    assert index.matched_blocks(index.keys(TOKENS, None)) == {"a": 4, "b": 2}
    assert index.matched_blocks(index.keys(TOKENS[1:], None)) == {}
    assert index.matched_blocks(index.keys(TOKENS, "salt")) == {}


def test_blocks_that_a_worker_turned_out_to_have_lost_count_for_it_no_more():
    index = PrefixIndex(16)
    keys = index.keys(TOKENS, None)
    index.add(keys, "a")
    index.add(keys, "b")
    index.discard(keys[1:], "a")
    assert index.matched_blocks(keys) == {"a": 1, "b": 4}
    index.discard(keys, "b")
    assert index.matched_blocks(keys) == {"a": 1}
    index.discard(keys, "never seen")
    index.discard(index.keys(TOKENS + 7, None), "a")
    assert index.matched_blocks(keys) == {"a": 1}


def test_a_chain_is_forgotten_from_its_leaf():
    index = PrefixIndex(16, max_blocks=4)
    index.add(index.keys(TOKENS, None), "a")
    index.add(index.keys(TOKENS[::-1][:32].copy(), None), "b")
    assert index.matched_blocks(index.keys(TOKENS, None)) == {"a": 2}
