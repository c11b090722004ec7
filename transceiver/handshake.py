"""Who may connect, and whether the two caches fit together: both sides prove the cluster secret, then compare layouts.

Pure functions over messages, used by the transceiver's loop: the receiver sends Hello, checks Challenge and answers
Proof; the holder checks Proof and answers Welcome. No memory key leaves the holder before the receiver's proof holds.
A refusal names the differing field and concerns that link only. Nothing here does input or output.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import msgpack

from kvcache.layout import KvLayout
from transceiver.digest import DIGEST_NAME
from transceiver.errors import HandshakeRefusedError, WireFormatError
from transceiver.wire import Challenge, Hello, Proof

__all__ = [
    "MIN_SECRET_BYTES",
    "NONCE_BYTES",
    "check_challenge",
    "check_layout",
    "check_proof",
    "make_challenge",
    "make_proof",
    "pack_layout",
    "sign",
    "unpack_layout",
]

NONCE_BYTES = 16
MIN_SECRET_BYTES = 16
_WRONG_SECRET = (
    "the peer does not prove the cluster secret: start both sides with the same secret (at least "
    f"{MIN_SECRET_BYTES} bytes)"
)


def sign(secret: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over length-prefixed parts."""
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(len(part).to_bytes(8, "little"))
        mac.update(part)
    return mac.digest()


def pack_layout(layout: KvLayout) -> bytes:
    """The layout and the digest algorithm, as they travel."""
    packed: bytes = msgpack.packb({"digest": DIGEST_NAME, "layout": layout.to_dict()}, use_bin_type=True)
    return packed


def unpack_layout(blob: bytes) -> tuple[str, KvLayout]:
    """Inverse of `pack_layout`: (digest algorithm, layout). Raises WireFormatError."""
    try:
        data: Any = msgpack.unpackb(blob, raw=False, max_array_len=4096, max_map_len=64, max_str_len=1024)
        return str(data["digest"]), KvLayout.from_dict(data["layout"])
    except Exception as error:  # hostile bytes may fail in any of msgpack's or the layout's own ways
        raise WireFormatError(f"not a layout: {type(error).__name__}") from None


def make_challenge(secret: bytes, hello: Hello, nonce: bytes, worker_id: str) -> Challenge:
    """The holder's answer to Hello: its own proof and challenge."""
    names = (hello.worker_id.encode(), worker_id.encode())
    return Challenge(nonce, worker_id, sign(secret, b"kvferry-holder", hello.nonce, nonce, *names))


def check_challenge(secret: bytes, hello: Hello, challenge: Challenge) -> None:
    """Raises HandshakeRefusedError unless the holder knows the secret."""
    expected = make_challenge(secret, hello, challenge.nonce, challenge.worker_id).proof
    if len(challenge.nonce) != NONCE_BYTES or not hmac.compare_digest(expected, challenge.proof):
        raise HandshakeRefusedError("secret", _WRONG_SECRET)


def make_proof(secret: bytes, hello: Hello, challenge: Challenge, layout: bytes) -> Proof:
    """The receiver's answer to Challenge; the proof covers its layout too."""
    names = (hello.worker_id.encode(), challenge.worker_id.encode())
    return Proof(sign(secret, b"kvferry-receiver", hello.nonce, challenge.nonce, *names, layout), layout)


def check_proof(secret: bytes, hello: Hello, challenge: Challenge, proof: Proof) -> None:
    """Raises HandshakeRefusedError unless the receiver knows the secret."""
    expected = make_proof(secret, hello, challenge, proof.layout).proof
    if not hmac.compare_digest(expected, proof.proof):
        raise HandshakeRefusedError("secret", _WRONG_SECRET)


def check_layout(own: KvLayout, blob: bytes) -> KvLayout:
    """The peer's layout, when its pages can be exchanged with `own` byte for byte.

    Raises HandshakeRefusedError that names the first differing field and both values.
    """
    digest, peer = unpack_layout(blob)
    pairs: list[tuple[str, object, object]] = [
        ("digest", DIGEST_NAME, digest),
        ("model_fingerprint", own.model_fingerprint, peer.model_fingerprint),
        ("tokens_per_block", own.tokens_per_block, peer.tokens_per_block),
        ("groups", len(own.groups), len(peer.groups)),
    ]
    for index, (mine, theirs) in enumerate(zip(own.groups, peer.groups, strict=False)):
        for name in mine.__dataclass_fields__:
            pairs.append((f"groups[{index}].{name}", getattr(mine, name), getattr(theirs, name)))
    for name, here, there in pairs:
        if here != there:
            raise HandshakeRefusedError(
                name, f"the KV layouts differ in {name}: {_short(here)} here, {_short(there)} at the peer; "
                "start both workers with the same model, dtype and block size",
            )  # fmt: skip
    return peer


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
