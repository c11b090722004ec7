"""Small storages, tables and pairs of transceivers for the tests of the transceiver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np

from kvcache.block_table import BlockTable
from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from transceiver import CacheTransceiver, CacheTransceiverConfig, TransceiverBackend
from transceiver.testing import FaultInjector

SECRET = b"a test secret of some length"
SCOPE = b"scope"


def make_layout(tokens_per_block: int = 8, **changes: Any) -> KvLayout:
    """Two layers, two heads; `changes` go to the layer group or, by name, to the layout."""
    fingerprint = changes.pop("model_fingerprint", "test-model")
    group: dict[str, Any] = {"kind": LifeCycleKind.FULL, "layers": (0, 1), "num_kv_heads": 2, "head_dim": 16}
    return KvLayout(fingerprint, tokens_per_block, (LayerGroup(**{**group, **changes}),))


def make_storage(
    layout: KvLayout | None = None, pages: Sequence[int] = (16,), fill: int | None = None, *, shared: bool = False
) -> BytesPageStorage:
    """Zeroed pages, or random ones from seed `fill`."""
    storage = BytesPageStorage(layout or make_layout(), list(pages), shared=shared)
    if fill is not None:
        rng = np.random.default_rng(fill)
        for group, count in enumerate(pages):
            for page in range(count):
                view = storage.page(page, group)
                view[:] = rng.bytes(len(view))
            storage.generations(group)[:] = 1
    return storage


def table(
    pages: Sequence[int], ordinals: Sequence[int] | None = None, valid: Sequence[int] | None = None, group: int = 0,
    generation: int = 1, tokens_per_block: int = 8,
) -> BlockTable:  # fmt: skip
    """A block table; ordinals count from 0 and blocks are full unless given."""
    count = len(pages)
    return BlockTable(
        group,
        np.asarray(range(count) if ordinals is None else ordinals, np.int32),
        np.asarray(pages, np.int32),
        np.full(count, generation, np.uint64),
        np.asarray([tokens_per_block] * count if valid is None else valid, np.int32),
    )


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Poll until `condition` holds or the deadline passes."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


_names = iter(range(1, 1 << 30))


class Pair:
    """A holder with random pages and a receiver with zeroed ones, over `inproc` unless told otherwise."""

    def __init__(
        self, *, layout: KvLayout | None = None, receiver_layout: KvLayout | None = None, pages: Sequence[int] = (16,),
        receiver_secret: bytes = SECRET, backend: TransceiverBackend = TransceiverBackend.INPROC, **config: Any,
    ) -> None:  # fmt: skip
        number = next(_names)
        settings = CacheTransceiverConfig(backend=backend, **config)
        self.source = make_storage(layout, pages, fill=number)
        self.target = make_storage(receiver_layout or layout, pages)
        inproc = backend is TransceiverBackend.INPROC
        self.holder_faults, self.receiver_faults = FaultInjector(), FaultInjector()
        self.holder = CacheTransceiver(
            worker_id=f"holder-{number}", storage=self.source, config=settings, secret=SECRET,
            faults=self.holder_faults if inproc else None,
        )  # fmt: skip
        self.receiver = CacheTransceiver(
            worker_id=f"receiver-{number}", storage=self.target, config=settings, secret=receiver_secret,
            faults=self.receiver_faults if inproc else None,
        )  # fmt: skip

    def __enter__(self) -> Pair:
        self.holder.start()
        self.receiver.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.receiver.close()
        self.holder.close()
        self.target.close()
        self.source.close()

    def publish(self, name: str = "t", pages: Sequence[int] = (3, 1, 2), lease_s: float = 10.0, **changes: Any) -> Any:
        identity = {"conversation_id": "c", "scope": SCOPE, **changes}
        return self.holder.publish(name, (table(pages),), lease_s=lease_s, **identity)

    def pull(self, publication: Any, pages: Sequence[int] = (4, 5, 6), timeout_s: float = 5.0, **changes: Any) -> Any:
        ordinals = changes.pop("ordinals", None)
        identity = {"conversation_id": "c", "scope": SCOPE, **changes}
        return self.receiver.pull(publication.ticket, (table(pages, ordinals),), timeout_s=timeout_s, **identity)

    def same(self, source: Sequence[int], target: Sequence[int]) -> bool:
        """True when the pages are equal byte for byte."""
        return all(
            bytes(self.source.page(a)) == bytes(self.target.page(b)) for a, b in zip(source, target, strict=True)
        )


@contextmanager
def pair(**options: Any) -> Iterator[Pair]:
    """A started pair, closed at the end."""
    with Pair(**options) as both:
        yield both
