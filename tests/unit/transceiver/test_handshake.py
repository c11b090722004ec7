"""Proofs hold only with the same secret; layouts that differ are refused by the field's name."""

from __future__ import annotations

import dataclasses

import pytest

from kvcache.layout import KvLayout
from tests.unit.transceiver.rig import make_layout
from transceiver.errors import HandshakeRefusedError, WireFormatError
from transceiver.handshake import (
    PeerLayout,
    check_challenge,
    check_layout,
    check_proof,
    make_challenge,
    make_proof,
    pack_layout,
    unpack_layout,
)
from transceiver.wire import Hello

HELLO = Hello(b"a" * 16, "gen-0")
SECRET, OTHER = b"s" * 16, b"t" * 16


def test_both_proofs_hold_with_one_secret() -> None:
    challenge = make_challenge(SECRET, HELLO, b"b" * 16, "ctx-0")
    check_challenge(SECRET, HELLO, challenge)
    check_proof(SECRET, HELLO, challenge, make_proof(SECRET, HELLO, challenge, b"layout"))


def test_another_secret_fails_on_either_side() -> None:
    challenge = make_challenge(SECRET, HELLO, b"b" * 16, "ctx-0")
    with pytest.raises(HandshakeRefusedError, match="same secret"):
        check_challenge(OTHER, HELLO, challenge)
    with pytest.raises(HandshakeRefusedError, match="same secret"):
        check_proof(SECRET, HELLO, challenge, make_proof(OTHER, HELLO, challenge, b"layout"))


def test_a_proof_is_bound_to_names_nonces_and_layout() -> None:
    challenge = make_challenge(SECRET, HELLO, b"b" * 16, "ctx-0")
    proof = make_proof(SECRET, HELLO, challenge, b"layout")
    for hello, chal, answer in (
        (dataclasses.replace(HELLO, worker_id="gen-1"), challenge, proof),
        (HELLO, dataclasses.replace(challenge, nonce=b"c" * 16), proof),
        (HELLO, challenge, dataclasses.replace(proof, layout=b"other")),
    ):
        with pytest.raises(HandshakeRefusedError):
            check_proof(SECRET, hello, chal, answer)
    with pytest.raises(HandshakeRefusedError):  # a holder's proof is no receiver's proof
        check_proof(SECRET, HELLO, challenge, dataclasses.replace(proof, proof=challenge.proof))


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("tokens_per_block", make_layout(16)),
        ("model_fingerprint", make_layout(model_fingerprint="other")),
        ("groups[0].dtype", make_layout(dtype="float16")),
        ("groups[0].head_dim", make_layout(head_dim=32)),
        ("groups[0].kv_factor", make_layout(kv_factor=1)),
    ],
)
def test_the_differing_field_is_named(field: str, other: KvLayout) -> None:
    with pytest.raises(HandshakeRefusedError) as refusal:
        check_layout(PeerLayout(make_layout()), pack_layout(PeerLayout(other)))
    assert refusal.value.field == field
    assert field in str(refusal.value)


def test_layout_round_trip_and_garbage() -> None:
    assert unpack_layout(pack_layout(PeerLayout(make_layout())))[1] == PeerLayout(make_layout())
    for blob in (b"", b"\x80", b"\xff" * 10, pack_layout(PeerLayout(make_layout()))[:-3]):
        with pytest.raises(WireFormatError):
            unpack_layout(blob)
