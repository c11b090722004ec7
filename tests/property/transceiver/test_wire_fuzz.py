"""The decoder meets arbitrary and mutated bytes: it returns a message or raises WireFormatError, nothing else.

A longer run: ``KVFERRY_FUZZ_INPUTS=1000000 pytest tests/property/transceiver/test_wire_fuzz.py -k many``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.layout import KvLayout
from tests.unit.transceiver.rig import make_layout
from tests.unit.transceiver.test_wire import SAMPLES
from transceiver.errors import WireFormatError
from transceiver.handshake import PeerLayout, pack_layout, unpack_layout
from transceiver.parallel_layout import Interval, RankShare
from transceiver.wire import decode, encode

SEEDS = [encode(message) for message in SAMPLES]
LAYOUTS = [
    pack_layout(PeerLayout(make_layout())),
    pack_layout(PeerLayout(make_layout(), (RankShare(4, Interval(0, 2)),))),
]


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


@pytest.mark.timeout(0)
def test_many_mutations_of_the_corpus() -> None:
    total = int(os.environ.get("KVFERRY_FUZZ_INPUTS", "20000"))
    rng = np.random.default_rng(2024)
    for index in range(total):
        if index % 8 == 7:
            layout_survives(mutate(LAYOUTS[index // 8 % len(LAYOUTS)], rng))
        else:
            survives(mutate(SEEDS[index % len(SEEDS)], rng))
