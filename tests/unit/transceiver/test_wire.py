"""Messages survive a round trip; anything else is refused by name, never by a crash."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest

from transceiver.errors import WireFormatError
from transceiver.wire import (
    PROTOCOL_VERSION,
    Ack,
    Cancel,
    Challenge,
    Digests,
    Grant,
    GroupRows,
    Hello,
    Message,
    Proof,
    PullRequest,
    Refuse,
    RegionInfo,
    Welcome,
    decode,
    encode,
)

I4 = np.asarray([0, 5, 2**31 - 1], np.int32)
SAMPLES: list[Message] = [
    Hello(b"n" * 16, "ctx-0"),
    Challenge(b"n" * 16, "gen-0", b"p" * 32),
    Proof(b"p" * 32, b"layout"),
    Welcome(b"layout", (RegionInfo(0, 0, 2**63, 4096, 64, b"key"), RegionInfo(1, 0, 1, 8, 8, b"")), b"id"),
    Refuse(3, "scope", "another scope"),
    PullRequest(1, "t", b"k" * 32, b"c" * 32, b"s", 1, 1000, (GroupRows(0, I4, I4), GroupRows(1, I4[:0], I4[:0]))),
    Grant(1, 1, I4, I4, I4.astype(np.uint64), b"d" * 48),
    Grant(1, 0, I4, I4, I4.astype(np.uint64), b""),
    Digests(1, I4, b"d" * 48),
    Ack(1, "done", "", 3, 2**40),
    Cancel(1, "cancelled", "why"),
]


V = PROTOCOL_VERSION


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_round_trip(message: Message) -> None:
    payload = encode(message)
    again = decode(payload)
    assert type(again) is type(message)
    assert encode(again) == payload


def test_columns_are_equal_after_a_round_trip() -> None:
    again = decode(encode(SAMPLES[5]))
    assert isinstance(again, PullRequest)
    assert again.groups[0].ordinals.tolist() == I4.tolist()
    assert len(again.groups[1].ordinals) == 0


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"\xc1",
        b"\x90",
        msgpack.packb([V]),
        msgpack.packb([V + 1, 1, b"n", "w"]),
        msgpack.packb([True, 1, b"n", "w"]),
        msgpack.packb([V, 99, b"n"]),
        msgpack.packb([V, 1, b"n"]),
        msgpack.packb([V, 1, "text", "w"]),
        msgpack.packb([V, 1, b"n" * 33, "w"]),
        msgpack.packb([V, 5, -1, "f", "r"]),
        msgpack.packb([V, 5, 2**64 - 1, "f", 7]),
        msgpack.packb([V, 7, 1, 1, b"\0" * 5, b"", b"", b""]),
        msgpack.packb([V, 7, 1, 1, b"\0" * 4, b"", b"", b""]),
        msgpack.packb([V, 7, 1, 2, b"", b"", b"", b""]),
        msgpack.packb([V, 8, 1, b"\0" * 4, b"short"]),
        msgpack.packb({"version": V}),
        msgpack.packb([V, 4, b"", [[0] * 8] * 300]),
        msgpack.packb([V, [1], b""]),
        msgpack.packb([V, 6, 1, "t", b"", b"", b"", 1, 1, [[0, b"\0" * 4, b""]]]),
    ],
)
def test_hostile_bytes_are_refused(raw: bytes) -> None:
    with pytest.raises(WireFormatError):
        decode(raw)


def test_a_message_beyond_the_bound_is_refused_before_parsing() -> None:
    with pytest.raises(WireFormatError, match="exceeds the bound of 10"):
        decode(encode(SAMPLES[0]), 10)


def test_another_protocol_version_is_named() -> None:
    with pytest.raises(WireFormatError, match=f"protocol version 9 is not {V}"):
        decode(msgpack.packb([9, 1, b"n", "w"]))


def test_two_thousand_blocks_are_small_and_cheap() -> None:
    rows = np.arange(2000, dtype=np.int32)
    payload = encode(Grant(1, 1, rows, rows, rows.astype(np.uint64), b"d" * 32000))
    assert len(payload) < 2000 * 33
