"""Reads over TCP, which has no remote memory access: the reader asks in an active message, the peer sends the bytes.

UCX emulates `ucp_get` there by itself, but a process that gets such a request for an endpoint that has just failed is
aborted by UCX 1.21 ("unexpected error: Endpoint timeout"): the death of a reader would take its holder along. Messages
to a failed endpoint are an error like any other. Used by `transceiver.ucx` in its thread; only proven peers are served,
and only from registered host memory.
"""

from __future__ import annotations

import ctypes
import logging
import struct
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcache.storage.page_storage import MemoryRegion
from transceiver.device_memory import is_host
from transceiver.ucp_binding import UCS_INPROGRESS, UcpError
from transceiver.wire import MAX_MESSAGE_BYTES

if TYPE_CHECKING:
    from transceiver.ucx_link import UcxLink

__all__ = ["DATA_AM_ID", "READ_AM_ID", "Answers", "ReadServer", "RemoteReads"]

_log = logging.getLogger(__name__)
READ_AM_ID, DATA_AM_ID = 24, 25
_ASK = struct.Struct("<QI")  # number of the batch, elements; then their addresses and sizes as uint64
_DATA = struct.Struct("<QIQ")  # number of the batch, element, offset in it; the bytes are the message's body
_CHUNK_BYTES = 240 << 10  # fits into one segment of UCX's TCP, so that nobody has to put it together
_MAX_WAITING = 16  # chunks that may wait for a slow peer
_MAX_ROUND = 64  # chunks between looking after everything else
_MAX_ELEMENTS = 16 << 20  # that a peer may have asked for at once: 256 MiB of columns


class RemoteReads:
    """The batches that one link has asked for and not got in full."""

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[int, tuple[list[int], list[int], list[int]]] = {}

    def ask(
        self, local: NDArray[np.uint64], remote: NDArray[np.uint64], nbytes: NDArray[np.uint64]
    ) -> tuple[int, bytes]:
        """Number of the batch, and the message that asks for it."""
        self._next += 1
        sizes = nbytes.tolist()
        self._open[self._next] = (local.tolist(), sizes, [sum(sizes)])
        return self._next, _ASK.pack(self._next, len(sizes)) + remote.tobytes() + nbytes.tobytes()

    def left(self, number: int) -> int:
        """Bytes of a batch that have not come (0: it is complete)."""
        batch = self._open.get(number)
        return batch[2][0] if batch else 0

    def forget(self, number: int) -> None:
        """Nothing of this batch is written any more."""
        self._open.pop(number, None)

    @staticmethod
    def take_back(number: int) -> bytes:
        """The message that says that a batch is not wanted any more: one that asks for nothing."""
        return _ASK.pack(number, 0)

    def arrived(self, header: bytes, data: int, length: int) -> None:
        """Put a chunk in its place. What does not belong to an open batch is dropped."""
        if len(header) != _DATA.size:
            return
        number, element, offset = _DATA.unpack(header)
        batch = self._open.get(number)
        if batch is None:
            return
        local, sizes, left = batch
        if element < len(sizes) and offset + length <= sizes[element] and length <= left[0]:
            ctypes.memmove(local[element] + offset, data, length)
            left[0] -= length


