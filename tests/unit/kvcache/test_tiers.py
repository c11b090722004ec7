"""Blocks that leave the device go to host memory and to disk, and come back only as they were."""

from __future__ import annotations

import os

import pytest
from pydantic import ValidationError

from kvcache import KvCacheConfig, ReuseScope
from kvcache.events import EventKind, Tier
from kvcache.tiers import DiskTier, HostTier, TierBlock

PAGE = 16  # bytes of a page of the pattern layout with blocks of 4 tokens


def block(number: int, priority: int = 1, size: int = PAGE) -> TierBlock:
    return TierBlock.of(bytes([number]) * 32, b"s" * 32, priority, ((0, -1, 4, bytes([number]) * size),))


def fill(b, prompts: int, first: int = 0) -> list[range]:
    made = [range(k * 100, k * 100 + 16) for k in range(first, first + prompts)]
    for prompt in made:
        b.turn(prompt)
    return made


def test_host_tier_gives_back_what_was_evicted(bench):
    b = bench(pages=8, policy="per_request", host_cache_size=100 * PAGE)
    prompts = fill(b, 4)
    assert b.manager.stats().host_blocks == 8
    assert [b.probe([*prompt, 1]) for prompt in prompts] == [16, 16, 16, 16]
    assert b.turn([*prompts[0], 7]) == 16
    assert b.manager.stats().onboarded_blocks == 4


def test_without_lower_tiers_it_is_gone(bench):
    b = bench(pages=8, policy="per_request")
    prompts = fill(b, 4)
    assert b.turn([*prompts[0], 7]) == 0


def test_disk_takes_what_host_gives_up(bench, tmp_path):
    b = bench(
        pages=8,
        policy="per_request",
        host_cache_size=4 * PAGE,
        disk_cache_size=100 * PAGE,
        disk_cache_path=str(tmp_path),
    )
    prompts = fill(b, 5)
    stats = b.manager.stats()
    assert (stats.host_blocks, stats.disk_blocks) == (4, 8)
    assert len(list(tmp_path.rglob("*.kv"))) == 8
    assert b.turn([*prompts[0], 7]) == 16
    b.manager.close()
    assert list(tmp_path.iterdir()) == []


def test_prefetch_lifts_from_disk_to_host(bench, tmp_path):
    b = bench(
        pages=4,
        policy="per_request",
        host_cache_size=8 * PAGE,
        disk_cache_size=100 * PAGE,
        disk_cache_path=str(tmp_path),
    )
    prompts = fill(b, 5)
    import numpy as np

    assert b.manager.prefetch(np.array([*prompts[0], 1], dtype=np.int32)) == 4
    assert b.manager.prefetch(np.array([*prompts[0], 1], dtype=np.int32)) == 0
    assert b.turn([*prompts[0][:15], 7]) == 12
    b.manager.close()


def test_a_changed_file_is_refused(bench, tmp_path):
    b = bench(pages=4, policy="per_request", disk_cache_size=100 * PAGE, disk_cache_path=str(tmp_path))
    prompts = fill(b, 2)
    files = sorted(tmp_path.rglob("*.kv"))
    assert len(files) == 4
    for path in files:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(bytes(raw))
    assert b.turn([*prompts[0][:15], 7]) == 0
    assert b.manager.stats().corrupt_blocks == 1
    b.manager.close()


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-3], lambda raw: raw[:40], lambda raw: b"", lambda raw: raw + b"x"]
)
def test_a_cut_file_is_refused(damage):
    whole = block(1).encode()
    assert TierBlock.decode(whole, b"\x01" * 32, b"s" * 32) == block(1)
    assert TierBlock.decode(damage(whole), b"\x01" * 32, b"s" * 32) is None
    assert TierBlock.decode(whole, b"\x02" * 32, b"s" * 32) is None
    assert TierBlock.decode(whole, b"\x01" * 32, b"t" * 32) is None


def test_changed_host_memory_is_refused(bench):
    b = bench(pages=4, policy="per_request", host_cache_size=100 * PAGE)
    prompts = fill(b, 2)
    host = b.manager.tiers.host
    for key in list(host._priority):
        good = host.take(key)
        bad = TierBlock(good.key, good.scope, good.priority, ((0, -1, 4, b"\0" * PAGE),), good.digest)
        host.put(bad)
    assert b.turn([*prompts[0][:15], 7]) == 0
    assert b.manager.stats().corrupt_blocks == 1


