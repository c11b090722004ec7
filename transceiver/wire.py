"""The bounded msgpack form of control messages, with packed integer columns.

`encode` and `decode` are the only way in and out. Anything from a peer that is not exactly a known message of this
version within its bounds raises `WireFormatError`; nothing is unpickled and nothing large is built before its size is
known. Called by the transceiver's loop and the handshake. The format is described in docs/transceiver.md.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from transceiver.errors import WireFormatError
from transceiver.messages import (
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
)

__all__ = [
    "MAX_MESSAGE_BYTES",
    "MAX_REGION_BYTES",
    "MAX_UNPROVEN_BYTES",
    "PROTOCOL_VERSION",
    "Ack",
    "Cancel",
    "Challenge",
    "Digests",
    "Grant",
    "GroupRows",
    "Hello",
    "Message",
    "Proof",
    "PullRequest",
    "Refuse",
    "RegionInfo",
    "Welcome",
    "decode",
    "encode",
]

PROTOCOL_VERSION = 2
MAX_MESSAGE_BYTES = 64 << 20
MAX_UNPROVEN_BYTES = 4096  # before a peer has proved that it knows the secret
MAX_REGION_BYTES = 4096 + 64  # one region of a Welcome: a key of at most 4,096 bytes and eight small values
_MAX_ROWS = 1 << 21
_MAX_ITEMS = 256


def _uint(value: Any, bits: int = 64) -> int:
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise WireFormatError(f"expected an unsigned {bits}-bit integer")
    return value


def _text(value: Any, limit: int = 512) -> str:
    if type(value) is not str or len(value) > limit:
        raise WireFormatError(f"expected text of at most {limit} characters")
    return value


def _blob(value: Any, limit: int) -> bytes:
    if type(value) is not bytes or len(value) > limit:
        raise WireFormatError(f"expected at most {limit} bytes")
    return value


def _column(value: Any, dtype: str) -> NDArray[Any]:
    size = np.dtype(dtype).itemsize
    blob = _blob(value, _MAX_ROWS * size)
    if len(blob) % size:
        raise WireFormatError("a packed column has a broken last element")
    return np.frombuffer(blob, dtype=dtype)


def _items(value: Any, width: int, limit: int = _MAX_ITEMS) -> list[list[Any]]:
    if type(value) is not list or len(value) > limit:
        raise WireFormatError(f"expected a list of at most {limit} items")
    for item in value:
        if type(item) is not list or len(item) != width:
            raise WireFormatError(f"expected items of {width} values")
    return value


def _groups(value: Any) -> tuple[GroupRows, ...]:
    rows = []
    for group, ordinals, valid in _items(value, 3):
        row = GroupRows(_uint(group, 16), _column(ordinals, "<i4"), _column(valid, "<i4"))
        if len(row.ordinals) != len(row.valid_tokens):
            raise WireFormatError("the columns of a group have unequal lengths")
        rows.append(row)
    return tuple(rows)


def _regions(value: Any) -> tuple[RegionInfo, ...]:
    return tuple(
        RegionInfo(
            _uint(k, 8), _uint(g, 16), _uint(a), _uint(n), _uint(p), _blob(key, 4096), _uint(file, 31), _uint(inode)
        )
        for k, g, a, n, p, key, file, inode in _items(value, 8)
    )


_READ: dict[str, Callable[[Any], Any]] = {
    "nonce": lambda v: _blob(v, 32),
    "worker_id": lambda v: _text(v, 256),
    "proof": lambda v: _blob(v, 32),
    "layout": lambda v: _blob(v, 1 << 20),
    "regions": _regions,
    "identity": lambda v: _blob(v, 256),
    "pull_id": _uint,
    "field": lambda v: _text(v, 64),
    "reason": lambda v: _text(v, 2048),
    "transfer_id": lambda v: _text(v, 256),
    "token": lambda v: _blob(v, 64),
    "conversation": lambda v: _blob(v, 64),
    "scope": lambda v: _blob(v, 256),
    "verify": lambda v: _uint(v, 1),
    "timeout_ms": lambda v: _uint(v, 40),
    "groups": _groups,
    "last": lambda v: _uint(v, 1),
    "rows": lambda v: _column(v, "<i4"),
    "pages": lambda v: _column(v, "<i4"),
    "generations": lambda v: _column(v, "<u8"),
    "digests": lambda v: _blob(v, 16 * _MAX_ROWS),
    "status": lambda v: _text(v, 16),
    "blocks": _uint,
    "nbytes": _uint,
}
_KINDS: dict[int, type[Any]] = {
    kind.KIND: kind for kind in (Hello, Challenge, Proof, Welcome, Refuse, PullRequest, Grant, Digests, Ack, Cancel)
}
_FIELDS: dict[int, tuple[str, ...]] = {number: tuple(f.name for f in fields(kind)) for number, kind in _KINDS.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, GroupRows):
        return [value.group, value.ordinals.astype("<i4").tobytes(), value.valid_tokens.astype("<i4").tobytes()]
    if isinstance(value, RegionInfo):
        return [
            value.kind,
            value.group,
            value.address,
            value.nbytes,
            value.page_bytes,
            value.key,
            value.file,
            value.inode,
        ]
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def encode(message: Message) -> bytes:
    """Bytes of a message: msgpack ``[version, kind, field, ...]``."""
    values = [_plain(getattr(message, name)) for name in _FIELDS[message.KIND]]
    packed: bytes = msgpack.packb([PROTOCOL_VERSION, message.KIND, *values], use_bin_type=True)
    return packed


def decode(payload: bytes, limit: int = MAX_MESSAGE_BYTES) -> Message:
    """The message in `payload`. Raises WireFormatError for anything else, whatever the bytes are."""
    if len(payload) > limit:
        raise WireFormatError(f"a message of {len(payload)} bytes exceeds the bound of {limit}")
    try:
        raw = msgpack.unpackb(
            payload, raw=False, strict_map_key=True, use_list=True,
            max_array_len=_MAX_ITEMS, max_map_len=0, max_ext_len=0, max_str_len=4096, max_bin_len=limit,
        )  # fmt: skip
    except Exception as error:  # msgpack raises a family of unrelated types on hostile bytes
        raise WireFormatError(f"not msgpack: {type(error).__name__}") from None
    if type(raw) is not list or len(raw) < 2:
        raise WireFormatError("not a message: expected a list that begins with version and kind")
    if raw[0] != PROTOCOL_VERSION or type(raw[0]) is not int:
        raise WireFormatError(f"protocol version {str(raw[0])[:16]!s} is not {PROTOCOL_VERSION}")
    kind = raw[1]
    if type(kind) is not int or kind not in _KINDS:
        raise WireFormatError("unknown message kind")
    names = _FIELDS[kind]
    if len(raw) != 2 + len(names):
        raise WireFormatError("wrong number of fields")
    message = _KINDS[kind](*(_READ[name](value) for name, value in zip(names, raw[2:], strict=True)))
    _check_columns(message)
    result: Message = message
    return result


def _check_columns(message: Message) -> None:
    if isinstance(message, Grant):
        rows = len(message.rows)
        if not rows == len(message.pages) == len(message.generations) or len(message.digests) not in (0, 16 * rows):
            raise WireFormatError("the columns of a grant have unequal lengths")
    elif isinstance(message, Digests) and len(message.digests) != 16 * len(message.rows):
        raise WireFormatError("the columns of digests have unequal lengths")
