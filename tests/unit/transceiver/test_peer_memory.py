"""A peer's memory file mapped here: right bytes, only files of fixed size, nothing left behind, valid after a death."""

from __future__ import annotations

import fcntl
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcache.storage.host_memory import MappedMemory
from tests.unit.transceiver.rig import eventually
from transceiver.cma import process_identity
from transceiver.host_copies import HostCopies, HostCopy
from transceiver.peer_memory import PeerMemory
from transceiver.transport import ReadBatch

SIZE = 1 << 16

HOLDER = """
import sys, time
import numpy as np
from kvcache.storage.host_memory import MappedMemory
from transceiver.cma import process_identity
memory = MappedMemory(1 << 16, shared=True)
np.frombuffer(memory.view(), np.uint8)[:] = np.arange(1 << 16, dtype=np.uint64).astype(np.uint8)
print(process_identity().hex(), memory.fd, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def memory() -> Iterator[MappedMemory]:
    made = MappedMemory(SIZE, shared=True)
    np.frombuffer(made.view(), np.uint8)[:] = np.random.default_rng(5).integers(0, 256, SIZE, dtype=np.uint8)
    yield made
    made.close()


def mapped_files() -> int:
    return sum("kvferry-pool" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_copies_bring_the_bytes_and_see_later_writes(memory: MappedMemory) -> None:
    assert memory.fd is not None
    peer = PeerMemory(process_identity(), memory.fd, SIZE)
    source, target = np.frombuffer(memory.view(), np.uint8), np.zeros(SIZE, np.uint8)
    order = np.random.default_rng(6).permutation(16)
    local, remote = target.ctypes.data + np.arange(16) * 4096, peer.address + order * 4096
    sizes = np.full(16, 4096, np.uint64)
    plan = peer.plan(local.astype(np.uint64), remote.astype(np.uint64), sizes, 3 * 4096, cut=True)
    for turn in range(2):
        source[0] = turn
        for piece in range(plan.pieces):
            peer.copy(plan, piece)
        assert (target.reshape(16, -1) == source.reshape(16, -1)[order]).all()


def test_a_batch_of_small_reads_stays_with_one_thread(memory: MappedMemory) -> None:
    """Python's lock would make two threads slower than one."""
    assert memory.fd is not None
    peer, target = PeerMemory(process_identity(), memory.fd, SIZE), np.zeros(SIZE, np.uint8)

    def batch(size: int) -> HostCopy:
        at = np.arange(SIZE // size, dtype=np.uint64) * np.uint64(size)
        reads = ReadBatch(at + np.uint64(target.ctypes.data), at, np.full(len(at), size, np.uint64))
        return HostCopy(peer, reads, peer.address, None, None)

    assert [batch(size).shareable for size in (4096, 32 << 10)] == [False, True]
    copies = HostCopies(1, lambda: None)
    copies.add(batch(4096))
    while copies.step():
        pass
    done = copies.take()
    assert done is not None
    assert done.error is None
    assert (target == np.frombuffer(memory.view(), np.uint8)).all()
    copies.close()


def test_the_mapping_outlives_the_holder_and_goes_with_its_last_reference() -> None:
    before = mapped_files()
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        identity, fd = holder.stdout.readline().split()
        peer = PeerMemory(bytes.fromhex(identity.decode()), int(fd), SIZE)
        holder.kill()
        holder.wait()
    target = np.zeros(SIZE, np.uint8)
    local, remote, size = (np.asarray([value], np.uint64) for value in (target.ctypes.data, peer.address, SIZE))
    peer.copy(peer.plan(local, remote, size, 0, cut=False), 0)
    assert (target == np.arange(SIZE, dtype=np.uint64).astype(np.uint8)).all()
    with pytest.raises(ProcessLookupError):
        PeerMemory(bytes.fromhex(identity.decode()), int(fd), SIZE)
    assert mapped_files() == before + 1
    del peer
    gc.collect()
    assert mapped_files() == before


def test_a_file_that_could_shrink_is_refused() -> None:
    """Reading past its end would kill this process (SIGBUS)."""
    fd = os.memfd_create("kvferry-test", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE)
        with pytest.raises(OSError, match="fixed size"):
            PeerMemory(process_identity(), fd, SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(OSError, match="smaller"):
            PeerMemory(process_identity(), fd, SIZE + 1)
        assert PeerMemory(process_identity(), fd, SIZE).nbytes == SIZE
    finally:
        os.close(fd)


@pytest.mark.parametrize("kind", ["a file", "a pipe without a writer", "nothing", "a directory"])
def test_whatever_else_a_peer_names_is_an_error_at_once(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    match kind:
        case "a file":
            path.write_bytes(bytes(SIZE))
        case "a pipe without a writer":
            os.mkfifo(path)
        case "a directory":
            path.mkdir()
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind != "nothing" else 1_000_000
    try:
        with pytest.raises(OSError):
            PeerMemory(process_identity(), fd, SIZE)
    finally:
        if kind != "nothing":
            os.close(fd)


@pytest.mark.parametrize("identity", [b"", b"x" * 40, bytes(40)])
def test_only_processes_of_this_host_and_namespace(identity: bytes, memory: MappedMemory) -> None:
    assert memory.fd is not None
    with pytest.raises(ProcessLookupError):
        PeerMemory(identity, memory.fd, SIZE)


def test_no_descriptor_is_left() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(3):
        memory = MappedMemory(SIZE, shared=True)
        assert memory.fd is not None
        peer = PeerMemory(process_identity(), memory.fd, SIZE)
        memory.close()
        del peer
    forgotten = MappedMemory(SIZE, shared=True)
    del forgotten
    assert eventually(lambda: bool(gc.collect() >= 0 and count() == before))
