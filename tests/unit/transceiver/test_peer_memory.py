"""A peer's memory file mapped here: right bytes, only files of fixed size, nothing left behind, valid after a death."""

from __future__ import annotations

import errno
import fcntl
import gc
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvcache.storage.host_memory import MappedMemory
from tests.unit.transceiver.rig import eventually
from transceiver.cma import CmaReader, may_read_self, process_identity
from transceiver.peer_memory import PeerMemory

SIZE = 1 << 16

HOLDER = """
import os, sys
import numpy as np
from kvcache.storage.host_memory import MappedMemory
from transceiver.cma import CmaReader, may_read_self, process_identity
memory = MappedMemory(1 << 16, shared=True)
np.frombuffer(memory.view(), np.uint8)[:] = np.arange(1 << 16, dtype=np.uint64).astype(np.uint8)
print(process_identity().hex(), memory.fd, os.fstat(memory.fd).st_ino, flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def memory() -> Iterator[MappedMemory]:
    made = MappedMemory(SIZE, shared=True)
    np.frombuffer(made.view(), np.uint8)[:] = np.random.default_rng(5).integers(0, 256, SIZE, dtype=np.uint8)
    yield made
    made.close()


def mapped(memory: MappedMemory, nbytes: int = SIZE) -> PeerMemory:
    assert memory.fd is not None
    return PeerMemory(process_identity(), memory.fd, os.fstat(memory.fd).st_ino, nbytes)


def refuse(*_: object) -> int:
    raise PermissionError(errno.EPERM, "Operation not permitted")


@pytest.fixture(autouse=True)
def ask_again() -> Iterator[None]:
    yield
    may_read_self.cache_clear()


def mapped_files() -> int:
    return sum("kvferry-pool" in line for line in Path("/proc/self/maps").read_text().splitlines())


@pytest.mark.parametrize("allowed", [True, False])
@pytest.mark.parametrize("size", [4096, 128 << 10, 512 << 10])
def test_copies_bring_the_bytes_and_see_later_writes(size: int, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few small reads, many of them, large ones: three ways to copy, and where a seccomp profile leaves two."""
    if not allowed:
        monkeypatch.setattr(CmaReader, "_call", refuse)
        may_read_self.cache_clear()
    memory = MappedMemory(16 * size, shared=True)
    source, target = np.frombuffer(memory.view(), np.uint8), np.zeros(16 * size, np.uint8)
    source[:] = np.random.default_rng(5).integers(0, 256, len(source), dtype=np.uint8)
    peer = mapped(memory, 16 * size)
    order = np.random.default_rng(6).permutation(16)
    local, remote = target.ctypes.data + np.arange(16) * size, peer.address + order * size
    sizes = np.full(16, size, np.uint64)
    plan = peer.plan(local.astype(np.uint64), remote.astype(np.uint64), sizes, 3 * size, cut=True)
    for turn in range(2):
        source[0] = turn
        for piece in range(plan.pieces):
            peer.copy(plan, piece)
        assert (target.reshape(16, -1) == source.reshape(16, -1)[order]).all()
    memory.close()


def test_small_reads_leave_a_busy_thread_its_turns_and_take_theirs() -> None:
    """Where every copy gave the interpreter's lock up, a busy thread would take 5 ms for itself after each of them."""
    memory, stop = MappedMemory(SIZE, shared=True), threading.Event()
    peer, target = mapped(memory), np.zeros(SIZE, np.uint8)
    at = np.arange(16, dtype=np.uint64) * np.uint64(4096)
    plan = peer.plan(at + np.uint64(target.ctypes.data), at + np.uint64(peer.address), np.full(16, 4096, np.uint64), 0,
                     cut=False)  # fmt: skip
    turns = 0

    def busy() -> None:
        nonlocal turns
        while not stop.is_set():
            turns += 1

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        gave_up, before = 0, turns
        for _ in range(200):
            peer.copy(plan, 0)
            gave_up, before = gave_up + (turns != before), turns
    finally:
        stop.set()
        thread.join()
        memory.close()
    assert gave_up < 100  # 3,200 copies


