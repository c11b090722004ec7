"""The state machine of one transfer, the same on both sides.

    INIT -> READY -> TRANSFERRING -> TRANSFERRED -> DONE        any live state -> FAILED | CANCELLED | TIMED_OUT

INIT: made, the peer is not known yet. READY: the other side is there (receiver: link up; holder: request accepted).
TRANSFERRING: reads may be under way. TRANSFERRED: all bytes are here, generations and digests are being checked.
A terminal state is never overwritten: a late event is refused (and counted by the caller).
"""

from __future__ import annotations

from enum import StrEnum

from transceiver.transfer_types import TransferStatus

__all__ = ["TransferState", "TransferStateMachine"]


class TransferState(StrEnum):
    """Where a transfer stands."""

    INIT = "init"
    READY = "ready"
    TRANSFERRING = "transferring"
    TRANSFERRED = "transferred"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"


_ORDER = (TransferState.INIT, TransferState.READY, TransferState.TRANSFERRING, TransferState.TRANSFERRED)
_NEXT: dict[TransferState, frozenset[TransferState]] = {
    TransferState.INIT: frozenset({TransferState.READY}),
    TransferState.READY: frozenset({TransferState.TRANSFERRING, TransferState.TRANSFERRED}),
    TransferState.TRANSFERRING: frozenset({TransferState.TRANSFERRED, TransferState.DONE}),
    TransferState.TRANSFERRED: frozenset({TransferState.DONE}),
}
_BROKEN = frozenset({TransferState.FAILED, TransferState.CANCELLED, TransferState.TIMED_OUT})


class TransferStateMachine:
    """Holds one state and lets it move only along the arrows above. Not thread-safe."""

    __slots__ = ("_state",)

    def __init__(self) -> None:
        self._state = TransferState.INIT

    @property
    def state(self) -> TransferState:
        return self._state

    @property
    def terminal(self) -> bool:
        """True once nothing can change any more."""
        return self._state not in _ORDER

    def advance(self, state: TransferState) -> bool:
        """Move to `state`; False (and no change) when the arrows do not allow it."""
        if self.terminal or not (state in _BROKEN or state in _NEXT[self._state]):
            return False
        self._state = state
        return True

    def end(self, status: TransferStatus) -> bool:
        """Move to the terminal state of `status`; False when the arrows do not allow it."""
        return self.advance(TransferState(status.value))
