"""Pages from a configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.engine.free_memory import host_memory_bytes
from cluster.errors import StartupError
from cluster.worker.pool_size import pool_pages
from kvcache import KvCacheConfig, KvLayout, LayerGroup, LifeCycleKind

LAYOUT = KvLayout("m", 4, (LayerGroup(LifeCycleKind.FULL, (0,), 1, 8, "uint8"),))  # pages of 64 bytes


def test_max_tokens_are_rounded_up_to_blocks():
    assert pool_pages(KvCacheConfig(tokens_per_block=4, max_tokens=9), LAYOUT, 1000) == (3,)


def test_the_fraction_is_taken_of_what_the_worker_may_count_on():
    config = KvCacheConfig(tokens_per_block=4, free_memory_fraction=0.5)
    assert pool_pages(config, LAYOUT, 12800) == (100,)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 8 * 2**20),
        ({"memory.max": "max", "memory.current": "5"}, 8 * 2**20),
        ({"memory.max": "6000", "memory.current": "1000"}, 5000),
        ({"memory/memory.limit_in_bytes": "900", "memory/memory.usage_in_bytes": "1000"}, 0),
    ],
)
def test_the_hosts_memory_is_what_can_be_had_within_the_cgroup(tmp_path: Path, limits: dict[str, str], expected: int):
    (tmp_path / "meminfo").write_text("MemFree: 1 kB\nMemAvailable:    8192 kB\n")
    for name, value in limits.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value)
    assert host_memory_bytes(tmp_path / "meminfo", tmp_path / "cgroup") == expected


def test_more_than_there_is_names_the_key():
    with pytest.raises(StartupError, match="max_tokens 1000000 needs") as caught:
        pool_pages(KvCacheConfig(tokens_per_block=4, max_tokens=1_000_000), LAYOUT, 1000)
    assert caught.value.param == "kv_cache_config.max_tokens"


def test_no_block_at_all_is_an_error():
    with pytest.raises(StartupError, match="no block"):
        pool_pages(KvCacheConfig(tokens_per_block=4, free_memory_fraction=0.5), LAYOUT, 100)
