"""Memory keys from a peer: what is no whole key never reaches UCX, which would read past its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.unit.transceiver.rig import make_storage
from transceiver.errors import TransceiverError
from transceiver.ucp_binding import UcpError
from transceiver.ucx_fabric import BASE_OPTIONS, UcxFabric, key_is_sound
from transceiver.ucx_link import UcxLink

TWO_DOMAINS = b"\x05" + bytes(7) + b"\x00" + b"\x02ab" + b"\x00"


@pytest.mark.parametrize(
    ("key", "sound"),
    [
        (bytes(9), True),
        (TWO_DOMAINS, True),
        (TWO_DOMAINS + b"\xff", True),  # where the memory lies may follow
        (TWO_DOMAINS[:-1], False),
        (TWO_DOMAINS[:-2], False),
        (b"", False),
        (bytes(8), False),
        (b"x" * 40, False),
        (b"\xff" * 4096, False),
    ],
)
def test_a_key_must_end_where_it_says(key: bytes, sound: bool) -> None:
    assert key_is_sound(key) is sound


def test_no_random_bytes_lead_past_their_end() -> None:
    rng = np.random.default_rng(1)
    for _ in range(2000):
        key = rng.bytes(int(rng.integers(0, 60)))
        if key_is_sound(key):
            at = 9
            for _ in range(int.from_bytes(key[:8], "little").bit_count()):
                at += 1 + key[at]
            assert at <= len(key)


@pytest.mark.ucx
@pytest.mark.parametrize("tls", ["tcp", "tcp,cma", "self,tcp", "all"])
def test_the_keys_of_this_ucx_are_known(tls: str) -> None:
    """Else they would go to UCX unchecked."""
    api = pytest.importorskip("ucxx._lib.libucxx", reason="needs ucxx")
    storage = make_storage()
    fabric = UcxFabric(api, {"TLS": tls, **BASE_OPTIONS}, *[lambda *_: None] * 3)
    try:
        assert key_is_sound(fabric.map(1, storage.region()))
        assert fabric._keys_are_known
        with pytest.raises(UcpError, match="not a memory key"):
            fabric.unpack_key(0, b"x" * 40)  # UCX would end this process
    finally:
        fabric.close()
        storage.close()


def test_a_bad_key_fails_the_read_and_is_tried_again_with_the_next() -> None:
    def refuse(*_: object) -> int:
        raise UcpError("not a memory key")

    fabric: Any = SimpleNamespace(unpack_key=refuse)
    link = UcxLink(SimpleNamespace(), fabric, SimpleNamespace(handle=1), "peer")  # type: ignore[arg-type]
    for _ in range(3):
        with pytest.raises(TransceiverError, match="memory key of peer cannot be used"):
            link._handle(b"x" * 40)
    assert link.keys == {}
