"""Messages of peers whose handshake is over: a receiver's go to the holding side, a holder's to the pull they name.

Runs in the loop, called by `PeerTable`. What has no place here is counted, or ends the link.
"""

from __future__ import annotations

from transceiver.errors import WireFormatError
from transceiver.holder import HolderSide
from transceiver.holder_pulls import Asked
from transceiver.loop_context import LoopContext
from transceiver.messages import (
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
    Welcome,
)
from transceiver.peer import Peer
from transceiver.receiver import Pull

__all__ = ["PeerMessages"]


class PeerMessages:
    """Incoming links are receivers', outgoing ones lead to holders."""

    def __init__(self, context: LoopContext, holder: HolderSide) -> None:
        self._ctx = context
        self._holder = holder

    def take(self, peer: Peer, message: Message) -> None:
        """Deal with a message. Raises WireFormatError for one that such a peer cannot send."""
        if isinstance(message, Hello | Proof | Challenge | Welcome):
            own = Challenge | Welcome if peer.outgoing else Hello | Proof
            if not isinstance(message, own):
                raise WireFormatError(f"{type(message).__name__} is not this peer's part of the handshake")
            self._ctx.stats.stale_messages += 1  # a duplicate
        elif isinstance(message, Refuse) and (message.pull_id == 0 or not peer.outgoing):
            peer.cut(f"refused by the peer ({message.field}): {message.reason}")
        elif peer.outgoing:
            self._from_holder(peer, message)
        else:
            self._from_receiver(peer, message)

    def _from_receiver(self, peer: Peer, message: Message) -> None:
        match message:
            case PullRequest():
                parts = tuple(part.holder if part else None for part in peer.parts)
                self._holder.on_request(Asked(peer.link, message, parts, peer.worker_id))
            case Ack():
                self._holder.on_ack(peer.link, message)
            case _:
                raise WireFormatError(f"{type(message).__name__} is not a receiver's message")

    def _from_holder(self, peer: Peer, message: Message) -> None:
        if not isinstance(message, Grant | Digests | Cancel | Refuse):
            raise WireFormatError(f"{type(message).__name__} is not a holder's message")
        pull = peer.pulls.get(message.pull_id)
        if pull is None:
            self._ctx.stats.stale_messages += 1
        else:
            self._ctx.guarded(lambda: _give(pull, message), pull.break_off)


def _give(pull: Pull, message: Grant | Digests | Cancel | Refuse) -> None:
    match message:
        case Grant():
            pull.on_grant(message)
        case Digests():
            pull.on_digests(message)
        case Cancel():
            pull.on_cancel(message)
        case Refuse():
            pull.on_refuse(message)
