"""Batched reads of another process's memory on the same host: one `process_vm_readv` for many pages.

It is the kernel call that UCX's cma lane makes for each read; here a whole batch goes down at once, which is what
scattered pages need. Used by `transceiver.ucx` only on links whose UCX endpoint has a cma lane, to a process whose
identity the handshake has brought. Where the kernel refuses, the caller goes on with UCX's own reads.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["CmaPlan", "CmaReader", "process_identity", "same_host_pid"]

_IOV_MAX = 1024
_FORMAT = "<16sQQQ"  # boot id, pid namespace, pid, start time of the process


def _start_time(pid: int) -> int:
    """Clock ticks since boot at which `pid` started (tells a reused pid from the process it was)."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])


def process_identity() -> bytes:
    """What a peer needs to know to reach this process on the same host; empty where /proc is not there."""
    try:
        boot = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
        namespace = os.stat("/proc/self/ns/pid").st_ino
        return struct.pack(_FORMAT, boot, namespace, os.getpid(), _start_time(os.getpid()))
    except (OSError, ValueError, IndexError):
        return b""


def same_host_pid(identity: bytes) -> int | None:
    """The peer's pid when it runs on this host, in this pid namespace, and is still the same process."""
    own = process_identity()
    if len(identity) != struct.calcsize(_FORMAT) or not own:
        return None
    boot, namespace, pid, started = struct.unpack(_FORMAT, identity)
    if (boot, namespace) != struct.unpack(_FORMAT, own)[:2] or not 0 < pid < 1 << 31:
        return None
    try:
        return pid if _start_time(pid) == started else None
    except (OSError, ValueError, IndexError):
        return None


class CmaReader:
    """Reads from one process. Holds no resource; any thread."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
        pointer, count = ctypes.c_void_p, ctypes.c_ulong
        self._readv.argtypes = [ctypes.c_int, pointer, count, pointer, count, count]
        self._readv.restype = ctypes.c_ssize_t

    def read(self, local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> None:
        """Copy ``nbytes[i]`` from ``remote[i]`` of the process to ``local[i]``. Blocks for the copy.

        Raises OSError when the kernel refuses, the process is gone, or its memory is not mapped there.
        """
        plan = CmaPlan(local, remote, nbytes)
        for piece in range(plan.pieces):
            self.copy(plan, piece)

    def copy(self, plan: CmaPlan, piece: int) -> None:
        """Copy one piece of a plan. Blocks; raises as `read`."""
        ours, num_ours, theirs, num_theirs, wanted = plan.call(piece)
        done = self._call(ours, num_ours, theirs, num_theirs)
        if done < wanted:
            self._finish(*plan.columns(piece), done)

    def _call(self, ours: int, num_ours: int, theirs: int, num_theirs: int) -> int:
        """One kernel call on two arrays of iovecs, given by address and length; bytes copied."""
        done: int = self._readv(self._pid, ours, num_ours, theirs, num_theirs, 0)
        if done <= 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code) if done < 0 else "nothing was read")
        return done

    def _finish(
        self, local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64], done: int
    ) -> None:
        """Go on after a partial copy, which may have ended inside an element."""
        for mine, theirs, size in zip(local.tolist(), remote.tolist(), nbytes.tolist(), strict=True):
            skip = min(done, size)
            done -= skip
            while skip < size:
                vectors = np.asarray([[mine + skip, size - skip], [theirs + skip, size - skip]], np.uint64)
                at = vectors.ctypes.data
                skip += self._call(at, 1, at + 16, 1)


class CmaPlan:
    """Many reads cut into pieces of about `piece_bytes`, one kernel call each, with the kernel's vectors made before.

    `piece_bytes` 0: as few pieces as the kernel's limit on vectors allows. Immutable.
    """

    __slots__ = ("_calls", "_columns", "_cuts", "_keep")

    def __init__(
        self, local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64], piece_bytes: int = 0
    ) -> None:
        if piece_bytes and len(nbytes) and int(nbytes.max()) > piece_bytes:
            local, remote, nbytes = _cut_large(local, remote, nbytes, piece_bytes)
        self._columns = local, remote, nbytes
        ends = np.cumsum(nbytes).tolist()
        self._cuts = _cuts(ends, piece_bytes)
        ours, theirs = _vectors(local, nbytes), _vectors(remote, nbytes)
        at, there = ours.ctypes.data, theirs.ctypes.data
        joinable = _has_neighbours(local, nbytes) or _has_neighbours(remote, nbytes)
        self._keep = [ours, theirs]
        self._calls: list[tuple[int, int, int, int, int]] = []
        for start, stop in itertools.pairwise(self._cuts):
            wanted = ends[stop - 1] - (ends[start - 1] if start else 0)
            if joinable:
                part = slice(start, stop)
                mine, other = _joined(local[part], nbytes[part]), _joined(remote[part], nbytes[part])
                self._keep += [mine, other]
                self._calls.append((mine.ctypes.data, len(mine), other.ctypes.data, len(other), wanted))
            else:
                count = stop - start
                self._calls.append((at + 16 * start, count, there + 16 * start, count, wanted))

    @property
    def pieces(self) -> int:
        """Number of kernel calls."""
        return len(self._calls)

    def call(self, piece: int) -> tuple[int, int, int, int, int]:
        """Address and length of the local and of the remote vectors, and the bytes they move."""
        return self._calls[piece]

    def columns(self, piece: int) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
        """Local address, remote address and size of the reads in a piece."""
        part = slice(self._cuts[piece], self._cuts[piece + 1])
        local, remote, nbytes = self._columns
        return local[part], remote[part], nbytes[part]


def _cuts(ends: list[int], piece_bytes: int) -> list[int]:
    """Indices between the pieces, first 0 and last ``len(ends)``."""
    cuts, start, before = [0], 0, 0
    for index, end in enumerate(ends, 1):
        if (piece_bytes and end - before >= piece_bytes) or index - start == _IOV_MAX or index == len(ends):
            cuts.append(index)
            start, before = index, end
    return cuts


def _cut_large(
    local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64], limit: int
) -> tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]:
    """The same reads, none larger than `limit`."""
    counts = -(-nbytes.astype(np.int64) // limit)
    which = np.repeat(np.arange(len(nbytes)), counts)
    inside = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    skip = (inside * limit).astype(np.uint64)
    return local[which] + skip, remote[which] + skip, np.minimum(nbytes[which] - skip, np.uint64(limit))


def _vectors(address: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """iovecs: address and bytes."""
    vectors = np.empty((len(address), 2), np.uint64)
    vectors[:, 0], vectors[:, 1] = address, nbytes
    return vectors


def _has_neighbours(address: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> bool:
    return bool((address[1:] == address[:-1] + nbytes[:-1]).any())


def _joined(address: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """iovecs, neighbours in memory joined."""
    starts = np.concatenate([[0], np.flatnonzero(address[1:] != address[:-1] + nbytes[:-1]) + 1])
    return _vectors(address[starts], np.add.reduceat(nbytes, starts))
