"""A peer's pool in shared memory, mapped into this process: reads of it are plain copies, no kernel call moves a byte.

Used by `transceiver.ucx` only, for regions whose holder says in which of its memory files they lie, and only between
processes of one host and pid namespace. A copy from a mapping is about twice as fast as `process_vm_readv`, which looks
up every 4 KiB of the peer's memory, and it is allowed where Yama or another user's limits forbid that call
(opening ``/proc/PID/fd/N`` needs less: ptrace(2), PTRACE_MODE_READ). The mapping stays valid when the peer dies.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from transceiver.cma import same_host_pid
from transceiver.copy_plan import CopyPlan

__all__ = ["PeerMemory"]

_memcpy = ctypes.CDLL(None).memcpy  # called without the interpreter's lock
_memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memcpy.restype = ctypes.c_void_p


class PeerMemory:
    """The first `nbytes` of a memory file of the process with this identity, readable at `address` and as `view`.

    Any thread. The mapping goes with the last reference. Raises OSError when the kernel does not let us, the process is
    gone, or the file is not one whose size is sealed (a file that shrinks would end this process with SIGBUS).
    """

    __slots__ = ("address", "nbytes", "view")
    least_shared_read = 32 << 10  # below, two threads would wait for each other's turn at the interpreter's lock

    def __init__(self, identity: bytes, fd: int, nbytes: int) -> None:
        pid = same_host_pid(identity)
        if pid is None:
            raise ProcessLookupError(errno.ESRCH, "not a living process of this host and pid namespace")
        file = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            if same_host_pid(identity) != pid:
                raise ProcessLookupError(errno.ESRCH, "the process has ended")
            if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise OSError(errno.EINVAL, "not a memory file of fixed size")
            if os.fstat(file).st_size < nbytes:
                raise OSError(errno.EINVAL, "the memory file is smaller than the region")
            mapping = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        with suppress(OSError, AttributeError):
            mapping.madvise(mmap.MADV_DONTDUMP)  # another process's memory has no place in our core dump
        self.view: NDArray[np.uint8] = np.frombuffer(mapping, np.uint8)
        self.address: int = self.view.ctypes.data
        self.nbytes = nbytes

    def plan(
        self, local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64], piece_bytes: int,
        *, cut: bool,
    ) -> CopyPlan:  # fmt: skip
        """See `HostReader`; remote addresses are those of the mapping."""
        return CopyPlan(local, remote, nbytes, piece_bytes, cut=cut)

    def copy(self, plan: CopyPlan, piece: int) -> None:
        """Copy one piece of a plan whose remote addresses lie in this mapping. Blocks for the copy."""
        for mine, theirs, size in zip(*plan.columns(piece), strict=True):
            _memcpy(mine, theirs, size)
