"""The decoder meets arbitrary and mutated bytes: it returns a message or raises WireFormatError, nothing else.

A longer run: ``KVFERRY_FUZZ_INPUTS=1000000 pytest tests/property/transceiver/test_wire_fuzz.py -k many``.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.layout import KvLayout
from tests.unit.transceiver.rig import eventually, make_layout, pair
from tests.unit.transceiver.test_wire import SAMPLES
from transceiver import TransferStatus
from transceiver.errors import LinkClosedError, TransceiverError, WireFormatError
from transceiver.handshake import PeerLayout, pack_layout, unpack_layout
from transceiver.inproc import InprocTransport
from transceiver.nixl_link import pack_region_key, unpack_region_key
from transceiver.page_part import PoolShape
from transceiver.parallel_layout import Interval, RankShare
from transceiver.wire import _KINDS, decode, encode

SEEDS = [encode(message) for message in SAMPLES]
LAYOUTS = [
    pack_layout(PeerLayout(make_layout())),
    pack_layout(PeerLayout(make_layout(), None, (PoolShape(True, 9, "cuda:1"),))),
    pack_layout(PeerLayout(make_layout(), (RankShare(4, Interval(0, 2)),))),
]


def test_the_corpus_has_every_kind_of_message() -> None:
    assert {seed[2] for seed in SEEDS} == set(_KINDS)
    assert {type(message) for message in SAMPLES} == set(_KINDS.values())


def survives(payload: bytes) -> None:
    try:
        message = decode(payload)
    except WireFormatError:
        return
    assert decode(encode(message)) is not None


def layout_survives(blob: bytes) -> None:
    try:
        _, peer = unpack_layout(blob)
    except WireFormatError:
        return
    assert isinstance(peer.layout, KvLayout)


def mutate(seed: bytes, rng: np.random.Generator) -> bytes:
    """One to four random edits: a byte set, a span removed, doubled, or replaced by noise."""
    data = bytearray(seed)
    for _ in range(int(rng.integers(1, 5))):
        if not data:
            return bytes(data)
        at = int(rng.integers(len(data)))
        match int(rng.integers(4)):
            case 0:
                data[at] = int(rng.integers(256))
            case 1:
                del data[at : at + int(rng.integers(1, 9))]
            case 2:
                data[at:at] = data[at : at + int(rng.integers(1, 9))]
            case _:
                data[at : at + 4] = rng.bytes(4)
    return bytes(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes(payload: bytes) -> None:
    survives(payload)
    layout_survives(payload)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(SEEDS), st.integers(0, 2**32))
def test_mutated_seeds(seed: bytes, number: int) -> None:
    survives(mutate(seed, np.random.default_rng(number)))


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: f"kind{seed[2]}")
def test_every_truncation_is_refused(seed: bytes) -> None:
    for length in range(len(seed)):
        with pytest.raises(WireFormatError):
            decode(seed[:length])


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 2**32))
def test_memory_keys(noise: bytes, number: int) -> None:
    seed = pack_region_key("DRAM", 0, b"metadata")
    for key in (noise, mutate(seed, np.random.default_rng(number))):
        try:
            memory, device, metadata = unpack_region_key(key)
        except TransceiverError:
            continue
        assert pack_region_key(memory, device, metadata) == key


class Stranger:
    """Somebody who connects and says anything; what comes back is not read."""

    def on_accept(self, link: object) -> None: ...
    def on_message(self, link: object, payload: bytes) -> None: ...
    def on_get_done(self, link: object, token: object, error: str | None) -> None: ...
    def on_lost(self, link: object, reason: str) -> None: ...


@pytest.mark.parametrize("seed", range(4))
def test_a_live_holder_survives_strangers(seed: int) -> None:
    """Hostile messages in any phase end their link at most; the holder serves on and keeps nothing."""
    rng = np.random.default_rng(seed)
    with pair(connect_timeout_ms=300) as p:
        stranger = InprocTransport(f"stranger-{seed}-{id(p)}")
        stranger.open(Stranger())
        for _ in range(60):
            link = stranger.connect(p.holder.address)
            for _ in range(int(rng.integers(1, 6))):
                payload = SEEDS[int(rng.integers(len(SEEDS)))]
                with contextlib.suppress(LinkClosedError):
                    link.send(payload if rng.random() < 0.4 else mutate(payload, rng))
            stranger.poll(0)
        assert eventually(lambda: p.holder.stats().malformed_messages + p.holder.stats().refused_links >= 20)
        assert p.pull(p.publish()).future.result(5).status is TransferStatus.DONE
        stranger.close()
        assert eventually(lambda: len(p.holder._loop.peers._by_link) == 1)
        assert p.holder.stats().parked_requests == 0


@pytest.mark.timeout(0)
def test_many_mutations_of_the_corpus() -> None:
    total = int(os.environ.get("KVFERRY_FUZZ_INPUTS", "20000"))
    rng = np.random.default_rng(2024)
    for index in range(total):
        if index % 8 == 7:
            layout_survives(mutate(LAYOUTS[index // 8 % len(LAYOUTS)], rng))
        else:
            survives(mutate(SEEDS[index % len(SEEDS)], rng))
