"""`CacheTransceiver`: a worker's door for KV blocks. Publish what peers may take, pull what is missing here.

Owns one loop thread (`TransceiverLoop`) and one digest thread; all protocol code runs in the loop. Called by workers
from any thread. It knows block ranges and memory; it must never know a scheduler, a sequence or a text.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from kvcache.block_table import BlockTable
from kvcache.storage.page_storage import PageStorage
from transceiver.backends import make_transport
from transceiver.config import CacheTransceiverConfig
from transceiver.errors import TransceiverClosedError
from transceiver.handshake import MIN_SECRET_BYTES
from transceiver.holder import HolderSide
from transceiver.holder_digests import hash_ahead
from transceiver.loop_context import LoopContext
from transceiver.open_transfers import OpenTransfers
from transceiver.parallel_layout import RankShare
from transceiver.publication import Publication
from transceiver.receiver import Pull
from transceiver.stats import TransceiverStats
from transceiver.testing import FaultInjector
from transceiver.transceiver_loop import TransceiverLoop
from transceiver.transfer_checks import check_identity, check_seconds, check_tables, check_ticket, conversation_digest
from transceiver.transfer_types import GrantTicket, TransferOutcome, TransferStatus

__all__ = ["CacheTransceiver"]

_log = logging.getLogger(__name__)


class CacheTransceiver:
    """Moves KV blocks between this process's page storage and those of peers.

    `storage` must outlive `close()`. `secret` (at least 16 bytes) is the cluster's; peers with another one are refused.
    `host` is the address under which peers reach this machine. `faults` is for the inproc backend.
    `shares` says, per layer group, which heads this rank holds of a model that is shared out over several; without it
    only peers with an equal layout fit.
    """

    def __init__(
        self, *, worker_id: str, storage: PageStorage, config: CacheTransceiverConfig, secret: bytes,
        host: str = "127.0.0.1", clock: Callable[[], float] = time.monotonic, faults: FaultInjector | None = None,
        shares: tuple[RankShare, ...] | None = None,
    ) -> None:  # fmt: skip
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"the cluster secret has {len(secret)} bytes: use at least {MIN_SECRET_BYTES}")
        if not 0 < len(worker_id) <= 256:
            raise ValueError("worker_id needs 1 to 256 characters")
        devices = {storage.region(group).device for group in range(len(storage.layout.groups))}
        self._transport = make_transport(worker_id, config, host, faults, devices)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="kvferry-digest")
        self._ctx = LoopContext(worker_id, storage, config, secret, self._transport, self._executor, clock, shares)
        self._holder = HolderSide(self._ctx, secrets.token_bytes(16))
        self._transfers = OpenTransfers(self._ctx)
        self._loop = TransceiverLoop(self._ctx, self._holder, self._transfers)
        self._pull_ids = itertools.count(1)

    # --- life ---------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Register the pools, listen, start the loop. Blocks until peers can connect.

        Raises TransportUnavailableError (what to install or change) or TransceiverError.
        """
        self._loop.start()

    @property
    def address(self) -> str:
        """Where peers connect: ``ucx://host:port`` or ``inproc://worker-id``."""
        if not self._loop.address:
            raise TransceiverClosedError("start the transceiver first")
        return self._loop.address

    def close(self) -> None:
        """End every transfer (CANCELLED), cut all links, stop the threads. Blocks up to a few seconds. Idempotent."""
        self._loop.stop()
        self._ctx.end_background()
        self._ctx.csv.close()

    def __enter__(self) -> CacheTransceiver:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- transfers ----------------------------------------------------------------------------------------------

    def publish(
        self, transfer_id: str, tables: tuple[BlockTable, ...], *, conversation_id: str | None, scope: bytes,
        lease_s: float, open_ended: bool = False, receiver: str | None = None,
    ) -> Publication:  # fmt: skip
        """Let one receiver pull these blocks; returns at once with the ticket to hand to it.

        `receiver` names the only worker that may pull, if it is known: others are refused, and when its link breaks and
        does not come back within connect_timeout_ms the grant ends as FAILED, long before the lease.

        The pages stay the caller's, who keeps them in use until `Publication.future` resolves, `lease_s` seconds from
        now at the latest (plus a bounded wait when a receiver is reading): committed blocks by a pin. With `open_ended`
        more blocks follow through `Publication.extend` (needs enable_pipelined_transfer); their pages are held by the
        caller's sequence and not pinned, and a pull of one given out anew fails by its generation number. Raises
        TransceiverFullError, and ValueError (nothing is published) for impossible tables, `scope`, `receiver` or
        `lease_s`; `Publication.extend` raises it too.
        """
        self._check_running()
        check_tables(self._ctx.storage, tables)
        check_identity(transfer_id, scope, receiver)
        lease_s = check_seconds("lease_s", lease_s)
        if open_ended and not self._ctx.config.enable_pipelined_transfer:
            raise ValueError("an open-ended grant needs cache_transceiver_config.enable_pipelined_transfer: true")
        conversation = conversation_digest(conversation_id)
        blocks = self._ctx.storage.layout.tokens_per_block
        tokens = max((int(t.ordinals[-1]) * blocks + int(t.valid_tokens[-1]) for t in tables if len(t)), default=0)
        ticket = GrantTicket(
            self.address, transfer_id, self._holder.token(transfer_id, conversation, scope), tokens,
            sum(len(t) for t in tables),
        )  # fmt: skip
        publication = Publication(
            ticket, tables, conversation, scope, lease_s, self._ctx.clock(),
            lambda p: self._ctx.post(lambda: self._holder.cancel(p)), self._extend, not open_ended, receiver,
        )  # fmt: skip
        self._transfers.add_publication(publication)
        self._ctx.post(lambda: self._holder.add(publication), lambda error: self._withdraw(publication, error))
        return publication

    def pull(
        self, ticket: GrantTicket, tables: tuple[BlockTable, ...], *, conversation_id: str | None, scope: bytes,
        timeout_s: float,
    ) -> Pull:  # fmt: skip
        """Read the blocks of `tables` (wanted ordinals, pages of this side that receive them); returns at once.

        The pages belong to the transfer until `Pull.settled` resolves. An empty list is legal and releases the holder.
        `timeout_s` is cut to kv_transfer_timeout_ms. Raises TransceiverFullError, and ValueError for impossible tables,
        `scope`, ticket or `timeout_s` (finite, above 0).
        """
        self._check_running()
        check_ticket(ticket)
        check_tables(self._ctx.storage, tables)
        check_identity(ticket.transfer_id, scope)
        timeout_s = min(check_seconds("timeout_s", timeout_s), self._ctx.config.kv_transfer_timeout_ms / 1000)
        pull = Pull(
            self._ctx, next(self._pull_ids), ticket, tables, conversation_digest(conversation_id), scope, timeout_s,
            self._settled,
        )  # fmt: skip
        self._transfers.add_pull(pull)
        self._ctx.post(lambda: self._begin(pull), pull.break_off)
        return pull

    def fetch(
        self, ticket: GrantTicket, tables: tuple[BlockTable, ...], *, conversation_id: str | None, scope: bytes,
        timeout_s: float,
    ) -> TransferOutcome:  # fmt: skip
        """`pull`, and wait: blocks until the transfer has ended and its pages are the caller's again."""
        pull = self.pull(ticket, tables, conversation_id=conversation_id, scope=scope, timeout_s=timeout_s)
        outcome = pull.future.result()  # the transfer's own deadline ends it
        pull.settled.result()
        return outcome

    def prepare(self, tables: tuple[BlockTable, ...]) -> None:
        """Hash committed blocks now, in the background, so that a later hand-off finds their digests. Never blocks."""
        if not self._ctx.config.verify or self._loop.stopped:
            return
        hash_ahead(self._ctx, tables)

    # --- reports ------------------------------------------------------------------------------------------------

    def stats(self) -> TransceiverStats:
        """A snapshot of all counters."""
        return self._transfers.snapshot(self._holder.parked_count)

    def links(self) -> dict[str, str]:
        """Worker id of every connected peer -> the transport that moves the bytes, as found out from the fabric.

        Blocks until the loop has answered (at most a second; then it is empty).
        """
        if not self._loop.running:
            return {}
        answer: Future[dict[str, str]] = Future()
        peers = self._loop.peers
        self._ctx.post(lambda: answer.set_result(peers.links()))
        try:
            return answer.result(1.0)
        except TimeoutError:
            return {}

    # --- inside -------------------------------------------------------------------------------------------------

    def _check_running(self) -> None:
        if not self._loop.running:
            raise TransceiverClosedError("the transceiver is not running: call start() first, nothing after close()")

    def _begin(self, pull: Pull) -> None:
        pull.start()
        if not pull.future.done():
            self._loop.peers.attach(pull)

    def _extend(self, publication: Publication, tables: tuple[BlockTable, ...], last: bool) -> None:
        check_tables(self._ctx.storage, tables)
        self._ctx.post(
            lambda: self._holder.extend(publication, tables, last=last),
            lambda error: self._withdraw(publication, error),
        )

    def _withdraw(self, publication: Publication, error: Exception) -> None:
        """The holder's own code failed on this grant: whoever waits for it must hear of an end."""
        try:
            self._holder.cancel(publication)
        except Exception:
            _log.exception("grant %s could not be withdrawn", publication.transfer_id)
            if not publication.future.done():
                outcome = TransferOutcome(TransferStatus.FAILED, f"internal error: {error!a}")
                publication.future.set_result(outcome)

    def _settled(self, pull: Pull) -> None:
        self._loop.peers.detach(pull)
        self._transfers.pull_settled(pull)
