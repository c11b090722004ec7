"""Links and who is at their other end: connecting, accepting, losing and refusing them.

Runs in the loop. A peer that has not proved the cluster secret gets nothing but the handshake (`LinkHandshake`), within
a short deadline. A refusal ends that link only. Outgoing links serve this side's pulls; incoming ones its grants. No
fault of our own in what concerns one pull or one link reaches another (`LoopContext.guarded`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable

from transceiver.errors import HandshakeRefusedError, LinkClosedError, TransceiverError, WireFormatError
from transceiver.holder import HolderSide
from transceiver.host_port import name_in
from transceiver.link_handshake import HandshakeStep, LinkHandshake
from transceiver.loop_context import LoopContext
from transceiver.messages import Message, Refuse
from transceiver.name_lookups import NameLookups
from transceiver.peer import LinkPhase, Peer
from transceiver.peer_messages import PeerMessages
from transceiver.pull_data import Read
from transceiver.receiver import Pull
from transceiver.stats import LinkStats
from transceiver.transfer_types import TransferStatus
from transceiver.transport import Link
from transceiver.unresolved_link import UnresolvedLink
from transceiver.wire import decode

__all__ = ["PeerTable"]

_log = logging.getLogger(__name__)
_LINGER_S = 0.5  # how long a refused link stays open so that the refusal arrives


class PeerTable:
    """Implements `TransportHandler`: every link of one transceiver."""

    def __init__(self, context: LoopContext, holder: HolderSide, handshake: LinkHandshake) -> None:
        self._ctx = context
        self._holder = holder
        holder.is_linked = self._is_linked
        self._handshake = handshake
        self._names = NameLookups(context)
        self._messages = PeerMessages(context, holder)
        self._by_link: dict[int, Peer] = {}
        self._by_address: dict[str, Peer] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        self._seen: set[str] = set()

    # --- for pulls ----------------------------------------------------------------------------------------------

    def attach(self, pull: Pull) -> None:
        """Give `pull` its link, connecting when there is none. Never raises: a pull that gets none fails."""
        self._ctx.guarded(lambda: self._attach(pull), pull.break_off)

    def _attach(self, pull: Pull) -> None:
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

    def _connect(self, address: str, target: str = "") -> Peer:
        """A link to `address`, on its way; `target`: the same with its host as a number, if that is known."""
        if len(self._by_link) >= self._ctx.config.max_links:
            raise TransceiverError("max_links peers are connected: raise cache_transceiver_config.max_links")
        if address in self._seen:
            self._ctx.stats.reconnects += 1
        self._seen.add(address)
        unknown = not target and name_in(address)
        link = UnresolvedLink(address) if unknown else self._ctx.transport.connect(target or address)
        peer = self._adopt(link, outgoing=True)
        peer.address, peer.target = address, target
        self._by_address[address] = peer
        if unknown:
            peer.phase = LinkPhase.NAMING
            self._names.look_up(
                address,
                lambda found: self._ctx.guarded(
                    lambda: self._named(peer, found), lambda error: self._close(peer, f"internal error: {error!r}")
                ),
            )
        else:
            self._handshake.greet(peer)
        return peer

    def _named(self, peer: Peer, found: str | OSError) -> None:
        """The host of `peer` was looked up; its link begins, unless nobody waits for it any more."""
        if peer.phase is not LinkPhase.NAMING:
            return
        try:
            if isinstance(found, OSError):
                raise TransceiverError(f"cannot connect to {peer.address}: {found}")
            link = self._ctx.transport.connect(found)
        except TransceiverError as error:
            reason = str(error)
            self._each(peer, lambda pull: pull.fail(TransferStatus.FAILED, reason))
            self._close(peer, reason)
            return
        del self._by_link[id(peer.link)]
        peer.link, peer.target = link, found
        self._by_link[id(link)] = peer
        self._handshake.greet(peer)

    def _adopt(self, link: Link, *, outgoing: bool) -> Peer:
        peer = Peer(link, outgoing, cut=lambda reason: self._close(peer, reason))
        self._by_link[id(link)] = peer
        wait = self._ctx.config.connect_timeout_ms / 1000
        peer.timer = self._ctx.after(wait, lambda: self._too_late(peer))
        return peer

    def _too_late(self, peer: Peer) -> None:
        if peer.phase is not LinkPhase.READY:
            what = "address found for the host's name" if peer.phase is LinkPhase.NAMING else "handshake"
            self._close(peer, f"no {what} within connect_timeout_ms")

    # --- TransportHandler ---------------------------------------------------------------------------------------

    def on_accept(self, link: Link) -> None:
        self._ctx.guarded(lambda: self._accept(link), lambda _: link.close())

    def _accept(self, link: Link) -> None:
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
        self._ctx.guarded(lambda: token.pull.on_read(token.segment, error), token.pull.break_off)

    def on_message(self, link: Link, payload: bytes) -> None:
        peer = self._by_link.get(id(link))
        if peer is None or peer.phase is LinkPhase.CLOSED:
            return
        try:
            message = decode(payload, self._handshake.limit(peer))
            if peer.phase is LinkPhase.READY:
                self._messages.take(peer, message)
            else:
                self._advance(peer, message)
        except WireFormatError as error:
            self._ctx.stats.malformed_messages += 1
            self._refuse(peer, "message", f"malformed message: {error}")
        except HandshakeRefusedError as error:
            self._refuse(peer, error.field, str(error))
        except LinkClosedError as error:  # the peer went away while its message was read
            self._close(peer, str(error))
        except Exception as error:
            _log.exception("a message from %s broke the protocol code; its link is closed", link.peer)
            self._close(peer, f"internal error: {error!r}")

    # --- inside -------------------------------------------------------------------------------------------------

    def _advance(self, peer: Peer, message: Message) -> None:
        """A message on a link whose handshake is not over."""
        if isinstance(message, Refuse):
            self._ctx.stats.refused_links += 1
            self._remember(peer, f"refused by the peer ({message.field}): {message.reason}")
            return
        step = self._handshake.step(peer, message)
        if step is HandshakeStep.OTHER_WAY:
            self._connect_anew(peer)
        elif step is HandshakeStep.READY:
            self._each(peer, lambda pull: pull.on_link(peer))

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
        if pulls or farewells:
            self._ctx.guarded(lambda: self._begin_anew(peer, farewells))
        for pull in pulls.values():
            pull.retries += 1
            self._ctx.stats.retries += 1
            self.attach(pull)

    def _begin_anew(self, peer: Peer, farewells: list[bytes]) -> None:
        """The link's successor, to the very same place. Where there can be none, the pulls find that out."""
        with contextlib.suppress(TransceiverError):
            self._connect(peer.address, peer.target).farewells = farewells

    # --- ends ---------------------------------------------------------------------------------------------------

    def _refuse(self, peer: Peer, field_name: str, reason: str) -> None:
        self._ctx.stats.refused_links += 1
        peer.tell(Refuse(0, field_name, reason[:2000]))
        self._remember(peer, reason)

    def _remember(self, peer: Peer, reason: str) -> None:
        """End a link that cannot work: pulls fail now, the link itself lingers until the refusal has gone out."""
        _log.warning("link with %s ended: %s", peer.worker_id or peer.link.peer, reason)
        if peer.address:
            self._refused[peer.address] = (self._ctx.clock() + self._ctx.config.refusal_ttl_ms / 1000, reason)
        self._forget(peer, reason)
        self._ctx.after(_LINGER_S, peer.link.close)

    def _close(self, peer: Peer, reason: str) -> None:
        self._ctx.guarded(peer.link.close)
        self._forget(peer, reason)

    def _forget(self, peer: Peer, reason: str) -> None:
        if peer.phase is LinkPhase.CLOSED:
            return
        peer.phase = LinkPhase.CLOSED
        peer.stop_timer()
        self._by_link.pop(id(peer.link), None)
        if peer.address and self._by_address.get(peer.address) is peer:
            del self._by_address[peer.address]
        self._each(peer, lambda pull: pull.on_lost(reason))
        peer.regions.clear()  # a mapped pool stays in memory, whoever has ended, until nobody maps it any more
        if not peer.outgoing:
            self._ctx.guarded(lambda: self._holder.on_lost(peer.link, reason, peer.worker_id))

    def _each(self, peer: Peer, action: Callable[[Pull], None]) -> None:
        """Do something with every pull of a link; one that it fails on ends, the others get their turn."""
        for pull in list(peer.pulls.values()):
            self._ctx.guarded(functools.partial(action, pull), pull.break_off)

    def close(self) -> None:
        """Forget every peer; the transport cuts the links."""
        for peer in list(self._by_link.values()):
            self._forget(peer, "the transceiver was closed")

    def links(self) -> dict[str, str]:
        """worker id -> transport of every ready link."""
        return {peer.worker_id: peer.link.transport for peer in self._by_link.values() if peer.phase is LinkPhase.READY}
