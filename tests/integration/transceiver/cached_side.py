"""One worker's memory side for fault tests: storage, cache manager, transceiver, and KV that depends on its tokens."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache import KvCacheManager, SequenceCache
from kvcache.config import KvCacheConfig
from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from tests.unit.transceiver.rig import SCOPE, SECRET
from transceiver import (
    CacheTransceiver,
    CacheTransceiverConfig,
    GrantTicket,
    Publication,
    Pull,
    TransceiverBackend,
    TransferStatus,
)
from transceiver.testing import FaultInjector

TOKENS_PER_BLOCK = 4
LAYOUT = KvLayout("fault-model", TOKENS_PER_BLOCK, (LayerGroup(LifeCycleKind.FULL, (0, 1), 1, 8),))
PAGES = 32


def prompt_of(number: int, blocks: int = 3) -> NDArray[np.int32]:
    """A prompt that no other number shares."""
    return np.arange(blocks * TOKENS_PER_BLOCK, dtype=np.int32) + 1000 * (number + 1)


def block_bytes(tokens: NDArray[np.int32], ordinal: int, nbytes: int) -> bytes:
    """What the page of a block must hold: a function of its tokens."""
    block = tokens[ordinal * TOKENS_PER_BLOCK : (ordinal + 1) * TOKENS_PER_BLOCK]
    seed = int(block[0]) * 7919 + len(block)
    return np.random.default_rng(seed).bytes(nbytes)


@dataclass(eq=False)
class Fetch:
    """A pull into an open sequence."""

    cache: SequenceCache
    pull: Pull
    tokens: NDArray[np.int32]


class CachedSide:
    """Publishes and pulls sequences as a worker does; `lock` is the worker's.

    Its `storage` may be one of any layout with one full group of TOKENS_PER_BLOCK; by default it is PAGES of LAYOUT.
    """

    def __init__(
        self, name: str, config: CacheTransceiverConfig, *, storage: BytesPageStorage | None = None,
        host: str = "127.0.0.1",
    ) -> None:  # fmt: skip
        self.name = name
        self.config = config
        self.host = host
        self.lock = threading.Lock()
        self.storage = storage or BytesPageStorage(LAYOUT, [PAGES])
        max_tokens = self.storage.num_pages() * TOKENS_PER_BLOCK
        cache_config = KvCacheConfig(tokens_per_block=TOKENS_PER_BLOCK, max_tokens=max_tokens)
        self.manager = KvCacheManager(self.storage.layout, cache_config, self.storage)
        self.faults = FaultInjector()
        self.transceiver = self._start(0)
        self._replaced = 0

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return self.storage.layout.page_bytes(0)

    def _start(self, number: int) -> CacheTransceiver:
        transceiver = CacheTransceiver(
            worker_id=f"{self.name}.{number}", storage=self.storage, config=self.config, secret=SECRET,
            faults=self.faults if self.config.backend is TransceiverBackend.INPROC else None, host=self.host,
        )  # fmt: skip
        transceiver.start()
        return transceiver

    def replace(self) -> None:
        """A new transceiver takes over, as a restarted worker's would."""
        self.transceiver.close()
        self._replaced += 1
        self.transceiver = self._start(self._replaced)

    def close(self) -> None:
        self.transceiver.close()
        self.storage.close()

    def offer(self, name: str, tokens: NDArray[np.int32], lease_s: float, receiver: str | None = None) -> Publication:
        """Compute a prompt and publish all of it; the pin goes when the grant is settled."""
        with self.lock:
            cache = self.manager.create(name, tokens)
            cache.resize(len(tokens))
            have = cache.num_computed_tokens
            for ordinal, page in enumerate(cache.pages()[: len(tokens) // TOKENS_PER_BLOCK]):
                if ordinal * TOKENS_PER_BLOCK >= have:
                    self.storage.page(int(page))[:] = block_bytes(tokens, ordinal, self.page_bytes)
            cache.append_computed(tokens[have:], end_of_prompt=True)
            pin, table = cache.pin_for_peer(), cache.block_table(0, len(tokens))
            cache.close()
        publication = self.transceiver.publish(
            name, (table,), conversation_id=None, scope=SCOPE, lease_s=lease_s, receiver=receiver
        )

        def release(_: Any) -> None:
            with self.lock:
                pin.release()

        publication.future.add_done_callback(release)
        return publication

    def fetch(self, ticket: GrantTicket, tokens: NDArray[np.int32], timeout_s: float) -> Fetch:
        """Start pulling what this side lacks of a prompt."""
        with self.lock:
            cache = self.manager.create(ticket.transfer_id, tokens)
            cache.resize(len(tokens))
            wanted = cache.block_table(cache.num_computed_tokens, len(tokens))
        pull = self.transceiver.pull(ticket, (wanted,), conversation_id=None, scope=SCOPE, timeout_s=timeout_s)
        return Fetch(cache, pull, tokens)

    def finish(self, fetch: Fetch, wait_s: float) -> TransferStatus:
        """Wait for the end; publish a whole transfer, check its bytes, give everything else back."""
        outcome = fetch.pull.future.result(wait_s)
        if outcome.status is TransferStatus.DONE:
            with self.lock:
                for ordinal, page in enumerate(fetch.cache.pages()[: len(fetch.tokens) // TOKENS_PER_BLOCK]):
                    expected = block_bytes(fetch.tokens, ordinal, self.page_bytes)
                    assert bytes(self.storage.page(int(page))) == expected, "wrong bytes"
                fetch.cache.append_computed(fetch.tokens[fetch.cache.num_computed_tokens :], end_of_prompt=True)
        fetch.pull.settled.result(wait_s)
        with self.lock:
            fetch.cache.close()
        return outcome.status

    def at_rest(self) -> bool:
        """True when nothing is open and every page is free or cached; raises when the pool is damaged."""
        with self.lock:
            self.manager.check_integrity()
            stats = self.manager.stats()
        counts = self.transceiver.stats()
        return all(pool.held == 0 for pool in stats.pools) and not (
            counts.open_publications or counts.open_pulls or counts.quarantined_pulls
        )
