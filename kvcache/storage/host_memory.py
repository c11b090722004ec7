"""Page-aligned host memory, the base of every storage of this package.

`MappedMemory` owns one mapping, private to this process or backed by a memory file that processes of the same host may
map too; it advises huge pages where the kernel offers them, and knows its address. It must never be closed while
somebody holds a view.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import weakref
from contextlib import suppress
from pathlib import Path

__all__ = ["MappedMemory"]

_log = logging.getLogger(__name__)
_HUGE_PAGE = 2 << 20
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_F_SEAL_FUTURE_WRITE = 0x10  # linux/fcntl.h; Python 3.11 does not name it
_NO_FILES = "no shared memory for pools (%s): processes of this host will read them another way"


class MappedMemory:
    """`nbytes` zeroed bytes on a page boundary. `close` is idempotent and keeps the mapping while views are alive.

    `shared`: the bytes lie in a memory file (memfd_create(2)) of fixed size, whose descriptor is `fd`; a process that
    may open this process's descriptors can map the same bytes, to read them. Where the system has no such files, or
    promises every page beforehand (vm.overcommit_memory 2), the memory is private, `fd` is None, and the log says so.
    """

    def __init__(self, nbytes: int, *, shared: bool = False) -> None:
        self.nbytes = nbytes
        size = max(mmap.PAGESIZE, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)
        self.fd = _memory_file(size) if shared else None
        self._map: mmap.mmap | None
        if self.fd is None:
            self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            self._close_file = weakref.finalize(self, os.close, self.fd)
            self._map = mmap.mmap(self.fd, size, flags=mmap.MAP_SHARED)
            _seal(self.fd)
        if size >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # best effort: a kernel without transparent huge pages says EINVAL
                self._map.madvise(mmap.MADV_HUGEPAGE)
        anchor = ctypes.c_char.from_buffer(self._map)
        self.address = ctypes.addressof(anchor)
        del anchor

    def view(self) -> memoryview:
        """Writable bytes of the whole span. Raises ValueError after `close`."""
        if self._map is None:
            raise ValueError("the memory was closed")
        return memoryview(self._map)[: self.nbytes]

    def close(self) -> None:
        """Unmap, and close the memory file. Views still held keep the memory alive."""
        mapping, self._map = self._map, None
        if mapping is None:
            return
        if self.fd is not None:
            self.fd = None
            self._close_file()
        try:
            mapping.close()
        except BufferError:  # a view outlives us; the mapping goes with the last view
            del mapping


def _memory_file(size: int) -> int | None:
    """A memory file that never changes its size again, or None where the system has none for us."""
    if _pages_are_promised():
        _log.warning(_NO_FILES, "vm.overcommit_memory is 2")
        return None
    try:
        fd = os.memfd_create("kvferry-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except (AttributeError, OSError) as error:
        _log.warning(_NO_FILES, error)
        return None
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except OSError as error:
        os.close(fd)
        _log.warning(_NO_FILES, error)
        return None
    return fd


def _seal(fd: int) -> None:
    """From now on nobody can write through a new mapping or the descriptor, whoever may open it; nor lift a seal."""
    with suppress(OSError):  # Linux before 5.1
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)


def _pages_are_promised() -> bool:
    """The system refuses what it may not have (strict overcommit): a memory file would be found too large only later,
    and end whoever touches a page too many."""
    try:
        return _OVERCOMMIT.read_text().strip() == "2"
    except OSError:
        return False
