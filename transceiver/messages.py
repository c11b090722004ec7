"""Control messages of the transceiver, as values. `transceiver.wire` turns them into bytes and back.

Field order is wire order. `KIND` numbers a message for good: a changed message gets a new protocol version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
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
]


@dataclass(frozen=True, slots=True)
class Hello:
    """receiver -> holder, first message: who I am, and a challenge."""

    KIND: ClassVar[int] = 1
    nonce: bytes
    worker_id: str


@dataclass(frozen=True, slots=True)
class Challenge:
    """holder -> receiver: proof that the holder knows the secret, and its own challenge."""

    KIND: ClassVar[int] = 2
    nonce: bytes
    worker_id: str
    proof: bytes


@dataclass(frozen=True, slots=True)
class Proof:
    """receiver -> holder: proof of the secret, and the receiver's layout (`layout` is msgpack)."""

    KIND: ClassVar[int] = 3
    proof: bytes
    layout: bytes


@dataclass(frozen=True, slots=True)
class RegionInfo:
    """A registered pool: `kind` 0 pages, 1 generation numbers, 2 staging; `key` is the transport's.

    `file` is 1 + the number of the holder's open memory file that begins with this region (0: there is none), `inode`
    that file's identity.
    """

    kind: int
    group: int
    address: int
    nbytes: int
    page_bytes: int
    key: bytes
    file: int = 0
    inode: int = 0


@dataclass(frozen=True, slots=True)
class Welcome:
    """holder -> receiver: the layout that the pages have here, where they lie, and what this process is."""

    KIND: ClassVar[int] = 4
    layout: bytes
    regions: tuple[RegionInfo, ...]
    identity: bytes


@dataclass(frozen=True, slots=True)
class Refuse:
    """Either way: this link (`pull_id` 0) or this pull is refused; `field` names what is wrong."""

    KIND: ClassVar[int] = 5
    pull_id: int
    field: str
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class GroupRows:
    """The blocks of one layer group that a receiver wants."""

    group: int
    ordinals: NDArray[np.int32]
    valid_tokens: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PullRequest:
    """receiver -> holder: the missing ordinals, under a grant's capability."""

    KIND: ClassVar[int] = 6
    pull_id: int
    transfer_id: str
    token: bytes
    conversation: bytes
    scope: bytes
    verify: int
    timeout_ms: int
    groups: tuple[GroupRows, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Grant:
    """holder -> receiver: where the requested rows lie.

    `rows` index the request's rows (all groups one after the other); page -1: the holder has no such block. `digests`
    holds 16 bytes a row, or nothing when they follow later. `last`: no further grant comes for this pull.
    """

    KIND: ClassVar[int] = 7
    pull_id: int
    last: int
    rows: NDArray[np.int32]
    pages: NDArray[np.int32]
    generations: NDArray[np.uint64]
    digests: bytes


@dataclass(frozen=True, slots=True, eq=False)
class Digests:
    """holder -> receiver: digests that were not ready with the grant, 16 bytes a row."""

    KIND: ClassVar[int] = 8
    pull_id: int
    rows: NDArray[np.int32]
    digests: bytes


@dataclass(frozen=True, slots=True)
class Ack:
    """receiver -> holder: the pull is over (`status` of transfer_types); the holder may release the pages."""

    KIND: ClassVar[int] = 9
    pull_id: int
    status: str
    reason: str
    blocks: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """holder -> receiver: stop this pull (`status` says whether it was cancelled, failed or its lease ran out)."""

    KIND: ClassVar[int] = 10
    pull_id: int
    status: str
    reason: str


Message: TypeAlias = Hello | Challenge | Proof | Welcome | Refuse | PullRequest | Grant | Digests | Ack | Cancel
