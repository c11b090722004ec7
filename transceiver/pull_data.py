"""The data of one pull on its way: segments waiting, reads under way, staging buffers, and the work on what arrived.

Used by `Pull` in the loop; only `Read.landed` may run in a thread of the transport. It decides nothing about the
transfer: it reports failures to its pull and asks it to go on. `idle` is False as long as anything may still write into
a destination page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from transceiver.arrival_checks import ArrivalChecks
from transceiver.digest import block_digest
from transceiver.errors import LinkClosedError, TransceiverError
from transceiver.loop_context import LoopContext
from transceiver.pull_reads import STAGING_BYTES, Rows, Segment
from transceiver.transfer_types import TransferStatus
from transceiver.transport import LandingRead, Link

if TYPE_CHECKING:
    from transceiver.peer import Peer
    from transceiver.receiver import Pull

__all__ = ["PullData", "Read"]

_INLINE_HASH_BYTES = 2 << 20  # hashed in the loop, still in the cache after the copy; more in the digest thread
_HASHED_BATCH_BYTES = 1 << 20
_SENT_BATCH_BYTES = 8 << 20
_MAX_BUFFERS = 4


@dataclass(frozen=True, slots=True, eq=False)
class Read(LandingRead):
    """One read under way; `segment` None: generation numbers."""

    pull: Pull
    segment: Segment | None

    @property
    def wants_landing(self) -> bool:
        """The segment has to be put in place or hashed."""
        return self.segment is not None and self.pull.data.wants_work(self.segment)

    @property
    def by_element(self) -> bool:
        """Whole pages, one a read, are hashed page by page."""
        return self.segment is not None and self.segment.by_row

    def landed(self, start: int, stop: int) -> None:
        """These reads of the segment are here. Any thread; blocks for copy and hash."""
        segment = self.segment
        assert segment is not None
        if not segment.by_row:
            segment.digests = [*self.pull.data.work(segment)]
            return
        assert segment.digests is not None  # made when the read was issued: several threads may come here at once
        segment.digests[start:stop] = self.pull.data.hashes(segment, start, stop)


class PullData:
    """Segments and reads of one pull."""

    def __init__(self, context: LoopContext, pull: Pull, rows: Rows, checks: ArrivalChecks) -> None:
        self._ctx = context
        self._pull = pull
        self._rows = rows
        self._checks = checks
        self._peer: Peer | None = None
        self._queue: deque[Segment] = deque()
        self._buffers: list[NDArray[np.uint8]] = []
        self._buffers_made = 0
        self.reads = 0
        self.working = 0
        self.bytes = 0
        self.segments = 0

    def batch_bytes(self, link: Link) -> int:
        """Size of a batch. A link that copies by itself goes in small steps anyway; elsewhere a batch is what a
        cancelled pull may still bring, and what is hashed together after its arrival must fit into a core's cache."""
        limit = self._ctx.config.max_segment_bytes
        if link.copies_itself:
            return limit
        return min(limit, _HASHED_BATCH_BYTES if self._ctx.config.verify else _SENT_BATCH_BYTES)

    @property
    def all_read(self) -> bool:
        """No read is waiting or under way (what arrived may still be worked on)."""
        return not self._queue and not self.reads

    @property
    def idle(self) -> bool:
        """Nothing of this pull can touch a page."""
        return not self.reads and not self.working

    def add(self, segments: Iterable[Segment], peer: Peer) -> None:
        """More segments to read from `peer`; `pump` starts them."""
        self._peer = peer
        self._queue.extend(segments)

    def drop_waiting(self) -> None:
        """Start nothing more."""
        self._queue.clear()

    def pump(self) -> None:
        """Start reads as far as the bounds allow."""
        limit = self._ctx.config.max_segments_in_flight
        while self._queue and self.reads < limit:
            segment = self._queue[0]
            if segment.staged and not self._stage(segment):
                return  # goes on when a buffer comes back
            self._queue.popleft()
            if not self._issue(segment):
                return

    def _stage(self, segment: Segment) -> bool:
        """Give a staged segment a buffer that holds it; False while all are in use."""
        size = max(segment.buffer_bytes, STAGING_BYTES)
        if not self._buffers:
            if self._buffers_made == _MAX_BUFFERS:
                return False
            self._buffers_made += 1
            self._buffers.append(np.empty(size, np.uint8))
        buffer = self._buffers.pop()
        if buffer.nbytes < size:  # it was made for the smaller pages of another layer group
            buffer = np.empty(size, np.uint8)
        segment.buffer = buffer
        local = segment.batch.local + np.uint64(segment.buffer.ctypes.data)
        segment.batch = replace(segment.batch, local=local)
        return True

    def _issue(self, segment: Segment) -> bool:
        """Start a segment's reads; False when the transfer failed over it."""
        peer, group = self._peer, segment.group
        assert peer is not None
        if not len(segment.batch) and not segment.mapped:
            self._arrived(segment)
            return True
        if segment.by_row:
            segment.digests = [None] * len(segment.rows)
        registration = None if segment.staged else self._ctx.registrations[group]
        try:
            pool = peer.pool(group)
            segment.source = pool.view if segment.mapped else None
            peer.link.get(segment.batch, pool, registration, Read(self._pull, segment))
        except (LinkClosedError, TransceiverError) as error:
            self._pull.fail(TransferStatus.FAILED, str(error))
            return False
        self.reads += 1
        self.segments += len(segment.batch)
        return True

    def read_generations(self) -> bool:
        """Read the holder's generation numbers, now or later; False when there is nothing to wait for."""
        peer, waiting = self._peer, False
        for group, batch in self._checks.generation_reads():
            assert peer is not None
            try:
                if peer.link.read_now(batch, peer.generations(group)):
                    continue
                waiting = True
                peer.link.get(batch, peer.generations(group), None, Read(self._pull, None))
            except (LinkClosedError, TransceiverError) as error:
                self._pull.fail(TransferStatus.FAILED, str(error))
                return True
            self.reads += 1
        return waiting

    def on_read(self, segment: Segment | None, error: str | None, *, wanted: bool) -> None:
        """A read ended. `wanted`: the transfer is still alive, so what arrived counts."""
        self.reads -= 1
        if segment is None:
            return
        if error is None and wanted:
            self.bytes += segment.nbytes
            self._arrived(segment)
            self.pump()
        else:
            self._release(segment)

    def wants_work(self, segment: Segment) -> bool:
        """True when a segment has to be put in place or hashed."""
        return self._ctx.config.verify or segment.unlike

    def work(self, segment: Segment) -> list[bytes]:
        """Put staged bytes in place and hash the blocks; blocks, any thread."""
        storage, peer = self._ctx.storage, self._peer
        assert peer is not None
        if segment.unlike:
            segment.place(self._rows, storage, peer.page_bytes(segment.group))
        if not self._ctx.config.verify:
            return []
        return self.hashes(segment, 0, len(segment.rows))

    def hashes(self, segment: Segment, start: int, stop: int) -> list[bytes]:
        """Digests of some rows of a segment; blocks, any thread."""
        storage, rows = self._ctx.storage, segment.rows[start:stop]
        view = segment.part.receiver if segment.part is not None else None
        pages, valid = self._rows.page[rows].tolist(), self._rows.valid[rows].tolist()
        return [block_digest(storage, segment.group, p, v, view) for p, v in zip(pages, valid, strict=True)]

    def _arrived(self, segment: Segment) -> None:
        """All bytes of a segment are here; the transport may have done the work on them already."""
        missing = segment.digests is None or None in segment.digests
        if missing and self.wants_work(segment):
            if segment.unlike or segment.nbytes > _INLINE_HASH_BYTES:
                self._work_in_background(segment)
                return
            segment.digests = [*self.work(segment)]
        self._release(segment)
        self._checks.found(segment.rows, [digest for digest in segment.digests or () if digest is not None])

    def _work_in_background(self, segment: Segment) -> None:
        def done(result: list[bytes] | BaseException) -> None:
            self.working -= 1
            self._release(segment)
            if isinstance(result, BaseException):
                self._pull.fail(TransferStatus.FAILED, f"could not place or hash received blocks: {result!r}")
            else:
                self._checks.found(segment.rows, result)
            self._pull.go_on()

        self.working += 1
        self._ctx.in_background(lambda: self.work(segment), done)

    def _release(self, segment: Segment) -> None:
        """The staging buffer of a segment may be used again, the holder's mapped pool unmapped."""
        segment.source = None
        if segment.buffer is not None:
            self._buffers.append(segment.buffer)
            segment.buffer = None
