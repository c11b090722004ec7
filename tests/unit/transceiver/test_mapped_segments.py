"""Pages that are put in place straight from a mapped pool come out like those that went through a staging buffer."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from kvcache.storage.layer_major_storage import LayerMajorStorage
from tests.unit.transceiver.rig import table
from transceiver.page_part import PagePart, PoolShape, part_between
from transceiver.parallel_layout import Interval, RankShare
from transceiver.pull_reads import Rows, Segment, plan_segments

TOKENS, PAGES = 8, 40
FULL, STATE = LifeCycleKind.FULL, LifeCycleKind.RECURRENT


def full(layers: tuple[int, ...], heads: int) -> LayerGroup:
    return LayerGroup(FULL, layers, heads, 16)


def state(layers: tuple[int, ...], nbytes: int) -> LayerGroup:
    return LayerGroup(STATE, layers, 0, 0, state_bytes_per_layer=nbytes)


def share(heads: int, start: int, stop: int, sections: tuple[int, ...] = ()) -> RankShare:
    return RankShare(heads, Interval(start, stop), sections)


CASES = {
    "half of the heads": (full((0, 1, 2), 2), share(4, 2, 4), full((0, 1, 2), 4), share(4, 0, 4), False),
    "a quarter into a half": (full((0, 1), 1), share(4, 1, 2), full((0, 1), 2), share(4, 0, 2), False),
    "one of two stages": (full((2, 3), 4), share(4, 0, 4), full((0, 1, 2, 3), 4), share(4, 0, 4), False),
    "into a layer-major pool": (full((0, 1, 2), 2), share(4, 0, 2), full((0, 1, 2), 4), share(4, 0, 4), True),
    "state by heads and sections": (
        state((0, 1), 96), share(2, 0, 1, (128, 64)), state((0, 1), 192), share(1, 0, 1, (128, 64)), False,
    ),
}  # fmt: skip


def fill(storage: BytesPageStorage, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for page in range(PAGES):
        view = storage.read_page(page)
        view[:] = rng.integers(0, 256, view.shape, dtype=np.uint8)


def stage(segment: Segment, source: BytesPageStorage) -> None:
    """What a transport does for a staged batch."""
    pool = np.frombuffer(source._views[0], np.uint8)
    segment.buffer = np.empty(segment.buffer_bytes, np.uint8)
    for local, offset, nbytes in zip(
        *(column.tolist() for column in (segment.batch.local, segment.batch.offset, segment.batch.nbytes)), strict=True
    ):
        segment.buffer[local : local + nbytes] = pool[offset : offset + nbytes]


@pytest.mark.parametrize("case", CASES)
def test_a_mapped_pool_needs_no_buffer(case: str) -> None:
    theirs, holds, mine, wants, layer_major = CASES[case]
    pool = PoolShape(layer_major, PAGES)
    part = part_between(TOKENS, theirs, holds, mine, wants, PoolShape(False, PAGES), pool)
    assert isinstance(part, PagePart)
    source = BytesPageStorage(KvLayout("m", TOKENS, (theirs,)), [PAGES])
    fill(source, 1)
    made = LayerMajorStorage if layer_major else BytesPageStorage
    targets = [made(KvLayout("m", TOKENS, (mine,)), [PAGES]) for _ in range(2)]
    order = np.random.default_rng(2)
    here, there = order.permutation(PAGES)[:33], order.permutation(PAGES)[:33]
    results = []
    for target, mapped in zip(targets, (False, True), strict=True):
        fill(target, 3)  # what is not the part's stays as it was
        rows = Rows.wanted((table(here.tolist()),))
        rows.remote[:] = there
        segments = list(
            plan_segments(
                rows, np.arange(33), target, (part,), [theirs.page_bytes(TOKENS)], 1 << 20, 1 << 30, mapped=mapped
            )
        )
        assert {segment.mapped for segment in segments} == {mapped}
        assert sorted(row for segment in segments for row in segment.rows.tolist()) == list(range(33))
        for segment in segments:
            if mapped:
                assert len(segment.batch) == 0
                segment.source = np.frombuffer(source._views[0], np.uint8)
                segment.source.flags.writeable = False
            else:
                stage(segment, source)
            segment.place(rows, target, theirs.page_bytes(TOKENS))
        results.append([target.read_page(page).tobytes() for page in range(PAGES)])
    assert results[0] == results[1]
    fresh = made(KvLayout("m", TOKENS, (mine,)), [PAGES])
    fill(fresh, 3)
    changed = {page for page in range(PAGES) if fresh.read_page(page).tobytes() != results[1][page]}
    assert changed == set(here.tolist())
    for storage in (source, fresh, *targets):
        storage.close()
