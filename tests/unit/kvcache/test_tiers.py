"""Blocks that leave the device go to host memory and to disk, and come back only as they were."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
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


@pytest.fixture
def unwritable(tmp_path):
    """A folder that this user cannot write to, whoever that is: root's permissions end at the kernel's own folders."""
    if os.geteuid() == 0:
        return Path("/proc/self")
    folder = tmp_path / "ro"
    folder.mkdir(mode=0o500)
    return folder


def test_a_folder_that_cannot_be_written(unwritable, bench):
    now = [0.0]
    b = bench(
        pages=4, policy="per_request", disk_cache_size=100 * PAGE, disk_cache_path=str(unwritable), clock=lambda: now[0]
    )
    prompts = fill(b, 3)
    disk = b.manager.tiers.disk
    assert (disk.errors, len(disk), disk.used_bytes) == (1, 0, 0)  # one attempt, then a pause
    now[0] = 29.0
    fill(b, 1, first=10)
    assert disk.errors == 1
    now[0] = 31.0
    fill(b, 1, first=11)
    assert disk.errors == 2
    assert b.turn([*prompts[0][:15], 7]) == 0
    assert b.manager.stats().tiers[1].errors == 2
    b.manager.close()


def test_a_disk_that_is_full(tmp_path):
    """The kernel itself refuses the bytes: the temporary file leads to a device without room."""
    now = [0.0]
    tier = DiskTier(tmp_path, 100 * PAGE, lambda: now[0])
    assert tier.put(block(1)) == []
    temporary = tier.path(b"\x02" * 32, b"s" * 32).with_suffix(".tmp")
    temporary.symlink_to("/dev/full")
    assert tier.put(block(2)) == [b"\x02" * 32]
    assert (tier.errors, len(tier), tier.used_bytes) == (1, 1, PAGE)
    assert not temporary.is_symlink()  # nothing half-written stays
    assert tier.put(block(3)) == [b"\x03" * 32]  # the pause: not even tried
    assert tier.errors == 1
    assert tier.take(b"\x01" * 32, b"s" * 32) == block(1)  # reading goes on
    now[0] = 31.0
    assert tier.put(block(2)) == []
    assert len(tier.clear()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_too_large_for_the_file_system(tmp_path):
    """A write that ends half-way (here at a limit of the process) leaves no file, and the process goes on."""
    code = f"""
import resource, sys
from pathlib import Path
from kvcache.tiers import DiskTier, TierBlock
tier = DiskTier(Path({str(tmp_path)!r}), 10_000, lambda: 0.0)
make = lambda n, size: TierBlock.of(bytes([n]) * 32, b"s" * 32, 1, ((0, -1, 4, bytes(size)),))
assert tier.put(make(1, 100)) == []
resource.setrlimit(resource.RLIMIT_FSIZE, (512, 512))
assert tier.put(make(2, 5000)) == [bytes([2]) * 32]
assert (tier.errors, len(tier)) == (1, 1)
assert tier.take(bytes([1]) * 32, b"s" * 32) == make(1, 100)
print(sorted(path.name for path in Path({str(tmp_path)!r}).rglob("*") if path.is_file()))
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_a_file_that_cannot_be_removed(tmp_path, monkeypatch):
    tier = DiskTier(tmp_path, 100 * PAGE, lambda: 0.0)
    tier.put(block(1))

    def refuse(self, missing_ok=False):
        raise OSError(30, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.unlink", refuse)
        assert tier.take(b"\x01" * 32, b"s" * 32) == block(1)
    assert (tier.errors, len(tier), tier.used_bytes) == (1, 0, 0)


def test_a_file_that_went_away(tmp_path):
    tier = DiskTier(tmp_path, 100 * PAGE, lambda: 0.0)
    tier.put(block(1))
    tier.path(b"\x01" * 32, b"s" * 32).unlink()
    assert tier.take(b"\x01" * 32, b"s" * 32) is None
    assert (tier.errors, tier.corrupt, len(tier), tier.used_bytes) == (1, 0, 0, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_small_file_system_that_fills_up(tmp_path, bench):
    """A real one, where this container lets root mount it."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k,nr_inodes=12", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"mount: {mount.stderr.strip()}")
    try:
        b = bench(pages=4, policy="per_request", disk_cache_size=100 * PAGE, disk_cache_path=str(folder))
        prompts = fill(b, 6)
        disk = b.manager.tiers.disk
        assert disk.errors == 1
        assert 0 < len(disk) < 20
        kept = [b.turn([*prompt[:15], 7]) for prompt in prompts[:2]]
        assert max(kept) >= 4  # what had been written is read back
        b.manager.close()
        assert list(folder.iterdir()) == []
    finally:
        subprocess.run(["umount", str(folder)], check=True)


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
