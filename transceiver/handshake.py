"""Who may connect, and whether the two caches fit together: both sides prove the cluster secret, then compare layouts.

Pure functions over messages, used by the transceiver's loop: the receiver sends Hello, checks Challenge and answers
Proof; the holder checks Proof and answers Welcome. No memory key leaves the holder before the receiver's proof holds.
A refusal names the differing field and concerns that link only. Nothing here does input or output.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

import msgpack

from kvcache.layout import KvLayout, LifeCycleKind
from transceiver.digest import DIGEST_NAME
from transceiver.errors import HandshakeRefusedError, WireFormatError
from transceiver.page_part import PagePart, PoolShape, default_shares, part_between
from transceiver.parallel_layout import Interval, RankShare
from transceiver.wire import Challenge, Hello, Proof, RegionInfo

__all__ = [
    "MIN_SECRET_BYTES",
    "NONCE_BYTES",
    "PeerLayout",
    "check_challenge",
    "check_layout",
    "check_proof",
    "check_regions",
    "make_challenge",
    "make_proof",
    "pack_layout",
    "parts_between",
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


@dataclass(frozen=True, slots=True)
class PeerLayout:
    """A side's layout and how its pools lie in memory, one a group (none given: block-major, on the host).

    `shares` None: the rank holds everything, and only an equal layout fits.
    """

    layout: KvLayout
    shares: tuple[RankShare, ...] | None = None
    pools: tuple[PoolShape, ...] = ()

    def pool(self, group: int) -> PoolShape:
        """How the pool of `group` lies in memory."""
        return self.pools[group] if self.pools else PoolShape()


def pack_layout(own: PeerLayout) -> bytes:
    """The layout, the share and the digest algorithm, as they travel."""
    shares = None
    if own.shares is not None:
        shares = [[s.num_heads, s.heads.start, s.heads.stop, list(s.state_sections)] for s in own.shares]
    pools = [[p.layer_major, p.num_pages, p.device] for p in own.pools]
    data = {"digest": DIGEST_NAME, "layout": own.layout.to_dict(), "shares": shares, "pools": pools}
    packed: bytes = msgpack.packb(data, use_bin_type=True)
    return packed


def unpack_layout(blob: bytes) -> tuple[str, PeerLayout]:
    """Inverse of `pack_layout`: (digest algorithm, layout). Raises WireFormatError."""
    try:
        data: Any = msgpack.unpackb(blob, raw=False, max_array_len=4096, max_map_len=64, max_str_len=1024)
        layout = KvLayout.from_dict(data["layout"])
        shares = None
        if data["shares"] is not None:
            shares = tuple(
                RankShare(int(total), Interval(int(start), int(stop)), tuple(map(int, sections)))
                for total, start, stop, sections in data["shares"]
            )
            if len(shares) != len(layout.groups):
                raise ValueError("one share a group")
        pools = tuple(_pool(*pool) for pool in data["pools"])
        if pools and len(pools) != len(layout.groups):
            raise ValueError("one pool a group")
        return str(data["digest"]), PeerLayout(layout, shares, pools)
    except Exception as error:  # hostile bytes may fail in any of msgpack's or the layout's own ways
        raise WireFormatError(f"not a layout: {type(error).__name__}") from None


def _pool(layer_major: Any, num_pages: Any, device: Any) -> PoolShape:
    if type(layer_major) is not bool or type(num_pages) is not int or not 0 < num_pages < 1 << 31:
        raise ValueError("not the form of a pool")
    if device != "cpu" and not str(device).startswith("cuda:"):
        raise ValueError("a pool lies on cpu or cuda:N")
    return PoolShape(layer_major, num_pages, str(device))


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


def check_layout(own: PeerLayout, blob: bytes) -> PeerLayout:
    """The peer's layout, when KV can move between the two.

    Pages must be alike, except that with shares the layers and heads may be shared out differently. Raises
    HandshakeRefusedError that names the first differing field and both values.
    """
    digest, peer = unpack_layout(blob)
    mine, theirs = own.layout, peer.layout
    pairs: list[tuple[str, object, object]] = [
        ("digest", DIGEST_NAME, digest),
        ("model_fingerprint", mine.model_fingerprint, theirs.model_fingerprint),
        ("tokens_per_block", mine.tokens_per_block, theirs.tokens_per_block),
        ("groups", len(mine.groups), len(theirs.groups)),
    ]
    strict = own.shares is None and peer.shares is None
    per_rank = () if strict else ("layers", "num_kv_heads", "state_bytes_per_layer")
    shares = zip(own.shares or default_shares(mine), peer.shares or default_shares(theirs), strict=False)
    for index, (here, there, (share, other)) in enumerate(zip(mine.groups, theirs.groups, shares, strict=False)):
        pairs += [
            (f"groups[{index}].{name}", getattr(here, name), getattr(there, name))
            for name in here.__dataclass_fields__
            if name not in per_rank
        ]
        if not strict and here.kind is not LifeCycleKind.RECURRENT:
            pairs.append((f"groups[{index}].num_heads", share.num_heads, other.num_heads))
            pairs.append((f"groups[{index}].heads", there.num_kv_heads, len(other.heads)))
        pairs.append((f"groups[{index}].state_sections", share.state_sections, other.state_sections))
    for name, value, peers in pairs:
        if value != peers:
            raise HandshakeRefusedError(
                name,
                f"the KV layouts differ in {name}: {_short(value)} here, {_short(peers)} at the peer; "
                "start both workers with the same model, dtype and block size",
            )
    return peer


def check_regions(theirs: PeerLayout, regions: tuple[RegionInfo, ...]) -> dict[tuple[int, int], RegionInfo]:
    """The holder's pools and generation numbers by (kind, group). Raises HandshakeRefusedError when they do not fit."""
    infos = {(info.kind, info.group): info for info in regions}
    for group in range(len(theirs.layout.groups)):
        pool, generations = infos.get((0, group)), infos.get((1, group))
        size = theirs.layout.page_bytes(group)
        if pool is None or generations is None or pool.page_bytes != size or pool.nbytes % size:
            raise HandshakeRefusedError("regions", f"the peer's pool of group {group} does not fit its layout")
        if generations.nbytes != pool.nbytes // size * 8:
            raise HandshakeRefusedError("regions", f"the peer's generations of group {group} have a wrong size")
        if theirs.pools and theirs.pools[group].num_pages != pool.nbytes // size:
            raise HandshakeRefusedError("regions", f"the peer's pool of group {group} has another number of pages")
    return infos


def parts_between(holder: PeerLayout, receiver: PeerLayout) -> tuple[PagePart | None, ...]:
    """Per group what the two pages share (None: whole pages are alike). Raises HandshakeRefusedError."""
    shares = zip(
        holder.shares or default_shares(holder.layout), receiver.shares or default_shares(receiver.layout), strict=True
    )
    try:
        return tuple(
            part_between(
                holder.layout.tokens_per_block, theirs, share, mine, own, holder.pool(index), receiver.pool(index)
            )
            for index, (theirs, mine, (share, own)) in enumerate(
                zip(holder.layout.groups, receiver.layout.groups, shares, strict=True)
            )
        )
    except ValueError as error:
        raise HandshakeRefusedError("shares", f"the two ranks' shares do not fit together: {error}") from error


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
