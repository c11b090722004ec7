"""Batched reads of another process's memory on the same host: one `process_vm_readv` for many pages.

It is the kernel call that UCX's cma lane makes for each read; here a whole batch goes down at once, which is what
scattered pages need. Used by `transceiver.ucx` only on links whose UCX endpoint has a cma lane, to a process whose
identity the handshake has brought. Where the kernel refuses, the caller goes on with UCX's own reads.
"""

from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["CmaReader", "process_identity", "same_host_pid"]

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
    """Reads from one process. Holds no resource."""

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
        start = 0
        while start < len(local):
            stop = min(start + _IOV_MAX, len(local))
            part = slice(start, stop)
            ours, theirs = _joined(local[part], nbytes[part]), _joined(remote[part], nbytes[part])
            done = self._call(ours, theirs)
            if done < int(nbytes[part].sum()):
                self._finish(local[part], remote[part], nbytes[part], done)
            start = stop

    def _call(self, ours: NDArray[np.uint64], theirs: NDArray[np.uint64]) -> int:
        done: int = self._readv(self._pid, ours.ctypes.data, len(ours), theirs.ctypes.data, len(theirs), 0)
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
                one = [np.asarray([[at + skip, size - skip]], np.uint64) for at in (mine, theirs)]
                skip += self._call(*one)


def _joined(address: NDArray[np.uint64], nbytes: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """iovecs (address, bytes), neighbours in memory joined."""
    starts = np.concatenate([[0], np.flatnonzero(address[1:] != address[:-1] + nbytes[:-1]) + 1])
    return np.column_stack((address[starts], np.add.reduceat(nbytes, starts)))
