"""One UCX context with one worker, and the memory registered with it. Used by `transceiver.ucx` in its thread."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

from kvcache.storage.page_storage import MemoryRegion
from transceiver.device_memory import memory_type
from transceiver.ucp_binding import UcpBinding, UcpError
from transceiver.ucx_link import AM_ID
from transceiver.ucx_remote_reads import DATA_AM_ID, READ_AM_ID

__all__ = ["BASE_OPTIONS", "UcxFabric", "key_is_sound"]

_MAX_DRAIN = 64
_KEY_HEAD = struct.Struct("<QB")  # memory domains, one bit each; type of the memory
BASE_OPTIONS = {
    # With rendezvous on, an error-handling endpoint may not use cma; without it, reads go over cma at full speed.
    "RNDV_THRESH": "inf",
    # A read over plain TCP is emulated by the peer, whose answer needs the id of our endpoint.
    "RESOLVE_REMOTE_EP_ID": "y",
    "KEEPALIVE_INTERVAL": "1s",
    "TCP_TX_SEG_SIZE": "256K",
    "TCP_RX_SEG_SIZE": "1M",
}


class UcxFabric:
    """One UCX context with one worker, and the memory registered with it."""

    def __init__(
        self, api: Any, options: dict[str, str], on_message: Callable[[int, int, int], None],
        on_ask: Callable[[int, int, int], None], on_data: Callable[[int, bytes, int, int], None],
    ) -> None:  # fmt: skip
        feature = api.Feature
        self.api = api
        self.context = api.UCXContext(options, (feature.AM, feature.RMA, feature.WAKEUP))
        self.worker = api.UCXWorker(self.context, False, False)
        self.worker.init_blocking_progress_mode()
        self.ucp = UcpBinding()
        self.handle: int = self.worker.handle
        self.event_fd: int = self.worker.epoll_file_descriptor
        self._keep = (
            self.ucp.on_message(self.handle, AM_ID, on_message),
            self.ucp.on_message(self.handle, READ_AM_ID, on_ask),
            self.ucp.on_data(self.handle, DATA_AM_ID, on_data),
        )
        self._regions: dict[int, int] = {}  # registration -> UCX memory handle
        self._params: dict[int, ctypes.Structure] = {}
        self._keys_are_known = True  # until UCX packs one of ours in another form

    def map(self, registration: int, region: MemoryRegion) -> bytes:
        """Register memory under the transport's number; returns its packed key."""
        handle = self.ucp.map_memory(self.context.handle, region.address, region.nbytes, memory_type(region.device))
        self._regions[registration] = handle
        key = self.ucp.pack_key(self.context.handle, handle)
        self._keys_are_known = self._keys_are_known and key_is_sound(key)
        return key

    def unpack_key(self, endpoint: int, key: bytes) -> int:
        """A peer's key, usable on `endpoint`. Raises UcpError for bytes that are no key: UCX itself would read past
        their end, for it is not told where that is."""
        if self._keys_are_known and not key_is_sound(key):
            raise UcpError("not a memory key")
        return self.ucp.unpack_key(endpoint, key)

    def get_param(self, registration: int | None) -> ctypes.Structure:
        """The reusable parameter block of reads into a registered region (None: unregistered memory)."""
        key = registration or 0
        param = self._params.get(key)
        if param is None:
            param = self._params[key] = self.ucp.get_param(self._regions.get(key))
        return param

    def progress(self) -> bool:
        """One step of UCX; True when something happened."""
        return bool(self.ucp.progress(self.handle))

    def close(self) -> None:
        """Unregister everything. Endpoints and listeners must be gone."""
        for am_id in (AM_ID, READ_AM_ID, DATA_AM_ID):
            self.ucp.on_message(self.handle, am_id, None)
        for _ in range(_MAX_DRAIN):
            if not self.progress():
                break
        for handle in self._regions.values():
            self.ucp.unmap_memory(self.context.handle, handle)
        self._regions.clear()
        self.worker = None
        self.context = None


def key_is_sound(key: bytes) -> bool:
    """Whether a packed memory key ends where it says: for each memory domain a length in one byte, and so many bytes.

    As `ucp_rkey_pack` of UCX 1.16 to 1.21 lays them out (ucp_rkey.c); where the memory lies in the machine may follow.
    """
    if len(key) < _KEY_HEAD.size:
        return False
    domains, _ = _KEY_HEAD.unpack_from(key)
    at = _KEY_HEAD.size
    for _ in range(domains.bit_count()):
        if at >= len(key):
            return False
        at += 1 + key[at]
    return at <= len(key)
