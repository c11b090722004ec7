"""Values of the transfer protocol that leave the transceiver: tickets, outcomes, reasons."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

__all__ = ["GrantTicket", "TransferOutcome", "TransferStatus"]


class TransferStatus(StrEnum):
    """Terminal states of a transfer."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class GrantTicket:
    """What a receiver needs to ask a holder for blocks: small, given from worker to worker by the orchestrator.

    `token` is an unguessable capability for this one grant, bound to its conversation and reuse scope.
    """

    address: str
    transfer_id: str
    token: bytes
    num_tokens: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """How a transfer ended, on either side.

    bad_ordinals: (group, ordinal) of blocks that arrived but failed the digest or generation check; the receiver must
    not publish them. Times are seconds. `retries`: how often it began again on a new link.
    `digest_mismatches`: blocks that arrived with a wrong digest.
    """

    status: TransferStatus
    reason: str = ""
    blocks: int = 0
    bytes: int = 0
    segments: int = 0
    transport: str = ""
    bad_ordinals: tuple[tuple[int, int], ...] = ()
    seconds: dict[str, float] = field(default_factory=dict)
    retries: int = 0
    digest_mismatches: int = 0
