"""Pages from a configuration."""

from __future__ import annotations

import pytest

from cluster.errors import StartupError
from cluster.worker.pool_size import pool_pages
from kvcache import KvCacheConfig, KvLayout, LayerGroup, LifeCycleKind

LAYOUT = KvLayout("m", 4, (LayerGroup(LifeCycleKind.FULL, (0,), 1, 8, "uint8"),))  # pages of 64 bytes


def test_max_tokens_are_rounded_up_to_blocks():
    assert pool_pages(KvCacheConfig(tokens_per_block=4, max_tokens=9), LAYOUT) == (3,)


def test_the_fraction_is_taken_of_the_workers_share():
    config = KvCacheConfig(tokens_per_block=4, free_memory_fraction=0.5)
    assert pool_pages(config, LAYOUT, available_bytes=12800) == (100,)
    assert pool_pages(config, LAYOUT, available_bytes=12800, memory_share=0.25) == (25,)


def test_more_than_there_is_names_the_key():
    with pytest.raises(StartupError, match="max_tokens 1000000 needs") as caught:
        pool_pages(KvCacheConfig(tokens_per_block=4, max_tokens=1_000_000), LAYOUT, available_bytes=1000)
    assert caught.value.param == "kv_cache_config.max_tokens"


def test_no_block_at_all_is_an_error():
    with pytest.raises(StartupError, match="no block"):
        pool_pages(KvCacheConfig(tokens_per_block=4, free_memory_fraction=0.5), LAYOUT, available_bytes=100)
