"""Links and who is at their other end: connecting, the handshake on both sides, dispatch of proven peers' messages.

Runs in the loop. A peer that has not proved the cluster secret gets nothing but the handshake, within small bounds and
a short deadline. A refusal ends that link only. Outgoing links serve this side's pulls; incoming ones its grants.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from transceiver.errors import HandshakeRefusedError, LinkClosedError, TransceiverError, WireFormatError
from transceiver.handshake import (
    NONCE_BYTES,
    PeerLayout,
    check_challenge,
    check_layout,
    check_proof,
    check_regions,
    make_challenge,
    make_proof,
    pack_layout,
    parts_between,
)
from transceiver.holder import HolderSide
from transceiver.loop_context import LoopContext
from transceiver.page_part import PoolShape
from transceiver.peer import LinkPhase, Peer
from transceiver.pull_data import Read
from transceiver.receiver import Pull
from transceiver.stats import LinkStats
from transceiver.transfer_types import TransferStatus
from transceiver.transport import Link
from transceiver.wire import (
    MAX_MESSAGE_BYTES,
    MAX_REGION_BYTES,
    MAX_UNPROVEN_BYTES,
    Ack,
    Cancel,
    Challenge,
    Digests,
    Grant,
    Hello,
    Message,
    Proof,
    PullRequest,
    Refuse,
    RegionInfo,
    Welcome,
    decode,
    encode,
)

__all__ = ["PeerTable"]

_log = logging.getLogger(__name__)
_MAX_HELLO_BYTES = MAX_UNPROVEN_BYTES
_LINGER_S = 0.5  # how long a refused link stays open so that the refusal arrives


class PeerTable:
    """Implements `TransportHandler`: every link of one transceiver."""

    def __init__(self, context: LoopContext, holder: HolderSide, nonce: Callable[[], bytes]) -> None:
        self._ctx = context
        self._holder = holder
        holder.is_linked = self._is_linked
        self.own_regions: tuple[RegionInfo, ...] = ()  # set before the first peer can connect
        self._nonce = nonce
        regions = [context.storage.region(group) for group in range(len(context.storage.layout.groups))]
        pools = tuple(PoolShape(r.layer_major, r.nbytes // r.page_bytes, r.device) for r in regions)
        self._own = PeerLayout(context.storage.layout, context.shares, pools)
        self._layout = pack_layout(self._own)
        self._by_link: dict[int, Peer] = {}
        self._by_address: dict[str, Peer] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        self._seen: set[str] = set()

    # --- for pulls ----------------------------------------------------------------------------------------------

    def attach(self, pull: Pull) -> None:
        """Give `pull` its link, connecting when there is none."""
        address = pull.ticket.address
        refused = self._refused.get(address)
        if refused is not None:
            if refused[0] > self._ctx.clock():
                pull.fail(TransferStatus.FAILED, refused[1])
                return
            del self._refused[address]
        peer = self._by_address.get(address)
        if peer is None:
            try:
                peer = self._connect(address)
            except TransceiverError as error:
                pull.fail(TransferStatus.FAILED, str(error))
                return
        peer.pulls[pull.pull_id] = pull
        if peer.phase is LinkPhase.READY:
            pull.on_link(peer)

    def detach(self, pull: Pull) -> None:
        """Forget a settled pull."""
        peer = self._by_address.get(pull.ticket.address)
        if peer is not None and peer.pulls.pop(pull.pull_id, None) is not None:
            peer.farewells += pull.farewell()  # cancelled while connecting: the holder is told when the link stands
        outcome = pull.future.result() if pull.future.done() else None
        if peer is not None and outcome is not None and outcome.transport:
            links = self._ctx.stats.links
            links.setdefault(pull.ticket.address, LinkStats(peer.worker_id, outcome.transport)).add(
                outcome, peer.link.detail
            )

    def _connect(self, address: str) -> Peer:
        if len(self._by_link) >= self._ctx.config.max_links:
            raise TransceiverError("max_links peers are connected: raise cache_transceiver_config.max_links")
        if address in self._seen:
            self._ctx.stats.reconnects += 1
        self._seen.add(address)
        peer = self._adopt(self._ctx.transport.connect(address), outgoing=True)
        peer.address = address
        self._by_address[address] = peer
        peer.hello = Hello(self._nonce(), self._ctx.worker_id)
        self._tell(peer, peer.hello)
        return peer

    def _adopt(self, link: Link, *, outgoing: bool) -> Peer:
        peer = Peer(link, outgoing, cut=lambda reason: self._close(peer, reason))
        self._by_link[id(link)] = peer
        wait = self._ctx.config.connect_timeout_ms / 1000
        peer.timer = self._ctx.after(wait, lambda: self._too_late(peer))
        return peer

    def _too_late(self, peer: Peer) -> None:
        if peer.phase is not LinkPhase.READY:
            self._close(peer, "no handshake within connect_timeout_ms")

    # --- TransportHandler ---------------------------------------------------------------------------------------

    def on_accept(self, link: Link) -> None:
        if len(self._by_link) >= self._ctx.config.max_links:
            self._ctx.stats.refused_links += 1
            link.close()
            return
        self._adopt(link, outgoing=False)

    def on_lost(self, link: Link, reason: str) -> None:
        peer = self._by_link.get(id(link))
        if peer is not None:
            self._ctx.stats.lost_links += 1
            alive = peer.outgoing and peer.phase is LinkPhase.READY and not link.peer_has_ended
            again = self._taken_along(peer) if alive else []
            self._forget(peer, reason)
            for pull in again:
                self.attach(pull)

    def on_get_done(self, link: Link, token: object, error: str | None) -> None:
        assert isinstance(token, Read)
        token.pull.on_read(token.segment, error)

    def on_message(self, link: Link, payload: bytes) -> None:
        peer = self._by_link.get(id(link))
        if peer is None or peer.phase is LinkPhase.CLOSED:
            return
        limit = _MAX_HELLO_BYTES + len(self._layout) * 4
        if peer.outgoing and peer.phase is LinkPhase.PROVING:  # the holder has proved the secret; its keys come now
            limit += MAX_REGION_BYTES * 2 * len(self._own.layout.groups)
        try:
            message = decode(payload, MAX_MESSAGE_BYTES if peer.phase is LinkPhase.READY else limit)
            if peer.phase is LinkPhase.READY:
                self._dispatch(peer, message)
            else:
                self._handshake(peer, message)
        except WireFormatError as error:
            self._ctx.stats.malformed_messages += 1
            self._refuse(peer, "message", f"malformed message: {error}")
        except HandshakeRefusedError as error:
            self._refuse(peer, error.field, str(error))
        except Exception as error:
            _log.exception("a message from %s broke the protocol code; its link is closed", link.peer)
            self._close(peer, f"internal error: {error!r}")

    # --- handshake ----------------------------------------------------------------------------------------------

    def _handshake(self, peer: Peer, message: Message) -> None:
        match message:
            case Hello() if not peer.outgoing and peer.phase is LinkPhase.CONNECTING:
                if len(message.nonce) != NONCE_BYTES:
                    raise HandshakeRefusedError("nonce", "the challenge has a wrong length")
                peer.hello = message
                peer.challenge = make_challenge(self._ctx.secret, message, self._nonce(), self._ctx.worker_id)
                peer.phase = LinkPhase.PROVING
                self._tell(peer, peer.challenge)
            case Challenge() if peer.outgoing and peer.phase is LinkPhase.CONNECTING and peer.hello is not None:
                check_challenge(self._ctx.secret, peer.hello, message)
                peer.worker_id = message.worker_id
                peer.phase = LinkPhase.PROVING
                self._tell(peer, make_proof(self._ctx.secret, peer.hello, message, self._layout))
            case Proof() if not peer.outgoing and peer.hello is not None and peer.challenge is not None:
                check_proof(self._ctx.secret, peer.hello, peer.challenge, message)
                peer.parts = parts_between(self._own, check_layout(self._own, message.layout))
                peer.worker_id = peer.hello.worker_id
                self._ready(peer)
                self._tell(peer, Welcome(self._layout, self.own_regions, self._ctx.transport.identity))
            case Welcome() if peer.outgoing and peer.phase is LinkPhase.PROVING:
                layout = check_layout(self._own, message.layout)
                peer.parts, peer.pools = parts_between(layout, self._own), layout.pools
                peer.infos = check_regions(layout, message.regions)
                probe, shared = peer.infos[1, 0], peer.pools_are_shared
                if not peer.link.on_peer_process(message.identity, probe, shared=shared):
                    self._connect_anew(peer)
                    return
                self._ready(peer)
                for pull in list(peer.pulls.values()):
                    pull.on_link(peer)
            case Hello() if not peer.outgoing and message == peer.hello:
                self._ctx.stats.stale_messages += 1  # a duplicate
            case Challenge() if peer.outgoing and peer.phase is LinkPhase.PROVING:
                self._ctx.stats.stale_messages += 1
            case Refuse():
                self._ctx.stats.refused_links += 1
                self._remember(peer, f"refused by the peer ({message.field}): {message.reason}")
            case _:
                raise WireFormatError(f"{type(message).__name__} is not expected now")

    def _taken_along(self, peer: Peer) -> list[Pull]:
        """Pulls of a link that broke before the holder answered them: they go on over a new one."""
        again = [pull for pull in peer.pulls.values() if pull.try_again()]
        for pull in again:
            del peer.pulls[pull.pull_id]
        self._ctx.stats.retries += len(again)
        return again

    def _is_linked(self, worker_id: str) -> bool:
        return any(
            peer.worker_id == worker_id and not peer.outgoing and peer.phase is LinkPhase.READY
            for peer in self._by_link.values()
        )

    def _connect_anew(self, peer: Peer) -> None:
        """This link cannot read from its peer: its pulls go on over another one."""
        pulls, peer.pulls = peer.pulls, {}
        farewells, peer.farewells = peer.farewells, []
        self._close(peer, "connecting another way")
        if farewells:
            self._connect(peer.address).farewells = farewells
        for pull in pulls.values():
            pull.retries += 1
            self._ctx.stats.retries += 1
            self.attach(pull)

    def _ready(self, peer: Peer) -> None:
        peer.phase = LinkPhase.READY
        peer.link.trust()
        if peer.timer is not None:
            peer.timer.cancel()
        while peer.farewells:
            self._send(peer, peer.farewells.pop(0))

    def _dispatch(self, peer: Peer, message: Message) -> None:
        if not peer.outgoing:
            match message:
                case PullRequest():
                    parts = tuple(part.holder if part else None for part in peer.parts)
                    self._holder.on_request(peer.link, message, parts, peer.worker_id)
                case Ack():
                    self._holder.on_ack(peer.link, message)
                case Refuse():
                    self._close(peer, f"refused by the peer ({message.field}): {message.reason}")
                case Hello() | Proof():
                    self._ctx.stats.stale_messages += 1  # a duplicate of the handshake
                case _:
                    raise WireFormatError(f"{type(message).__name__} is not a receiver's message")
            return
        if isinstance(message, Challenge | Welcome):
            self._ctx.stats.stale_messages += 1
            return
        if isinstance(message, Refuse) and message.pull_id == 0:
            self._close(peer, f"refused by the peer ({message.field}): {message.reason}")
            return
        if not isinstance(message, Grant | Digests | Cancel | Refuse):
            raise WireFormatError(f"{type(message).__name__} is not a holder's message")
        pull = peer.pulls.get(message.pull_id)
        if pull is None:
            self._ctx.stats.stale_messages += 1
        elif isinstance(message, Grant):
            pull.on_grant(message)
        elif isinstance(message, Digests):
            pull.on_digests(message)
        elif isinstance(message, Cancel):
            pull.on_cancel(message)
        else:
            pull.on_refuse(message)

    # --- ends ---------------------------------------------------------------------------------------------------

    def _refuse(self, peer: Peer, field_name: str, reason: str) -> None:
        self._ctx.stats.refused_links += 1
        self._tell(peer, Refuse(0, field_name, reason[:2000]))
        self._remember(peer, reason)

    def _remember(self, peer: Peer, reason: str) -> None:
        """End a link that cannot work: pulls fail now, the link itself lingers until the refusal has gone out."""
        _log.warning("link with %s ended: %s", peer.worker_id or peer.link.peer, reason)
        if peer.address:
            self._refused[peer.address] = (self._ctx.clock() + self._ctx.config.refusal_ttl_ms / 1000, reason)
        self._forget(peer, reason)
        self._ctx.after(_LINGER_S, peer.link.close)

    def _close(self, peer: Peer, reason: str) -> None:
        peer.link.close()
        self._forget(peer, reason)

    def _forget(self, peer: Peer, reason: str) -> None:
        if peer.phase is LinkPhase.CLOSED:
            return
        peer.phase = LinkPhase.CLOSED
        if peer.timer is not None:
            peer.timer.cancel()
        self._by_link.pop(id(peer.link), None)
        if peer.address and self._by_address.get(peer.address) is peer:
            del self._by_address[peer.address]
        for pull in list(peer.pulls.values()):
            pull.on_lost(reason)
        if not peer.outgoing:
            self._holder.on_lost(peer.link, reason, peer.worker_id)

    def _tell(self, peer: Peer, message: Message) -> None:
        self._send(peer, encode(message))

    def _send(self, peer: Peer, payload: bytes) -> None:
        try:
            peer.link.send(payload)
        except LinkClosedError as error:
            _log.debug("a message to %s was not sent: %s", peer.link.peer, error)

    def close(self) -> None:
        """Forget every peer; the transport cuts the links."""
        for peer in list(self._by_link.values()):
            self._forget(peer, "the transceiver was closed")

    def links(self) -> dict[str, str]:
        """worker id -> transport of every ready link."""
        return {peer.worker_id: peer.link.transport for peer in self._by_link.values() if peer.phase is LinkPhase.READY}
