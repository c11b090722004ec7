"""What of the NIXL backend needs no NIXL: its keys, its memory kinds, and what is said where it is missing."""

from __future__ import annotations

import sys

import pytest

from tests.unit.transceiver.rig import SECRET, make_storage
from transceiver import CacheTransceiver, CacheTransceiverConfig, TransceiverBackend, TransportUnavailableError
from transceiver.errors import TransceiverError
from transceiver.nixl_fabric import memory_of
from transceiver.nixl_link import pack_region_key, unpack_region_key
from transceiver.testing import FaultInjector

CONFIG = CacheTransceiverConfig(backend=TransceiverBackend.NIXL)


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    storage = make_storage()
    transceiver = CacheTransceiver(worker_id="w", storage=storage, config=CONFIG, secret=SECRET)
    with pytest.raises(TransportUnavailableError, match=r"pip install 'kvferry\[nixl\]'"):
        transceiver.start()
    transceiver.close()
    storage.close()


def test_faults_are_for_inproc() -> None:
    storage = make_storage()
    with pytest.raises(TransportUnavailableError, match="inproc only"):
        CacheTransceiver(worker_id="w", storage=storage, config=CONFIG, secret=SECRET, faults=FaultInjector())
    storage.close()


def test_keys_say_which_memory_they_are_for() -> None:
    assert unpack_region_key(pack_region_key("VRAM", 3, b"metadata")) == ("VRAM", 3, b"metadata")
    assert unpack_region_key(pack_region_key("DRAM", 0, b"m")) == ("DRAM", 0, b"m")
    for wrong in (b"", b"\0\0\0\0\0", b"\2\0\0\0\0meta", b"inproc"):
        with pytest.raises(TransceiverError, match="not for the nixl transport"):
            unpack_region_key(wrong)


@pytest.mark.parametrize(
    ("device", "memory"),
    [("cpu", ("DRAM", 0)), ("cuda:0", ("VRAM", 0)), ("cuda:2", ("VRAM", 2)), ("cuda", ("VRAM", 0))],
)
def test_kinds_of_memory(device: str, memory: tuple[str, int]) -> None:
    assert memory_of(device) == memory
