"""Pools in private and in shared memory: zeroed, one address, a file of fixed size, nothing open after close."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest

from kvcache.storage.bytes_storage import BytesPageStorage
from kvcache.storage.host_memory import MappedMemory
from kvcache.storage.layer_major_storage import LayerMajorStorage
from tests.unit.transceiver.rig import make_layout


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 3 << 20])
def test_the_memory_is_zeroed_page_aligned_and_keeps_what_is_written(nbytes: int, shared: bool) -> None:
    memory = MappedMemory(nbytes, shared=shared)
    view = np.frombuffer(memory.view(), np.uint8)
    assert (memory.address % 4096, len(view), int(view.max())) == (0, nbytes, 0)
    view[-1] = 9
    assert (memory.fd is not None) is shared
    if memory.fd is not None:
        assert os.pread(memory.fd, 1, nbytes - 1) == b"\x09"
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, 0)
    memory.close()
    memory.close()
    assert int(view[-1]) == 9  # a view outlives the memory
    assert memory.fd is None
    with pytest.raises(ValueError, match="closed"):
        memory.view()


@pytest.mark.parametrize("storage", [BytesPageStorage, LayerMajorStorage])
def test_a_shared_pool_names_its_file(storage: type[BytesPageStorage]) -> None:
    pools = storage(make_layout(), [4], shared=True)
    for region in (pools.region(), pools.generations_region()):
        assert region.shared_fd is not None
        assert os.fstat(region.shared_fd).st_size >= region.nbytes
    pools.generations()[2] = 77
    region = pools.generations_region()
    assert region.shared_fd is not None
    assert int.from_bytes(os.pread(region.shared_fd, 8, 16), "little") == 77
    pools.close()
    private = storage(make_layout(), [4])
    assert private.region().shared_fd is None
    private.close()


def test_where_pages_are_promised_the_pool_is_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A memory file's pages are counted when they are touched: with vm.overcommit_memory 2 that would be a SIGBUS."""
    setting = tmp_path / "overcommit_memory"
    for value, shared in (("0", True), ("2", False)):
        setting.write_text(f"{value}\n")
        monkeypatch.setattr("kvcache.storage.host_memory._OVERCOMMIT", setting)
        memory = MappedMemory(4096, shared=True)
        assert (memory.fd is not None) is shared
        memory.close()


@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_where_there_are_no_memory_files_the_pool_is_private(
    call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, call, refuse)
    memory = MappedMemory(4096, shared=True)
    monkeypatch.undo()
    assert memory.fd is None
    assert len(memory.view()) == 4096
    assert "no shared memory for pools" in caplog.text
    assert len(os.listdir("/proc/self/fd")) == before
    memory.close()
