"""What is decided for CUDA memory, without a GPU: registration, transports, and that the kernel never copies it."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache.storage.bytes_storage import BytesPageStorage
from kvcache.storage.page_storage import MemoryRegion
from tests.unit.transceiver.rig import make_layout, make_storage
from transceiver.cma import CmaReader
from transceiver.device_memory import host_may_copy, memory_type, tls_with_devices
from transceiver.digest import block_digest
from transceiver.errors import WireFormatError
from transceiver.handshake import PeerLayout, pack_layout, unpack_layout
from transceiver.page_part import PoolShape, part_between
from transceiver.parallel_layout import Interval, RankShare
from transceiver.pull_reads import Rows, plan_segments
from transceiver.transport import ReadBatch
from transceiver.ucp_binding import UcpBinding
from transceiver.ucx_fabric import UcxFabric
from transceiver.ucx_link import UcxLink, UcxRemoteRegion


@pytest.mark.parametrize(("device", "number"), [("cpu", 0), ("cuda:0", 1), ("cuda:7", 1)])
def test_memory_types(device: str, number: int) -> None:
    assert memory_type(device) == number


def test_other_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="xpu:0 memory"):
        memory_type("xpu:0")


@pytest.mark.parametrize(
    ("tls", "devices", "expected"),
    [
        ("tcp,cma", ("cpu",), "tcp,cma"),
        ("tcp,cma", (), "tcp,cma"),
        ("tcp,cma", ("cuda:0",), "tcp,cma,cuda_copy,cuda_ipc"),
        ("tcp,cma", ("cpu", "cuda:1"), "tcp,cma,cuda_copy,cuda_ipc"),
        ("tcp,cuda_copy", ("cuda:0",), "tcp,cuda_copy,cuda_ipc"),
        ("all", ("cuda:0",), "all"),
        ("^cma", ("cuda:0",), "^cma"),
    ],
)
def test_transports(tls: str, devices: tuple[str, ...], expected: str) -> None:
    assert tls_with_devices(tls, devices) == expected


KEY = bytes(9)  # no memory domain, host memory


class _Calls:
    """Stands for UCX and for the kernel's copies: notes what is asked of either."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices, self.gets, self.copied = devices, 0, 0
        self.no_cma: dict[str, str] = {}
        self.copies = SimpleNamespace(add=self._copy)

    def _copy(self, *_: object) -> None:
        self.copied += 1

    def device_of(self, registration: int | None) -> str:
        return "cpu" if registration is None else self.devices[registration - 1]

    def get(self, *_: object) -> int:
        self.gets += 1
        return 0

    def get_param(self, _: object) -> None:
        return None


@pytest.mark.parametrize(
    ("here", "there", "kernel"),
    [("cpu", "cpu", True), ("cuda:0", "cpu", False), ("cpu", "cuda:0", False), ("cuda:0", "cuda:1", False)],
)
def test_the_kernel_copies_host_memory_only(here: str, there: str, kernel: bool) -> None:
    assert host_may_copy(there, here) is kernel
    calls = _Calls((here,))
    owner: Any = calls
    fabric: Any = SimpleNamespace(ucp=calls, get_param=calls.get_param, unpack_key=lambda *_: 5)
    link = UcxLink(owner, fabric, SimpleNamespace(handle=1), "peer")
    link.cma = CmaReader(os.getpid())
    link.get(ReadBatch.single(4096, 0, 64), UcxRemoteRegion(8192, 64, b"key", there), 1, "token")
    assert (calls.copied, calls.gets) == ((1, 0) if kernel else (0, 1))
    link.get(ReadBatch.single(4096, 0, 8), UcxRemoteRegion(8192, 64, b"key"), None, "generation numbers: always host")
    assert calls.copied == (2 if kernel else 1)


@pytest.mark.parametrize(("device", "number"), [("cpu", 0), ("cuda:1", 1)])
def test_regions_are_registered_with_their_memory_type(device: str, number: int) -> None:
    asked: list[tuple[object, ...]] = []
    fabric = UcxFabric.__new__(UcxFabric)
    binding: Any = SimpleNamespace(map_memory=lambda *a: asked.append(a) or 7, pack_key=lambda *_: KEY)
    context: Any = SimpleNamespace(handle=1)
    fabric.ucp, fabric.context, fabric._regions = binding, context, {}
    fabric._keys_are_known = True
    assert fabric.map(1, MemoryRegion(4096, 64, 64, device)) == KEY
    assert asked == [(1, 4096, 64, number)]


def test_ucp_mem_map_is_told_the_memory_type() -> None:
    seen: dict[str, int] = {}

    def mem_map(_context: int, params: Any, _handle: Any) -> int:
        fields = params._obj
        seen.update(mask=fields.field_mask, memory_type=fields.memory_type, length=fields.length)
        return 0

    binding = UcpBinding.__new__(UcpBinding)
    library: Any = SimpleNamespace(ucp_mem_map=mem_map)
    binding._lib = library
    binding.map_memory(1, 4096, 64, 1)
    assert seen == {"mask": 0x17, "memory_type": 1, "length": 64}


class _OnDevice(BytesPageStorage):
    """Host memory that says that it is a GPU's: pages can only be had as copies."""

    device = "cuda:0"

    def page(self, page: int, group: int = 0) -> memoryview:
        raise AssertionError("device memory has no host view")

    def read_page(self, page: int, group: int = 0):  # type: ignore[no-untyped-def]
        view = BytesPageStorage.page(self, page, group)
        return np.frombuffer(bytes(view), np.uint8).reshape(len(self.layout.groups[group].layers), -1)


@pytest.mark.parametrize("valid", [8, 3])
def test_digests_of_device_pages_equal_those_of_host_pages(valid: int) -> None:
    host, device = make_storage(pages=(2,), fill=3), _OnDevice(make_layout(), [2])
    device._views[0][:] = host._views[0]
    part = part_between(
        8, host.layout.groups[0], RankShare(2, Interval(0, 2)), make_layout(num_kv_heads=1).groups[0],
        RankShare(2, Interval(1, 2)),
    )  # fmt: skip
    assert part is not None
    assert block_digest(device, 0, 1, valid) == block_digest(host, 0, 1, valid)
    assert block_digest(device, 0, 1, valid, part.holder) == block_digest(host, 0, 1, valid, part.holder)
    host.close()
    device.close()


def test_nothing_is_staged_into_device_memory() -> None:
    layout = make_layout(num_kv_heads=1)
    part = part_between(
        8, make_layout().groups[0], RankShare(2, Interval(0, 2)), layout.groups[0], RankShare(2, Interval(1, 2))
    )
    numbers = np.arange(2, dtype=np.int32)
    rows = Rows(numbers * 0, numbers, numbers * 0 + 8, numbers, numbers, numbers.astype(np.uint64))
    for storage, staged in ((make_storage(layout, (2,)), True), (_OnDevice(layout, [2]), False)):
        segments = list(
            plan_segments(rows, np.arange(2), storage, (part,), [make_layout().page_bytes()], 1 << 20, 1 << 16)
        )
        assert [segment.staged for segment in segments] == [staged]
        storage.close()


def test_the_handshake_says_where_pools_lie() -> None:
    own = PeerLayout(make_layout(), None, (PoolShape(True, 7, "cuda:1"),))
    assert unpack_layout(pack_layout(own))[1] == own
    for wrong in (PoolShape(num_pages=0), PoolShape(device="disk"), PoolShape(num_pages=1 << 31)):
        with pytest.raises(WireFormatError):
            unpack_layout(pack_layout(PeerLayout(make_layout(), None, (wrong,))))