def test_a_read_only_disk_costs_blocks_not_requests(tmp_path, bench, monkeypatch):
    now = [0.0]
    b = bench(
        pages=4, policy="per_request", disk_cache_size=100 * PAGE, disk_cache_path=str(tmp_path), clock=lambda: now[0]
    )

    def full(self, data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.write_bytes", full)
        prompts = fill(b, 3)
    disk = b.manager.tiers.disk
    assert (disk.errors, len(disk)) == (1, 0)
    assert b.turn([*prompts[0][:15], 7]) == 0
    now[0] = 60.0
    later = fill(b, 2, first=10)
    assert len(disk) > 0
    assert b.turn([*later[0][:15], 7]) == 12
    b.manager.close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_write_permission(tmp_path, bench):
    folder = tmp_path / "ro"
    folder.mkdir(mode=0o500)
    b = bench(pages=4, policy="per_request", disk_cache_size=100 * PAGE, disk_cache_path=str(folder))
    fill(b, 3)
    assert b.manager.tiers.disk.errors == 1


def test_scopes_stay_apart_on_disk(bench, tmp_path):
    b = bench(pages=4, policy="per_request", disk_cache_size=100 * PAGE, disk_cache_path=str(tmp_path))
    one, two = ReuseScope(cache_salt="one"), ReuseScope(cache_salt="two")
    b.turn(range(16), scope=one)
    b.turn(range(100, 116), scope=one)
    folders = {path.parent.name for path in tmp_path.rglob("*.kv")}
    assert folders == {one.digest().hex()}
    assert b.turn([*range(15), 7], scope=two) == 0
    assert b.turn([*range(15), 7], scope=one) == 12
    b.manager.close()


def test_host_tier_is_priority_then_least_recently_used():
    tier = HostTier(3 * PAGE)
    for number, priority in ((1, 1), (2, 0), (3, 1)):
        assert tier.put(block(number, priority)) == []
    assert [gone.key[0] for gone in tier.put(block(4))] == [2]
    assert [gone.key[0] for gone in tier.put(block(5))] == [1]
    assert tier.used_bytes == 3 * PAGE
    assert [gone.key[0] for gone in tier.put(block(6, size=100))] == [6]


def test_disk_tier_is_bounded(tmp_path):
    tier = DiskTier(tmp_path, 2 * PAGE, lambda: 0.0)
    assert tier.put(block(1)) == []
    assert tier.put(block(2)) == []
    assert [key[0] for key in tier.put(block(3))] == [1]
    assert tier.take(b"\x02" * 32, b"t" * 32) is None
    assert tier.take(b"\x02" * 32, b"s" * 32) == block(2)
    assert len(tier.clear()) == 1
    assert list(tmp_path.iterdir()) == []


def test_superseded_blocks_leave_host_first(bench):
    b = bench(pages=4, turns=1, host_cache_size=4 * PAGE)
    b.turn(range(16), "c")
    b.turn(range(100, 116), "c")  # the first chain is superseded and goes down with the lower priority
    b.turn(range(200, 216), "d")
    assert b.probe([*range(16), 1]) == 0
    assert b.probe([*range(100, 116), 1]) == 16


@pytest.mark.parametrize("kind", [{"windows": (8,)}, {"recurrent": 1}, {"windows": (8,), "recurrent": 1}])
def test_windows_and_states_come_back_too(bench, kind):
    b = bench(pages=8, turns=5, host_cache_size=1000 * PAGE, **kind)
    b.turn(range(16), "a")
    for k in range(1, 4):
        b.turn(range(k * 100, k * 100 + 16), f"x{k}")
    assert b.turn([*range(16), 7], "a") == 16


def test_events_tell_the_tier(bench, tmp_path):
    b = bench(
        pages=4,
        policy="per_request",
        host_cache_size=4 * PAGE,
        disk_cache_size=4 * PAGE,
        disk_cache_path=str(tmp_path),
        event_buffer_max_size=1000,
    )
    fill(b, 4)
    events = b.manager.poll_events()
    moved = [(event.tier, len(event.keys)) for event in events if event.kind is EventKind.UPDATED]
    assert (Tier.HOST, 4) in moved and (Tier.DISK, 1) in moved
    known: set[bytes] = set()
    for event in events:
        if event.kind is EventKind.STORED:
            known.update(one.key for one in event.blocks)
        elif event.kind is EventKind.REMOVED:
            known.difference_update(event.keys)
    assert len(known) == 12
    b.manager.close()


def test_disk_needs_an_existing_folder():
    with pytest.raises(ValidationError, match="existing folder"):
        KvCacheConfig(disk_cache_size=10, disk_cache_path="/nonexistent/folder")
    with pytest.raises(ValidationError, match="existing folder"):
        KvCacheConfig(disk_cache_size=10)
