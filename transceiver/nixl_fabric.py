"""One NIXL agent: registered memory, known peers, reads under way. Used by `transceiver.nixl_transport` in its thread.

Every call into `nixl` is here. It raises one class per status, all plain exceptions; they become the transceiver's own.
The agent has no progress thread (it would spin): `turn` moves things on.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvcache.storage.page_storage import MemoryRegion
from transceiver.errors import TransceiverError, TransportUnavailableError
from transceiver.nixl_link import NixlRead, NixlRemoteRegion, pack_region_key
from transceiver.transport import ReadBatch

if TYPE_CHECKING:
    from transceiver.nixl_link import NixlLink

__all__ = ["NixlFabric", "memory_of"]

_log = logging.getLogger(__name__)
_PLUGIN = "UCX"


def memory_of(device: str) -> tuple[str, int]:
    """NIXL's kind of memory and device number for a region's device."""
    kind, _, number = device.partition(":")
    return ("DRAM", 0) if kind == "cpu" else ("VRAM", int(number or 0))


class NixlFabric:
    """Made for one transport. Raises TransportUnavailableError when NIXL cannot start here."""

    def __init__(self, name: str, options: dict[str, str]) -> None:
        os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # read once; a lost peer is an outcome here, logged by us
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except (ImportError, OSError) as error:
            raise TransportUnavailableError(
                f"backend nixl needs the package nixl, which is not here ({error}): pip install 'kvferry[nixl]'"
            ) from error
        try:
            self._agent: Any = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
            self._agent.create_backend(_PLUGIN, dict(options))
        except Exception as error:
            raise TransportUnavailableError(
                f"NIXL's {_PLUGIN} backend cannot start: {error!r}; check cache_transceiver_config.nixl_options"
            ) from error
        self._regions: list[tuple[str, int]] = []  # (kind of memory, device) of registration 1, 2, ...
        self._registered: list[Any] = []
        self._users: dict[str, int] = {}  # how many links use a known peer
        self.reads: list[NixlRead] = []

    def register(self, region: MemoryRegion) -> tuple[int, bytes]:
        """Register memory; returns its number and the key for peers. Raises TransceiverError."""
        memory, device = memory_of(region.device)
        try:
            registered = self._agent.register_memory([(region.address, region.nbytes, device, "")], memory, [_PLUGIN])
            metadata = self._agent.get_partial_agent_metadata(registered, True, [_PLUGIN])
        except Exception as error:
            raise TransceiverError(
                f"NIXL cannot register {region.nbytes} bytes of {region.device} memory: {error!r}"
            ) from error
        self._registered.append(registered)
        self._regions.append((memory, device))
        return len(self._regions), pack_region_key(memory, device, metadata)

    def load(self, link: NixlLink, metadata: bytes) -> str:
        """Make a peer's agent and region known to ours; returns its name. Raises TransceiverError."""
        try:
            loaded = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise TransceiverError(f"the memory key of {link.peer} cannot be used: {error!r}") from error
        name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if name not in link.agents:
            link.agents.add(name)
            self._users[name] = self._users.get(name, 0) + 1
        return name

    def unload(self, link: NixlLink) -> None:
        """Forget the peer of a closed link when no other link and no read needs it."""
        if self.has_reads(link):
            return
        while link.agents:
            name = link.agents.pop()
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name]
                try:
                    self._agent.remove_remote_agent(name)
                except Exception as error:
                    _log.debug("NIXL does not forget %s: %r", name, error)

    def has_reads(self, link: NixlLink) -> bool:
        """True while a read of `link` is under way."""
        return any(read.link is link for read in self.reads)

    def start(
        self, link: NixlLink, batch: ReadBatch, remote: NixlRemoteRegion, region: int | None, token: object
    ) -> NixlRead:
        """Start a batch of reads; it is in `reads` from before NIXL may write until `turn` has returned it.

        Raises TransceiverError when nothing was started. A start that NIXL breaks off may have begun: that one is kept,
        with its `error`.
        """
        memory, device = ("DRAM", 0) if region is None else self._regions[region - 1]
        scratch = None
        try:
            if region is None:  # NIXL reads into registered memory only
                first, last = int(batch.local.min()), int((batch.local + batch.nbytes).max())
                scratch = self._agent.register_memory([(first, last - first, 0, "")], "DRAM", [_PLUGIN])
            source = batch.offset + np.uint64(remote.address)
            handle = self._agent.initialize_xfer(
                "READ", self._rows(batch.local, batch.nbytes, memory, device),
                self._rows(source, batch.nbytes, remote.memory, remote.device), remote.agent, b"", [_PLUGIN],
            )  # fmt: skip
        except Exception as error:
            self._unregister(scratch)
            raise TransceiverError(f"cannot read from {link.peer}: {error!r}") from error
        read = NixlRead(link, token, handle, "PROC", scratch)
        self.reads.append(read)
        try:
            read.state = self._agent.transfer(handle)
        except Exception as error:
            read.error = f"cannot read from {link.peer}: {error!r}"
            return read
        if link.transport == "nixl":
            self._name_transport(link, handle)
        return read

    def _name_transport(self, link: NixlLink, handle: Any) -> None:
        try:
            link.transport = f"nixl/{str(self._agent.query_xfer_backend(handle)).lower()}"
        except Exception as error:  # a label only; the read is under way
            _log.debug("NIXL does not say what moves the bytes from %s: %r", link.peer, error)

    def _rows(self, address: NDArray[np.uint64], nbytes: NDArray[np.uint64], memory: str, device: int) -> Any:
        return self._agent.get_xfer_descs(
            np.column_stack((address, nbytes, np.full(len(address), device, np.uint64))), memory
        )

    def _unregister(self, registered: Any) -> None:
        try:
            if registered is not None:
                self._agent.deregister_memory(registered, [_PLUGIN])
        except Exception as error:
            _log.warning("NIXL does not unregister memory: %r", error)

    def turn(self) -> list[NixlRead]:
        """Let NIXL move things on; returns the reads that have ended, with `error` set where they failed."""
        self._agent.get_new_notifs([_PLUGIN])
        ended = [read for read in self.reads if self._over(read) and self._released(read)]
        for read in ended:
            self.reads.remove(read)
            self._unregister(read.scratch)
        return ended

    def _released(self, read: NixlRead) -> bool:
        """Give a handle back. False for a failed read that NIXL holds on to: parts of it may be under way still."""
        try:
            self._agent.release_xfer_handle(read.handle)
        except Exception as error:
            if not read.held:
                _log.warning("NIXL does not release a read from %s: %r", read.link.peer, error)
            read.held = read.error is not None
        else:
            read.held = False
        return not read.held

    def _over(self, read: NixlRead) -> bool:
        if read.state == "PROC":
            try:
                read.state = self._agent.check_xfer_state(read.handle)
            except Exception as error:
                read.state, read.error = "ERR", f"NIXL: {error!r}"
        if read.state == "ERR" and read.error is None:
            read.error = "NIXL reports a failed read"
        return read.state != "PROC"

    def close(self) -> None:
        """Unregister everything and end the agent, and with it NIXL's UCX worker: nothing writes any more."""
        for registered in self._registered:
            self._unregister(registered)
        self._registered.clear()
        self.reads.clear()
        self._agent = None