class Answers:
    """What one link has been asked for and has not sent yet."""

    def __init__(self) -> None:
        self._chunks: deque[tuple[int, int, Iterator[tuple[bytes, int, int]]]] = deque()
        self._elements = 0  # of the requests that wait
        self._sends: deque[tuple[int, bytes]] = deque()

    def add(self, payload: bytes, regions: Sequence[MemoryRegion]) -> bool:
        """Take a request on. False when it is malformed, names memory that is not ours to give, or is one too many."""
        if len(payload) < _ASK.size:
            return False
        number, count = _ASK.unpack_from(payload)
        if count == 0:
            self._take_back(number)
            return len(payload) == _ASK.size
        if self._elements + count > _MAX_ELEMENTS or len(payload) != _ASK.size + 16 * count:
            return False
        address = np.frombuffer(payload, np.uint64, count, _ASK.size)
        nbytes = np.frombuffer(payload, np.uint64, count, _ASK.size + 8 * count)
        inside = np.zeros(count, np.bool_)
        for region in regions:
            first, size = np.uint64(region.address), np.uint64(region.nbytes)
            offset = address - first
            inside |= (address >= first) & (offset <= size) & (nbytes <= size - np.minimum(offset, size))
        if not inside.all():
            return False
        self._elements += count
        self._chunks.append((number, count, _cut(number, address, nbytes)))
        return True

    def _take_back(self, number: int) -> None:
        """Send nothing more of a batch."""
        kept = [batch for batch in self._chunks if batch[0] != number]
        self._elements -= sum(elements for which, elements, _ in self._chunks if which == number)
        self._chunks = deque(kept)

    def send(self, link: UcxLink) -> bool:
        """Send what the peer takes now; True when there is more that could go at once. Raises UcpError."""
        ucp = link.fabric.ucp
        while self._sends and ucp.status(self._sends[0][0]) != UCS_INPROGRESS:
            ucp.free(self._sends.popleft()[0])
        for _ in range(_MAX_ROUND):
            if not self._chunks or len(self._sends) >= _MAX_WAITING:
                return False
            _, elements, chunks = self._chunks[0]
            chunk = next(chunks, None)
            if chunk is None:
                self._chunks.popleft()
                self._elements -= elements
                continue
            header, address, size = chunk
            request = ucp.send_data(link.handle, DATA_AM_ID, header, address, size)
            if request:
                self._sends.append((request, header))
        return bool(self._chunks)

    def end(self, ucp_status: Callable[[int], int], ucp_free: Callable[[int], None]) -> bool:
        """The link is closed: send nothing more. True when nothing is under way any more."""
        self._chunks.clear()
        while self._sends and ucp_status(self._sends[0][0]) != UCS_INPROGRESS:
            ucp_free(self._sends.popleft()[0])
        return not self._sends


class ReadServer:
    """Serves what the peers of one transport ask for of its `regions` in host memory. `fail` gives a link up."""

    def __init__(
        self, links: Mapping[int, UcxLink], regions: Sequence[MemoryRegion], fail: Callable[[UcxLink], None]
    ) -> None:
        self._links = links
        self._regions = regions
        self._fail = fail
        self._asked: deque[tuple[UcxLink, bytes]] = deque()

    def on_ask(self, endpoint: int, data: int, length: int) -> None:
        """A request has come; inside progress. Of a stranger nothing is kept: who belongs here asks after its proof."""
        asker = self._links.get(endpoint)
        if asker is None:
            return
        if asker.trusted and length <= MAX_MESSAGE_BYTES:
            self._asked.append((asker, ctypes.string_at(data, length)))
        else:
            self._refuse(asker)

    def _refuse(self, asker: UcxLink) -> None:
        _log.warning("%s asked for memory that it may not read: its link is closed", asker.peer)
        self._fail(asker)

    def serve(self) -> bool:
        """Send peers what they have asked for; True when more could go at once."""
        while self._asked:
            asker, payload = self._asked.popleft()
            readable = [region for region in self._regions if is_host(region.device)]
            if asker.open and not asker.answers.add(payload, readable):
                self._refuse(asker)
        more = False
        for link in list(self._links.values()):
            try:
                more |= link.answers.send(link)
            except UcpError as error:
                _log.debug("cannot send to %s: %s", link.peer, error)
                self._fail(link)
        return more


def _cut(
    number: int, address: NDArray[np.uint64], nbytes: NDArray[np.uint64]
) -> Iterator[tuple[bytes, int, int]]:  # fmt: skip
    """Header, address and size of every chunk; the columns become Python's integers when their turn comes."""
    for element, (at, size) in enumerate(zip(address.tolist(), nbytes.tolist(), strict=True)):
        for offset in range(0, size, _CHUNK_BYTES):
            yield _DATA.pack(number, element, offset), at + offset, min(_CHUNK_BYTES, size - offset)
