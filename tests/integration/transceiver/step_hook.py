"""Traps at the steps of the protocol, in a process that moves bytes over a real fabric.

`StepHook` wraps the links and the handler of a running transceiver: when a message or a read reaches a chosen point,
the armed action runs there and then, in the loop's thread, so that nothing of the protocol happens in between.
Test-only: it knows the private parts of a transceiver.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transceiver import CacheTransceiver
from transceiver.inproc import _step_of

__all__ = ["ABOUT_TO_SEND", "ARRIVED", "HANDLED", "READS", "SENT", "StepHook", "Trap"]

ABOUT_TO_SEND = "about to send"  # a read: about to be issued
SENT = "sent"  # a read: issued
ARRIVED = "arrived"  # a read: has ended, and the protocol does not know yet
HANDLED = "handled"  # the protocol has done what follows from it
#: Steps that are reads: of blocks, and of generation numbers after them.
READS = ("get", "generations")

Action = Callable[[Any, bytes], None]
"""Called with the link, and with the message (a read: the last message sent on that link)."""


@dataclass(slots=True)
class Trap:
    """`action` runs once, when `step` reaches `point`; it marks the trap as done when it has succeeded."""

    step: str
    point: str
    action: Action
    fired: bool = False
    done: bool = False


class StepHook:
    """The traps of one transceiver. Arm before the traffic begins; traps fire in the loop's thread."""

    def __init__(self, transceiver: CacheTransceiver) -> None:
        self.traps: list[Trap] = []
        self._ctx = transceiver._ctx
        self._last: dict[int, bytes] = {}  # link -> its last message
        transport: Any = transceiver._transport
        self.raw_send = _wrap_link(_link_class(transport), self)
        self.peers: Any = transport.handler
        transport.handler = _Handler(self.peers, self)

    def clear(self) -> None:
        """Forget all traps."""
        self.traps = []

    def reach(self, step: str, point: str, link: Any, payload: bytes | None = None) -> None:
        """`step` is at `point`: run what is armed for it."""
        if payload is not None and point == ABOUT_TO_SEND:
            self._last[id(link)] = payload
        for trap in self.traps:
            if not trap.fired and (trap.step, trap.point) == (step, point):
                trap.fired = True
                trap.action(link, self._last.get(id(link), b"") if payload is None else payload)

    def reach_soon(self, step: str, point: str, link: Any) -> None:
        """The same, when the handler that runs now has returned."""
        self._ctx.post(lambda: self.reach(step, point, link))


def _link_class(transport: Any) -> Any:
    module = type(transport).__module__
    if module == "transceiver.ucx":
        from transceiver.ucx_link import UcxLink

        return UcxLink
    from transceiver.nixl_link import NixlLink

    return NixlLink


def _wrap_link(kind: Any, hook: StepHook) -> Callable[[Any, bytes], None]:
    """Report what goes out on links of this class; returns the unwrapped `send`. For a process with one transceiver."""
    send, get, read_now = kind.send, kind.get, kind.read_now

    def hooked_send(self: Any, payload: bytes) -> None:
        step = _step_of(payload)
        hook.reach(step, ABOUT_TO_SEND, self, payload)
        send(self, payload)
        hook.reach(step, SENT, self, payload)

    def hooked_get(self: Any, batch: Any, remote: Any, region: int | None, token: Any) -> None:
        step = _read_step(token)
        hook.reach(step, ABOUT_TO_SEND, self)
        get(self, batch, remote, region, token)
        hook.reach(step, SENT, self)

    def hooked_read_now(self: Any, batch: Any, remote: Any) -> bool:
        hook.reach("generations", ABOUT_TO_SEND, self)
        done: bool = read_now(self, batch, remote)
        if done:
            hook.reach("generations", SENT, self)
            hook.reach_soon("generations", HANDLED, self)
        return done

    kind.send, kind.get, kind.read_now = hooked_send, hooked_get, hooked_read_now
    return send  # type: ignore[no-any-return]


def _read_step(token: Any) -> str:
    return "generations" if token.segment is None else "get"


class _Handler:
    """Implements `TransportHandler` around the transceiver's own."""

    def __init__(self, inner: Any, hook: StepHook) -> None:
        self._inner = inner
        self._hook = hook
        self.on_accept = inner.on_accept
        self.on_lost = inner.on_lost

    def on_message(self, link: Any, payload: bytes) -> None:
        step = _step_of(payload)
        self._hook.reach(step, ARRIVED, link, payload)
        self._inner.on_message(link, payload)
        self._hook.reach(step, HANDLED, link, payload)

    def on_get_done(self, link: Any, token: Any, error: str | None) -> None:
        step = _read_step(token)
        if error is None:
            self._hook.reach(step, ARRIVED, link)
        self._inner.on_get_done(link, token, error)
        if error is None:
            self._hook.reach(step, HANDLED, link)
