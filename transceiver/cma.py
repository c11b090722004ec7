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
        ours = np.column_stack((local, nbytes)).astype(np.uint64)
        theirs = np.column_stack((remote, nbytes)).astype(np.uint64)
        at = 0
        while at < len(ours):
            stop = min(at + _IOV_MAX, len(ours))
            done = self._readv(self._pid, ours[at:].ctypes.data, stop - at, theirs[at:].ctypes.data, stop - at, 0)
            if done <= 0:
                code = ctypes.get_errno()
                raise OSError(code, os.strerror(code) if done < 0 else "nothing was read")
            # A partial copy ends inside or after an element: go on from there.
            while done:
                step = min(done, int(ours[at, 1]))
                for side in (ours, theirs):
                    side[at, 0] += np.uint64(step)
                    side[at, 1] -= np.uint64(step)
                done -= step
                if not ours[at, 1]:
                    at += 1
