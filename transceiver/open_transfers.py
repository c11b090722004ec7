"""The pulls and grants of one transceiver that are not over, within the configured bounds; what is over is counted.

Entries come from any thread, ends from the loop. It starts and ends nothing by itself.
"""

from __future__ import annotations

import dataclasses
import threading

from transceiver.errors import TransceiverFullError
from transceiver.loop_context import LoopContext
from transceiver.publication import Publication
from transceiver.receiver import Pull
from transceiver.stats import TransceiverStats
from transceiver.transfer_checks import perf_row

__all__ = ["OpenTransfers"]


class OpenTransfers:
    """A pull is open until nothing can touch its pages, a grant until its future resolves. Thread-safe."""

    def __init__(self, context: LoopContext) -> None:
        self._ctx = context
        self._lock = threading.Lock()
        self._pulls: dict[int, Pull] = {}
        self._publications: set[Publication] = set()

    def add_pull(self, pull: Pull) -> None:
        """Raises TransceiverFullError when max_pulls are open."""
        with self._lock:
            if len(self._pulls) >= self._ctx.config.max_pulls:
                raise TransceiverFullError("max_pulls pulls are open: try again later")
            self._pulls[pull.pull_id] = pull

    def add_publication(self, publication: Publication) -> None:
        """Forgotten when its future resolves. Raises TransceiverFullError when max_publications are open."""
        with self._lock:
            if len(self._publications) >= self._ctx.config.max_publications:
                raise TransceiverFullError("max_publications grants are open: try again later")
            self._publications.add(publication)
        publication.future.add_done_callback(lambda _: self._published(publication))

    def pull_settled(self, pull: Pull) -> None:
        """Forget a pull and count how it ended."""
        with self._lock:
            self._pulls.pop(pull.pull_id, None)
        outcome = pull.future.result()
        self._ctx.stats.count_received(outcome)
        self._ctx.csv.write(perf_row(pull.ticket, outcome))

    def pulls(self) -> list[Pull]:
        """Those whose pages may still be touched."""
        with self._lock:
            return list(self._pulls.values())

    def publications(self) -> list[Publication]:
        """Those whose futures have not resolved."""
        with self._lock:
            return [publication for publication in self._publications if not publication.future.done()]

    def snapshot(self, parked_requests: int) -> TransceiverStats:
        """A copy of all counters, with what is open now."""
        pulls, stats = self.pulls(), self._ctx.stats
        with self._lock:
            publications = len(self._publications)
        return dataclasses.replace(
            stats,
            open_publications=publications,
            open_pulls=sum(not pull.future.done() for pull in pulls),
            quarantined_pulls=sum(pull.future.done() for pull in pulls),
            parked_requests=parked_requests,
            links={key: dataclasses.replace(value) for key, value in list(stats.links.items())},
        )

    def _published(self, publication: Publication) -> None:
        with self._lock:
            self._publications.discard(publication)
