"""The state machine: only the drawn arrows, and nothing leaves a terminal state."""

from __future__ import annotations

import itertools

import pytest

from transceiver.transfer_state import TransferState as S
from transceiver.transfer_state import TransferStateMachine
from transceiver.transfer_types import TransferStatus


def machine_in(state: S) -> TransferStateMachine:
    machine = TransferStateMachine()
    for step in (S.READY, S.TRANSFERRING, S.TRANSFERRED):
        if machine.state is state:
            return machine
        assert machine.advance(step)
    if machine.state is not state:
        assert machine.advance(state)
    return machine


def test_the_happy_path() -> None:
    assert machine_in(S.DONE).terminal


@pytest.mark.parametrize(
    ("terminal", "status"),
    list(itertools.product((S.DONE, S.FAILED, S.CANCELLED, S.TIMED_OUT), TransferStatus)),
)
def test_a_terminal_state_is_never_replaced(terminal: S, status: TransferStatus) -> None:
    machine = machine_in(terminal)
    assert not machine.end(status)
    assert machine.state is terminal


@pytest.mark.parametrize("state", [S.INIT, S.READY])
def test_nothing_is_done_before_it_began(state: S) -> None:
    machine = machine_in(state)
    assert not machine.end(TransferStatus.DONE)
    assert machine.end(TransferStatus.FAILED)
