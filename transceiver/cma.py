"""Batched reads of another process's memory on the same host: one `process_vm_readv` for many pages.

It is the kernel call that UCX's cma lane makes for each read; here a whole batch goes down at once, which is what
scattered pages need. Used by `transceiver.ucx` only on links whose UCX endpoint has a cma lane, to a process whose
identity the handshake has brought. Where the kernel refuses, the caller goes on with UCX's own reads.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import struct
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from transceiver.copy_plan import FEW_READS, CopyPlan

__all__ = ["CmaPlan", "CmaReader", "has_ended", "may_read_self", "process_identity", "same_host_pid"]

_Vectors: TypeAlias = "array[int] | NDArray[np.uint64]"
_FORMAT = "<16sQQQ"  # boot id, pid namespace, pid, start time of the process


def _start_time(pid: int) -> int:
    """Clock ticks since boot at which `pid` started (tells a reused pid from the process it was)."""
    stat = Path(f"/proc/{pid}/stat").read_text()
    return int(stat.rpartition(")")[2].split()[19])


def process_identity() -> bytes:
    """What a peer needs to know to reach this process on the same host; empty where /proc is not there."""
    try:
        return _identity_of(os.getpid())
    except (OSError, ValueError, IndexError):
        return b""


@functools.lru_cache(maxsize=1)  # found out once, while there are descriptors for it
def _identity_of(own_pid: int) -> bytes:
    boot = bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return struct.pack(_FORMAT, boot, namespace, own_pid, _start_time(own_pid))


def has_ended(identity: bytes) -> bool:
    """True when the process of this identity ran on this host and is gone, or dead and not yet waited for."""
    own = process_identity()
    if len(identity) != struct.calcsize(_FORMAT) or not own:
        return False
    boot, namespace, pid, started = struct.unpack(_FORMAT, identity)
    if (boot, namespace) != struct.unpack(_FORMAT, own)[:2]:
        return False
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return fields[0] in "ZX" or int(fields[19]) != started
    except FileNotFoundError:
        return True
    except (OSError, ValueError, IndexError):
        return False


def same_host_pid(identity: bytes) -> int | None:
    """The peer's pid when it runs on this host, in this pid namespace, and is still the same process.

    Raises OSError where that cannot be found out (no descriptor left).
    """
    own = process_identity()
    if len(identity) != struct.calcsize(_FORMAT) or not own:
        return None
    boot, namespace, pid, started = struct.unpack(_FORMAT, identity)
    if (boot, namespace) != struct.unpack(_FORMAT, own)[:2] or not 0 < pid < 1 << 31:
        return None
    try:
        return pid if _start_time(pid) == started else None
    except (FileNotFoundError, ProcessLookupError, PermissionError, ValueError, IndexError):
        return None


@functools.lru_cache(maxsize=1)
def may_read_self(own_pid: int) -> bool:
    """The kernel lets this process make the call at all (Yama leaves a process itself alone; seccomp does not)."""
    source, target = np.full(1, 7, np.uint64), np.zeros(1, np.uint64)
    size = np.full(1, 8, np.uint64)
    try:
        CmaReader(own_pid).read(
            np.full(1, target.ctypes.data, np.uint64), np.full(1, source.ctypes.data, np.uint64), size
        )
    except OSError:
        return False
    return bool(target[0] == 7)


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

    def plan(
        self, local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64], piece_bytes: int,
        *, cut: bool,
    ) -> CmaPlan:  # fmt: skip
        """See `HostReader`; remote addresses are the process's own."""
        return CmaPlan(local, remote, nbytes, piece_bytes, cut=cut)

    def copy(self, plan: CopyPlan, piece: int) -> None:
        """Copy one piece of a `CmaPlan`. Blocks; raises as `read`."""
        assert isinstance(plan, CmaPlan)
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

    def _finish(self, local: Sequence[int], remote: Sequence[int], nbytes: Sequence[int], done: int) -> None:
        """Go on after a partial copy, which may have ended inside an element."""
        for mine, theirs, size in zip(local, remote, nbytes, strict=True):
            skip = min(done, size)
            done -= skip
            while skip < size:
                vectors = np.asarray([[mine + skip, size - skip], [theirs + skip, size - skip]], np.uint64)
                at = vectors.ctypes.data
                skip += self._call(at, 1, at + 16, 1)


class CmaPlan(CopyPlan):
    """A plan with the kernel's vectors made before: one call a piece."""

    __slots__ = ("_calls", "_keep")

    def __init__(
        self, local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64], piece_bytes: int = 0,
        *, cut: bool = True,
    ) -> None:  # fmt: skip
        super().__init__(local, remote, nbytes, piece_bytes, cut=cut)
        self._calls: list[tuple[int, int, int, int, int]] = []
        self._keep: list[object] = []
        few = len(nbytes) <= FEW_READS
        for piece, (start, stop) in enumerate(itertools.pairwise(self.cuts)):
            mine, theirs, sizes = self.columns(piece)
            if few:
                self._add(_joined_list(mine, sizes), _joined_list(theirs, sizes), sum(sizes))
            else:
                part = slice(start, stop)
                self._add(_joined(local[part], nbytes[part]), _joined(remote[part], nbytes[part]), sum(sizes))

    def _add(self, ours: _Vectors, theirs: _Vectors, nbytes: int) -> None:
        self._keep += [ours, theirs]
        self._calls.append((*_address(ours), *_address(theirs), nbytes))

    def call(self, piece: int) -> tuple[int, int, int, int, int]:
        """Address and length of the local and of the remote vectors, and the bytes they move."""
        return self._calls[piece]


def _address(vectors: _Vectors) -> tuple[int, int]:
    """Where iovecs lie, and how many they are."""
    if isinstance(vectors, array):
        at, items = vectors.buffer_info()
        return at, items // 2
    return vectors.ctypes.data, len(vectors)


def _joined_list(address: Sequence[int], nbytes: Sequence[int]) -> array[int]:
    """iovecs (address, bytes), neighbours in memory joined."""
    vectors = array("Q")
    end = -1
    for at, size in zip(address, nbytes, strict=True):
        if at == end:
            vectors[-1] += size
        else:
            vectors.extend((at, size))
        end = at + size
    return vectors


def _joined(address: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """As `_joined_list`, for many."""
    apart = address[1:] != address[:-1] + nbytes[:-1]
    if not apart.all():
        starts = np.concatenate([[0], np.flatnonzero(apart) + 1])
        address, nbytes = address[starts], np.add.reduceat(nbytes, starts)
    vectors = np.empty((len(address), 2), np.uint64)
    vectors[:, 0], vectors[:, 1] = address, nbytes
    return vectors
