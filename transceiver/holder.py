"""The holding side: grants, early requests, leases, and the answers to receivers. Runs in the loop.

It never writes into a peer and never reads a peer's memory. A request is honoured only with the capability of a live
grant, for its conversation and scope. Every end of a grant is told to the receiver that is using it.
"""

from __future__ import annotations

import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from kvcache.block_table import BlockTable
from transceiver.early_requests import EarlyRequests
from transceiver.errors import LinkClosedError
from transceiver.handshake import sign
from transceiver.holder_digests import known_digests, warm_digests
from transceiver.holder_pulls import ActivePull, Asked, find_waiting, request_columns
from transceiver.loop_context import LoopContext
from transceiver.publication import Publication
from transceiver.request_checks import request_problem
from transceiver.transfer_state import TransferState
from transceiver.transfer_types import TransferOutcome, TransferStatus
from transceiver.transport import Link
from transceiver.wire import Ack, Cancel, Digests, Grant, Message, Refuse, encode

__all__ = ["HolderSide"]

_log = logging.getLogger(__name__)
_MAX_ENDED = 8192


class HolderSide:
    """All publications of one transceiver."""

    def __init__(self, context: LoopContext, boot: bytes) -> None:
        self._ctx = context
        self._boot = boot
        self.is_linked: Callable[[str], bool] = lambda _: False  # worker id -> a proven link of it stands
        self._open: dict[str, Publication] = {}
        self._active: dict[tuple[int, int], ActivePull] = {}
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._early = EarlyRequests(
            context, lambda link, pull_id, field, reason: self._tell(link, Refuse(pull_id, field, reason))
        )

    def token(self, transfer_id: str, conversation: bytes, scope: bytes) -> bytes:
        """The capability of a grant: unguessable, good for one transfer id, conversation and scope of this process."""
        return sign(self._ctx.secret, b"kvferry-grant", self._boot, transfer_id.encode(), conversation, scope)

    @property
    def parked_count(self) -> int:
        return len(self._early)

    # --- from the API -------------------------------------------------------------------------------------------

    def add(self, publication: Publication) -> None:
        """A new publication takes effect; a request that came earlier is answered now."""
        if publication.transfer_id in self._open or publication.transfer_id in self._ended:
            self._resolve(publication, TransferStatus.FAILED, "this transfer id was published before")
            return
        self._open[publication.transfer_id] = publication
        self._ctx.stats.publications += 1
        publication.timer = self._ctx.after(publication.lease_s, lambda: self._lease_over(publication))
        if self._ctx.config.verify:
            warm_digests(self._ctx, publication.tables(), publication)
        for asked in self._early.take(publication.transfer_id):
            self.on_request(asked)

    def cancel(self, publication: Publication) -> None:
        """The owner wants this grant to end."""
        self._stop(publication, TransferStatus.CANCELLED, "cancelled by the holder")

    def close(self) -> None:
        """End every grant: the process is going away."""
        for publication in list(self._open.values()):
            for active in self._of(publication):
                self._tell(active.link, Cancel(active.request.pull_id, "failed", "the holder is shutting down"))
            self._resolve(publication, TransferStatus.CANCELLED, "the transceiver was closed")
        self._early.clear()

    # --- from the peer ------------------------------------------------------------------------------------------

    def on_request(self, asked: Asked) -> None:
        """A receiver names the blocks it lacks."""
        link, request, stats = asked.link, asked.request, self._ctx.stats
        if (id(link), request.pull_id) in self._active:
            stats.stale_messages += 1
            return
        publication = self._open.get(request.transfer_id)
        if publication is None:
            self._unpublished(asked)
            return
        busy, most = bool(self._of(publication)), self._ctx.config.max_blocks_per_pull
        refusal = request_problem(publication, request, asked.worker_id, busy=busy, max_blocks=most)
        if refusal is not None:
            stats.refused_pulls += 1
            self._tell(link, Refuse(request.pull_id, *refusal))
            return
        active = ActivePull(link, request, asked.parts, publication, self._ctx.clock(), *request_columns(request))
        self._active[id(link), request.pull_id] = active
        publication.machine.advance(TransferState.READY)
        publication.machine.advance(TransferState.TRANSFERRING)
        self._grant(active)

    def _unpublished(self, asked: Asked) -> None:
        """Either side may come first: keep a request whose token is genuine until its publication comes."""
        request = asked.request
        ended = self._ended.get(request.transfer_id)
        genuine = hmac.compare_digest(
            self.token(request.transfer_id, request.conversation, request.scope), request.token
        )
        if ended is not None or not genuine:
            self._ctx.stats.refused_pulls += 1
            reason = f"the grant is over ({ended})" if ended else "no such grant: it is unknown to this process"
            self._tell(asked.link, Refuse(request.pull_id, "transfer_id", reason))
            return
        self._early.add(asked)

    def on_ack(self, link: Link, ack: Ack) -> None:
        """The receiver is done with a pull, one way or the other."""
        active = self._active.pop((id(link), ack.pull_id), None)
        if active is None:
            if not self._early.remove(link, ack.pull_id):
                self._ctx.stats.stale_messages += 1
            return
        if active.timer is not None:
            active.timer.cancel()
        try:
            status = TransferStatus(ack.status)
        except ValueError:
            status = TransferStatus.FAILED
        reason = f"receiver: {ack.reason}" if ack.reason else ""
        if active.reason and status is not TransferStatus.DONE:
            status, reason = active.status, active.reason
        self._resolve(active.publication, status, reason, active, ack)

    def on_lost(self, link: Link, reason: str, worker_id: str = "") -> None:
        """Whoever was pulling over this link is gone; grants for `worker_id` alone end unless it comes back soon."""
        for key, active in list(self._active.items()):
            if active.link is link:
                del self._active[key]
                if active.timer is not None:
                    active.timer.cancel()
                status = active.status if active.reason else TransferStatus.FAILED
                self._resolve(active.publication, status, active.reason or f"receiver lost: {reason}", active)
        self._early.remove(link, None)
        orphans = [p for p in self._open.values() if worker_id and p.receiver == worker_id]
        if orphans:
            grace = self._ctx.config.connect_timeout_ms / 1000
            self._ctx.after(grace, lambda: self._end_orphans(orphans, worker_id, reason))

    def _end_orphans(self, publications: list[Publication], worker_id: str, reason: str) -> None:
        """Grants whose only receiver vanished before it asked."""
        if self.is_linked(worker_id):
            return
        for publication in publications:
            self._stop(publication, TransferStatus.FAILED, f"receiver lost: {reason}")

    # --- inside -------------------------------------------------------------------------------------------------

    def _of(self, publication: Publication) -> list[ActivePull]:
        return [active for active in self._active.values() if active.publication is publication]

    def _grant(self, active: ActivePull) -> None:
        """Tell the receiver where the rows lie that are published by now; all others when no more will come."""
        publication, verify, waiting = active.publication, active.request.verify, active.waiting
        pages, generations, stale = find_waiting(active, self._ctx.storage)
        self._ctx.stats.stale_generations += stale
        if not publication.complete:
            now = pages >= 0
            active.waiting, waiting = waiting[~now], waiting[now]
            pages, generations = pages[now], generations[now]
            if not len(waiting):
                return
        held = np.flatnonzero(pages >= 0)
        keys = list(
            zip(
                active.groups[waiting[held]].tolist(), pages[held].tolist(), generations[held].tolist(),
                active.valid[waiting[held]].tolist(), strict=True,
            )
        )  # fmt: skip
        known = known_digests(self._ctx, keys, active.parts) if verify else None
        digests = b""
        if known is not None and verify:
            column = np.zeros((len(waiting), 16), np.uint8)
            column[held] = np.frombuffer(known, np.uint8).reshape(-1, 16)
            digests = column.tobytes()
        rows = waiting.astype(np.int32)
        last = int(publication.complete)
        self._tell(active.link, Grant(active.request.pull_id, last, rows, pages, generations, digests))
        if verify and keys and known is None:
            self._ctx.in_background(
                lambda: self._ctx.digests.compute(keys, active.parts),
                lambda result: self._send_digests(active, rows[held], result),
            )

    def extend(self, publication: Publication, tables: tuple[BlockTable, ...], *, last: bool) -> None:
        """More blocks of a grant stand in their pages; whoever pulls it learns of them at once."""
        if publication.future.done():
            return
        publication.add(tables)
        publication.complete = last
        if self._ctx.config.verify:
            warm_digests(self._ctx, tables, publication)
        for active in self._of(publication):
            self._grant(active)

    def _send_digests(self, active: ActivePull, rows: NDArray[np.int32], result: list[bytes] | BaseException) -> None:
        if self._active.get((id(active.link), active.request.pull_id)) is not active:
            return
        if isinstance(result, BaseException):
            _log.error("digests of %s failed: %r", active.publication.transfer_id, result)
            self._stop(active.publication, TransferStatus.FAILED, f"the holder could not hash its blocks: {result}")
            return
        self._tell(active.link, Digests(active.request.pull_id, rows, b"".join(result)))

    def _lease_over(self, publication: Publication) -> None:
        self._stop(publication, TransferStatus.TIMED_OUT, "the lease ran out before the receiver was done")

    def _stop(self, publication: Publication, status: TransferStatus, reason: str) -> None:
        """End a grant: at once when nobody pulls, else after the receiver let go (or a bounded wait)."""
        if publication.future.done():
            return
        pulling = self._of(publication)
        if not pulling:
            self._resolve(publication, status, reason)
            return
        for active in pulling:
            if active.reason:
                continue
            active.status, active.reason = status, reason
            self._tell(active.link, Cancel(active.request.pull_id, status.value, reason))
            wait = self._ctx.config.drain_timeout_ms / 1000
            active.timer = self._ctx.after(wait, lambda active=active: self._abandon(active))  # type: ignore[misc]

    def _abandon(self, active: ActivePull) -> None:
        """The receiver did not let go in time. It may read on: the generation check keeps that harmless."""
        if self._active.pop((id(active.link), active.request.pull_id), None) is not None:
            self._resolve(active.publication, active.status, active.reason, active)

    def _resolve(
        self, publication: Publication, status: TransferStatus, reason: str, active: ActivePull | None = None,
        ack: Ack | None = None,
    ) -> None:  # fmt: skip
        if publication.future.done():
            return
        if status is TransferStatus.DONE and not publication.machine.end(status):
            status, reason = TransferStatus.FAILED, "the receiver acknowledged a transfer that had not begun"
        publication.machine.end(status)
        if publication.timer is not None:
            publication.timer.cancel()
        if self._open.get(publication.transfer_id) is publication:
            del self._open[publication.transfer_id]
            self._ended[publication.transfer_id] = status.value
            while len(self._ended) > _MAX_ENDED:
                self._ended.popitem(last=False)
        for key, other in list(self._active.items()):
            if other.publication is publication:
                del self._active[key]
        self._ctx.stats.count_sent(status)
        now = self._ctx.clock()
        seconds = {"total": now - publication.created}
        if active is not None:
            seconds["queue"], seconds["transfer"] = active.started - publication.created, now - active.started
        publication.future.set_result(
            TransferOutcome(
                status, reason, blocks=ack.blocks if ack else 0, bytes=ack.nbytes if ack else 0,
                transport=active.link.transport if active else "", seconds=seconds,
            )
        )  # fmt: skip

    def _tell(self, link: Link, message: Message) -> None:
        try:
            link.send(encode(message))
        except LinkClosedError as error:
            _log.debug("%s not sent: %s", type(message).__name__, error)  # the loss of the link resolves the rest