def test_the_mapping_outlives_the_holder_and_goes_with_its_last_reference() -> None:
    before = mapped_files()
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        identity, fd, inode = holder.stdout.readline().split()
        peer = PeerMemory(bytes.fromhex(identity.decode()), int(fd), int(inode), SIZE)
        holder.kill()
        holder.wait()
    target = np.zeros(SIZE, np.uint8)
    local, remote, size = (np.asarray([value], np.uint64) for value in (target.ctypes.data, peer.address, SIZE))
    peer.copy(peer.plan(local, remote, size, 0, cut=False), 0)
    assert (target == np.arange(SIZE, dtype=np.uint64).astype(np.uint8)).all()
    with pytest.raises(ProcessLookupError):
        PeerMemory(bytes.fromhex(identity.decode()), int(fd), int(inode), SIZE)
    assert mapped_files() == before + 1
    del peer
    gc.collect()
    assert mapped_files() == before


def test_a_file_that_could_shrink_is_refused() -> None:
    """Reading past its end would kill this process (SIGBUS)."""
    fd = os.memfd_create("kvferry-pool", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, SIZE)
        inode = os.fstat(fd).st_ino
        with pytest.raises(OSError, match="fixed size"):
            PeerMemory(process_identity(), fd, inode, SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        with pytest.raises(OSError, match="smaller"):
            PeerMemory(process_identity(), fd, inode, SIZE + 1)
        with pytest.raises(OSError, match="empty"):
            PeerMemory(process_identity(), fd, inode, 0)
        assert PeerMemory(process_identity(), fd, inode, SIZE).nbytes == SIZE
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
            PeerMemory(process_identity(), fd, os.fstat(fd).st_ino if kind != "nothing" else 1, SIZE)
    finally:
        if kind != "nothing":
            os.close(fd)


@pytest.mark.parametrize("identity", [b"", b"x" * 40, bytes(40)])
def test_only_processes_of_this_host_and_namespace(identity: bytes, memory: MappedMemory) -> None:
    assert memory.fd is not None
    with pytest.raises(ProcessLookupError):
        PeerMemory(identity, memory.fd, os.fstat(memory.fd).st_ino, SIZE)


def test_no_descriptor_is_left() -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = count()
    for _ in range(3):
        memory = MappedMemory(SIZE, shared=True)
        assert memory.fd is not None
        peer = mapped(memory)
        memory.close()
        del peer
    forgotten = MappedMemory(SIZE, shared=True)
    del forgotten
    assert eventually(lambda: bool(gc.collect() >= 0 and count() == before))


def test_a_pool_that_has_taken_anothers_number_is_refused() -> None:
    """Descriptors are numbered anew; an announcement may be older than the pool that it meets."""
    first = MappedMemory(SIZE, shared=True)
    assert first.fd is not None
    fd, inode = first.fd, os.fstat(first.fd).st_ino
    first.close()
    second = MappedMemory(SIZE, shared=True)
    if second.fd != fd:
        pytest.skip("the number was not given out again")
    with pytest.raises(OSError, match="another pool"):
        PeerMemory(process_identity(), fd, inode, SIZE)
    second.close()


def test_a_peer_reads_a_pool_and_cannot_change_it(memory: MappedMemory) -> None:
    assert memory.fd is not None
    other = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(other, b"x", 0)
        with pytest.raises(PermissionError):
            mmap.mmap(other, SIZE)
        with pytest.raises(PermissionError):
            os.ftruncate(other, 0)
    finally:
        os.close(other)
    view = np.frombuffer(memory.view(), np.uint8)
    view[3] = 77  # the holder itself goes on writing
    assert mapped(memory).view[3] == 77
    with pytest.raises(ValueError, match="read-only"):
        mapped(memory).view[0] = 1


def test_a_fork_does_not_keep_the_peers_pool() -> None:
    memory = MappedMemory(SIZE, shared=True)
    peer = mapped(memory)
    child = os.fork()
    if child == 0:
        lines = Path("/proc/self/maps").read_text()
        os._exit(0 if f"{peer.address:x}-" not in lines else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert f"{peer.address:x}-" in Path("/proc/self/maps").read_text()
    memory.close()
