"""Transport inside one process: links are queues, a read is a memory copy, faults come from an injector.

Names live in a registry of this process. It behaves like a fabric, not like a function call: everything is delivered
by `poll` of the loop that owns the link's end, and a cut link fails the reads that were under way.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import threading
import time
from collections.abc import Callable

import msgpack

from kvcache.storage.page_storage import MemoryRegion
from transceiver import wire
from transceiver.errors import TransceiverError, TransportUnavailableError
from transceiver.inproc_link import InprocLink
from transceiver.testing import Fault, FaultInjector, FaultKind
from transceiver.transport import ReadBatch, TransportHandler

__all__ = ["InprocTransport"]

_MESSAGE_NAMES = {
    kind.KIND: kind.__name__
    for kind in (
        wire.Hello, wire.Challenge, wire.Proof, wire.Welcome, wire.Refuse, wire.PullRequest, wire.Grant, wire.Digests,
        wire.Ack, wire.Cancel,
    )
}  # fmt: skip
_registry: dict[str, InprocTransport] = {}
_registry_lock = threading.Lock()
_numbers = itertools.count(1)


class InprocTransport:
    """Implements `Transport` for peers in the same process."""

    def __init__(self, name: str, faults: FaultInjector | None = None) -> None:
        self._name = name
        self.faults = faults or FaultInjector()
        self._condition = threading.Condition()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._woken = False
        self._links: set[InprocLink] = set()
        self._knocking: set[InprocLink] = set()  # connected to us, and we have not heard of it; by `_registry_lock`
        self._reads: dict[int, tuple[InprocLink, object, bool]] = {}
        self._dead = False
        self._stalled = False
        self.handler: TransportHandler

    @property
    def address(self) -> str:
        return f"inproc://{self._name}"

    @property
    def identity(self) -> bytes:
        return b""

    def open(self, handler: TransportHandler) -> None:
        self.handler = handler
        with _registry_lock:
            if self._name in _registry:
                raise TransportUnavailableError(f"inproc name {self._name!r} is in use: give every worker its own id")
            _registry[self._name] = self

    def register(self, region: MemoryRegion) -> tuple[int, bytes]:
        return next(_numbers), b"inproc"

    def connect(self, address: str) -> InprocLink:
        if not address.startswith("inproc://"):
            raise TransceiverError(f"{address!r} is not an inproc address: both sides need the same backend")
        link = InprocLink(self, address)
        self._links.add(link)
        with _registry_lock:
            target = _registry.get(address.removeprefix("inproc://"))
            if target is None or target._dead:
                self.post(link.lost_event("nobody listens at this address"))
                return link
            other = InprocLink(target, self.address)
            link.other, other.other = other, link
            target._knocking.add(other)
        target.post(lambda: target._accepted(other))
        return link

    def _accepted(self, link: InprocLink) -> None:
        with _registry_lock:
            self._knocking.discard(link)
        self._links.add(link)
        self.handler.on_accept(link)

    def post(self, event: Callable[[], None], delay_s: float = 0.0) -> None:
        """Run `event` in this transport's loop, after `delay_s`. Any thread."""
        with self._condition:
            if not self._dead:
                heapq.heappush(self._events, (time.monotonic() + delay_s, next(self._order), event))
                self._condition.notify()

    def send(self, link: InprocLink, other: InprocLink, payload: bytes) -> None:
        """Deliver a message to the other end, unless a fault says otherwise."""
        fault = self.faults.decide(_step_of(payload))

        def deliver(data: bytes, delay_s: float = 0.0) -> None:
            def receive() -> None:
                if other.open:
                    other.owner.handler.on_message(other, data)

            other.owner.post(receive, delay_s)

        if fault is not None and self._apply_to_message(link, fault, payload, deliver):
            return
        deliver(payload)
        while link.held:
            deliver(link.held.pop())

    def _apply_to_message(self, link: InprocLink, fault: Fault, payload: bytes, deliver: Callable[..., None]) -> bool:
        """True when the message is dealt with."""
        match fault.kind:
            case FaultKind.DELAY:
                deliver(payload, fault.seconds)
            case FaultKind.DUPLICATE:
                deliver(payload)
                deliver(payload)
            case FaultKind.CORRUPT:
                deliver(_flip(payload))
            case FaultKind.REORDER:
                link.held.append(payload)
            case FaultKind.CUT | FaultKind.FULL:
                self.post(lambda: self.cut(link))
            case FaultKind.KILL:
                self.kill()
            case FaultKind.STALL:
                self._stalled = True
            case FaultKind.DROP:
                pass
        return True

    def start_get(self, link: InprocLink, batch: ReadBatch, base: int, token: object) -> None:
        """Queue a batch of reads; it copies when the loop reaches it."""
        number = next(_numbers)
        fault = self.faults.decide("get")
        kind = fault.kind if fault else None
        self._reads[number] = (link, token, kind is FaultKind.DROP)
        link.unfinished.add(number)

        def copy() -> None:
            if number not in self._reads:
                return
            columns = zip(batch.local.tolist(), batch.offset.tolist(), batch.nbytes.tolist(), strict=True)
            for index, (local, offset, nbytes) in enumerate(columns):
                ctypes.memmove(local, base + offset, nbytes)
                if kind is FaultKind.CORRUPT and index == 0:
                    byte = ctypes.c_uint8.from_address(local + nbytes // 2)
                    byte.value ^= 0x10
            self._finish(number, None)

        if kind in (FaultKind.CUT, FaultKind.FULL):
            self.post(lambda: self.cut(link))
        elif kind is FaultKind.KILL:
            self.post(self.kill)
        elif kind is FaultKind.STALL:
            self._stalled = True
        elif kind is not FaultKind.DROP:
            self.post(copy, fault.seconds if fault and kind is FaultKind.DELAY else 0.0)

    def _finish(self, number: int, error: str | None) -> None:
        link, token, _ = self._reads.pop(number)
        link.unfinished.discard(number)
        self.handler.on_get_done(link, token, error)

    def fail_reads(self, link: InprocLink, reason: str) -> None:
        """Complete every read of a dead link with an error."""
        for number in sorted(link.unfinished):
            self._finish(number, reason)

    def cut(self, link: InprocLink) -> None:
        """Lose a link on both sides, as a broken cable would."""
        other = link.other
        link.lost_event("the link was cut")()
        if other is not None:
            other.owner.post(other.lost_event("the link was cut"))

    def kill(self) -> None:
        """Vanish: this side stops answering for good, the peers see a lost link."""
        with self._condition:
            self._dead = True
            self._events.clear()
        self._leave("the peer died")

    def resume(self) -> None:
        """End a STALL. Any thread."""
        self._stalled = False
        self.wake()

    def _leave(self, reason: str) -> None:
        with _registry_lock:
            if _registry.get(self._name) is self:
                del _registry[self._name]
            knocking, self._knocking = self._knocking, set()
        for link in [*self._links, *knocking]:  # who has just connected hears of the end too
            other, link.open = link.other, False
            self.fail_reads(link, reason)
            if other is not None:
                other.owner.post(other.lost_event(reason))
        self._links.clear()

    def poll(self, timeout_s: float) -> None:
        due: list[Callable[[], None]] = []
        deadline = time.monotonic() + timeout_s
        with self._condition:
            while not due and not self._woken:
                now = time.monotonic()
                while self._events and self._events[0][0] <= now and not self._stalled:
                    due.append(heapq.heappop(self._events)[2])
                if due or now >= deadline:
                    break
                ahead = self._events[0][0] if self._events and not self._stalled else deadline
                self._condition.wait(max(0.0, min(ahead, deadline) - now))
            self._woken = False
        for event in due:
            event()

    def wake(self) -> None:
        with self._condition:
            self._woken = True
            self._condition.notify()

    def close(self) -> None:
        self._leave("the peer closed")
        with self._condition:
            self._dead = True
            self._events.clear()


def _step_of(payload: bytes) -> str:
    unpacker = msgpack.Unpacker(max_buffer_size=len(payload) + 1)
    unpacker.feed(payload[:32])
    try:
        unpacker.read_array_header()
        unpacker.unpack()
        return _MESSAGE_NAMES.get(unpacker.unpack(), "?")
    except (ValueError, TypeError, msgpack.UnpackException):  # not a message: tests send anything
        return "?"


def _flip(payload: bytes) -> bytes:
    middle = len(payload) // 2
    return payload[:middle] + bytes([payload[middle] ^ 0x10]) + payload[middle + 1 :]
