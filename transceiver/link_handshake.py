"""The handshake of one link, message by message, on both sides: this process's half of `transceiver.handshake`.

Runs in the loop, called by `PeerTable` for links that are not ready. A peer that has not proved the cluster secret gets
nothing but the handshake, within small bounds. It changes the `Peer` and answers on its link; what follows from the end
of the handshake, for pulls and for the table of links, is the caller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from transceiver.errors import HandshakeRefusedError, WireFormatError
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
from transceiver.loop_context import LoopContext
from transceiver.messages import Challenge, Hello, Message, Proof, RegionInfo, Welcome
from transceiver.page_part import PoolShape
from transceiver.peer import LinkPhase, Peer
from transceiver.wire import MAX_MESSAGE_BYTES, MAX_REGION_BYTES, MAX_UNPROVEN_BYTES

__all__ = ["HandshakeStep", "LinkHandshake"]


class HandshakeStep(StrEnum):
    """Where a link stands after a message."""

    WAITING = "waiting"  # the other side has the word
    READY = "ready"  # both have proved the secret and the layouts fit
    OTHER_WAY = "other way"  # this link cannot read from its peer: connect anew, the transport chooses another way


class LinkHandshake:
    """What this side says of itself, and what it demands of a peer. `nonce` makes NONCE_BYTES random bytes."""

    def __init__(self, context: LoopContext, nonce: Callable[[], bytes]) -> None:
        self._ctx = context
        self._nonce = nonce
        self.own_regions: tuple[RegionInfo, ...] = ()  # set before the first peer can connect
        regions = [context.storage.region(group) for group in range(len(context.storage.layout.groups))]
        pools = tuple(PoolShape(r.layer_major, r.nbytes // r.page_bytes, r.device) for r in regions)
        self._own = PeerLayout(context.storage.layout, context.shares, pools)
        self._layout = pack_layout(self._own)

    def limit(self, peer: Peer) -> int:
        """Bytes that the peer's next message may have."""
        if peer.phase is LinkPhase.READY:
            return MAX_MESSAGE_BYTES
        limit = MAX_UNPROVEN_BYTES + len(self._layout) * 4
        if peer.outgoing and peer.phase is LinkPhase.PROVING:  # the holder has proved the secret; its keys come now
            limit += MAX_REGION_BYTES * 2 * len(self._own.layout.groups)
        return limit

    def greet(self, peer: Peer) -> None:
        """Begin, on a link that this side has opened."""
        peer.phase = LinkPhase.CONNECTING
        peer.hello = Hello(self._nonce(), self._ctx.worker_id)
        peer.tell(peer.hello)

    def step(self, peer: Peer, message: Message) -> HandshakeStep:
        """Take the peer's next message and answer it. Raises HandshakeRefusedError for a peer that does not fit, and
        WireFormatError for a message that has no place here.
        """
        match message:
            case Hello() if not peer.outgoing and peer.phase is LinkPhase.CONNECTING:
                if len(message.nonce) != NONCE_BYTES:
                    raise HandshakeRefusedError("nonce", "the challenge has a wrong length")
                peer.hello = message
                peer.challenge = make_challenge(self._ctx.secret, message, self._nonce(), self._ctx.worker_id)
                peer.phase = LinkPhase.PROVING
                peer.tell(peer.challenge)
            case Challenge() if peer.outgoing and peer.phase is LinkPhase.CONNECTING and peer.hello is not None:
                check_challenge(self._ctx.secret, peer.hello, message)
                peer.worker_id = message.worker_id
                peer.phase = LinkPhase.PROVING
                peer.tell(make_proof(self._ctx.secret, peer.hello, message, self._layout))
            case Proof() if not peer.outgoing and peer.hello is not None and peer.challenge is not None:
                check_proof(self._ctx.secret, peer.hello, peer.challenge, message)
                peer.parts = parts_between(self._own, check_layout(self._own, message.layout))
                peer.worker_id = peer.hello.worker_id
                peer.become_ready()
                peer.tell(Welcome(self._layout, self.own_regions, self._ctx.transport.identity))
                return HandshakeStep.READY
            case Welcome() if peer.outgoing and peer.phase is LinkPhase.PROVING:
                layout = check_layout(self._own, message.layout)
                peer.parts, peer.pools = parts_between(layout, self._own), layout.pools
                peer.infos = check_regions(layout, message.regions)
                if not peer.link.on_peer_process(message.identity, peer.infos.values()):
                    return HandshakeStep.OTHER_WAY
                peer.become_ready()
                return HandshakeStep.READY
            case Hello() if not peer.outgoing and message == peer.hello:
                self._ctx.stats.stale_messages += 1  # a duplicate
            case Challenge() if peer.outgoing and peer.phase is LinkPhase.PROVING:
                self._ctx.stats.stale_messages += 1
            case _:
                raise WireFormatError(f"{type(message).__name__} is not expected now")
        return HandshakeStep.WAITING
