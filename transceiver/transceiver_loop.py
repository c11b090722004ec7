"""The loop of one transceiver, from opening its transport to the end of everything: one thread runs all protocol code.

`CacheTransceiver` is the door; it starts and stops the loop and posts to it through `LoopContext`.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
from concurrent.futures import Future

from transceiver.errors import TransceiverError
from transceiver.handshake import NONCE_BYTES
from transceiver.holder import HolderSide
from transceiver.link_handshake import LinkHandshake
from transceiver.loop_context import LoopContext
from transceiver.messages import RegionInfo
from transceiver.open_transfers import OpenTransfers
from transceiver.peers import PeerTable
from transceiver.transfer_types import TransferOutcome, TransferStatus

__all__ = ["TransceiverLoop"]

_log = logging.getLogger(__name__)
_WAIT_S = 30.0  # for the loop to come up, and to end
_CLOSED = "the transceiver was closed"


class TransceiverLoop:
    """Starts once. `address` and `peers` are there when `start` has returned."""

    def __init__(self, context: LoopContext, holder: HolderSide, transfers: OpenTransfers) -> None:
        self._ctx = context
        self._holder = holder
        self._transfers = transfers
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.address = ""
        self.peers: PeerTable

    @property
    def running(self) -> bool:
        """Between `start` and `stop`."""
        return bool(self.address) and not self.stopped

    @property
    def stopped(self) -> bool:
        """Since `stop`, or since the loop has failed."""
        return self._stop.is_set()

    def start(self) -> None:
        """Register the pools, listen, turn. Blocks until peers can connect; raises what the transport raises."""
        if self._thread is not None:
            raise TransceiverError("a transceiver starts once")
        started: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name=f"kvferry-transceiver-{self._ctx.worker_id}", daemon=True
        )
        self._thread.start()
        started.result(_WAIT_S)

    def stop(self) -> None:
        """End every transfer and wait for the thread. Idempotent. Raises TransceiverError when it does not end."""
        self._stop.set()
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._ctx.transport.wake()
            thread.join(_WAIT_S)
            if thread.is_alive():
                raise TransceiverError("the transceiver's loop did not stop; its memory must not be freed")

    def _run(self, started: Future[None]) -> None:
        try:
            self.peers = self._open()
        except BaseException as error:
            self._ctx.transport.close()
            started.set_exception(error)
            return
        started.set_result(None)
        try:
            while not self._stop.is_set():
                wait = self._ctx.run_due()
                if not self._stop.is_set():
                    self._ctx.transport.poll(wait)
        except Exception:
            _log.exception("the transceiver's loop of worker %s failed; every transfer ends", self._ctx.worker_id)
        finally:
            self._shut_down()

    def _open(self) -> PeerTable:
        storage, transport, regions = self._ctx.storage, self._ctx.transport, []
        handshake = LinkHandshake(self._ctx, lambda: secrets.token_bytes(NONCE_BYTES))
        peers = PeerTable(self._ctx, self._holder, handshake)
        transport.open(peers)
        for group in range(len(storage.layout.groups)):
            for kind, region in enumerate((storage.region(group), storage.generations_region(group))):
                handle, key = transport.register(region)
                if kind == 0:
                    self._ctx.registrations[group] = handle
                file, inode = 0, 0
                if region.shared_fd is not None:
                    file, inode = region.shared_fd + 1, os.fstat(region.shared_fd).st_ino
                regions.append(
                    RegionInfo(kind, group, region.address, region.nbytes, region.page_bytes, key, file, inode)
                )
        handshake.own_regions = tuple(regions)
        self.address = transport.address
        return peers

    def _shut_down(self) -> None:
        self._stop.set()
        self._ctx.run_due()
        # Whatever fails here: the fabric is closed before the pages are given back.
        for pull in self._transfers.pulls():
            self._ctx.guarded(functools.partial(pull.fail, TransferStatus.CANCELLED, _CLOSED))
        self._ctx.guarded(self._holder.close)
        self._ctx.guarded(self.peers.close)
        self._ctx.guarded(self._ctx.transport.close)
        self._ctx.guarded(self._ctx.end_background)
        for pull in self._transfers.pulls():
            pull.force_settled()
        for publication in self._transfers.publications():
            publication.future.set_result(TransferOutcome(TransferStatus.CANCELLED, _CLOSED))
