"""A peer's pool in shared memory, mapped into this process: reads of it are plain copies, the kernel moves no byte.

Used by `transceiver.ucx` only, for regions whose holder says in which of its memory files they lie, and only between
processes of one host and pid namespace. It is allowed where Yama forbids `process_vm_readv` between processes of one
user: opening ``/proc/PID/fd/N`` needs less (ptrace(2), PTRACE_MODE_READ). The mapping stays valid when the peer dies.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import weakref
from typing import Any

import numpy as np
from numpy.typing import NDArray

from transceiver.cma import CmaPlan, CmaReader, may_read_self, same_host_pid
from transceiver.copy_plan import CopyPlan

__all__ = ["PeerMemory"]

_O_PATH = getattr(os, "O_PATH", 0)
_PROT_READ, _MAP_SHARED, _MAP_FAILED = 1, 1, ctypes.c_void_p(-1).value
_MADV_DONTFORK, _MADV_DONTDUMP = 10, 16
_LARGE_READ = 256 << 10  # bytes on average
_MANY_BYTES = 768 << 10  # worth the helpers: see `host_copies`


def _functions(library: ctypes.CDLL) -> Any:
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.memcpy.argtypes, library.memcpy.restype = [address, address, size], address
    library.mmap.argtypes, library.mmap.restype = [address, size, number, number, number, ctypes.c_long], address
    library.munmap.argtypes = [address, size]
    library.madvise.argtypes = [address, size, number]
    return library


_libc = _functions(ctypes.CDLL(None, use_errno=True))  # its calls run without the interpreter's lock
_memcpy_locked = _functions(ctypes.PyDLL(None)).memcpy  # and this one with it


class _Mapping:
    """Mapped bytes that are unmapped with the last array over them. No descriptor stays open, no fork inherits them."""

    def __init__(self, file: int, nbytes: int) -> None:
        address = _libc.mmap(None, nbytes, _PROT_READ, _MAP_SHARED, file, 0)
        if address == _MAP_FAILED:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False
        for advice in (_MADV_DONTFORK, _MADV_DONTDUMP):  # another process's memory has no place in a core dump
            _libc.madvise(address, nbytes, advice)
        self.__array_interface__ = {"data": (address, True), "shape": (nbytes,), "typestr": "|u1", "version": 3}


class _FewSmall(CopyPlan):
    """Small reads that are done before a helper has woken up, or that the kernel does not copy."""


class PeerMemory:
    """The first `nbytes` of a memory file of the process with this identity, readable at `address` and as `view`.

    Any thread. The mapping goes with the last reference to this and to arrays over `view`. Raises OSError when the
    kernel does not let us, the process is gone, or the descriptor is not (or no longer) kvferry's pool with that inode,
    of sealed size (a file that shrinks would end this process with SIGBUS). Never blocks on whatever a peer names.
    """

    __slots__ = ("_own", "address", "nbytes", "view")

    def __init__(self, identity: bytes, fd: int, inode: int, nbytes: int) -> None:
        if nbytes <= 0:
            raise OSError(errno.EINVAL, "an empty region")
        file = _open_pool(identity, fd, inode, nbytes)
        try:
            self.view: NDArray[np.uint8] = np.asarray(_Mapping(file, nbytes))
        finally:
            os.close(file)
        self.address: int = self.view.ctypes.data
        self.nbytes = nbytes
        self._own = CmaReader(os.getpid())

    def plan(
        self, local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64], piece_bytes: int,
        *, cut: bool,
    ) -> CopyPlan:  # fmt: skip
        """See `HostReader`; remote addresses are those of the mapping."""
        total = int(nbytes.sum())
        if total >= _LARGE_READ * len(nbytes):
            kind: type[CopyPlan] = CopyPlan
        else:
            kind = CmaPlan if total >= _MANY_BYTES and may_read_self(os.getpid()) else _FewSmall
        return kind(local, remote, nbytes, piece_bytes, cut=cut)

    def copy(self, plan: CopyPlan, piece: int) -> None:
        """Copy one piece of a plan whose remote addresses lie in this mapping. Blocks for the copy.

        After every call that gives up the interpreter's lock a busy thread of this process (an engine loop) may take
        it for 5 ms. So there are few such calls: one for a large read, one kernel call on this process's own memory for
        a piece of many small reads (where it allows them), none for a few.
        """
        if isinstance(plan, CmaPlan):
            self._own.copy(plan, piece)
            return
        memcpy = _memcpy_locked if isinstance(plan, _FewSmall) else _libc.memcpy
        for mine, theirs, size in zip(*plan.columns(piece), strict=True):
            memcpy(mine, theirs, size)


def _open_pool(identity: bytes, fd: int, inode: int, nbytes: int) -> int:
    """A descriptor of the peer's pool, to read. Raises OSError."""
    pid = same_host_pid(identity)
    if pid is None:
        raise ProcessLookupError(errno.ESRCH, "not a living process of this host and pid namespace")
    flags = os.O_RDONLY | os.O_CLOEXEC
    named = os.open(f"/proc/{pid}/fd/{fd}", flags | _O_PATH)  # does not open the file itself: that may block
    try:
        if same_host_pid(identity) != pid:
            raise ProcessLookupError(errno.ESRCH, "the process has ended")
        if not os.readlink(f"/proc/self/fd/{named}").startswith("/memfd:kvferry-pool"):
            raise OSError(errno.EINVAL, "not a pool in a memory file")
        facts = os.fstat(named)
        if facts.st_ino != inode:
            raise OSError(errno.ESTALE, "another pool has taken this one's place")
        if facts.st_size < nbytes:
            raise OSError(errno.EINVAL, "the memory file is smaller than the region")
        file = os.open(f"/proc/self/fd/{named}", flags)
    finally:
        os.close(named)
    if fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        return file
    os.close(file)
    raise OSError(errno.EINVAL, "not a memory file of fixed size")
