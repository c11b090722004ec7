"""The ledger by itself: every count, bound and message, with handles that only count their drops."""

from __future__ import annotations

import logging

import pytest

from kvcache.conversation_manager import ConversationManager


class Handle:
    def __init__(self, dropped: list[str], name: str) -> None:
        self.drop = lambda: dropped.append(name)
        self.num_tokens = 4


class Rig:
    """A ledger on a clock that the test sets, and the names of the turns it dropped, in order."""

    def __init__(self, turns: int = 2, tracked: int = 100, timeout: float | None = 10.0) -> None:
        self.now = 0.0
        self.dropped: list[str] = []
        self.ledger = ConversationManager(turns, tracked, timeout, lambda: self.now)

    def turn(self, conversation: str, name: str) -> None:
        opened = self.ledger.prepare(conversation, name)
        assert opened is not None
        self.ledger.bound()
        self.ledger.end_of_prompt(opened, name)
        self.ledger.save_plan(opened, lambda: Handle(self.dropped, name))
        self.ledger.finish(opened, name)

    def tracked(self) -> list[str]:
        return [conversation.conversation_id for conversation in self.ledger.conversations()]


def test_the_last_n_turns_in_order_of_completion():
    rig = Rig(turns=2)
    for name in ("r1", "r2", "r3", "r4"):
        rig.turn("c", name)
    conversation = rig.ledger.get("c")
    assert rig.dropped == ["r1", "r2"]
    assert (conversation.completed, len(conversation.turns), rig.ledger.retained_turns) == (4, 2, 2)
    assert (conversation.current, conversation.open_requests, conversation.ended) == (None, 0, False)


def test_two_open_requests_of_one_conversation():
    rig = Rig()
    first = rig.ledger.prepare("c", "r1")
    rig.ledger.end_of_prompt(first, "r1")
    assert rig.ledger.prepare("c", "r2") is first
    assert first.open_requests == 2
    rig.ledger.finish(first, "r1")
    assert (rig.tracked(), first.current, first.open_requests) == (["c"], "r2", 1)
    rig.ledger.finish(first, "r2")
    assert (rig.tracked(), len(rig.ledger)) == ([], 0)


def test_only_the_current_request_ends_its_prompt():
    rig = Rig()
    conversation = rig.ledger.prepare("c", "r1")
    rig.ledger.end_of_prompt(conversation, "another")
    assert conversation.current == "r1"
    rig.ledger.end_of_prompt(conversation, "r1")
    assert conversation.current is None


def test_a_cancelled_prompt_lets_the_next_one_begin(caplog):
    rig = Rig()
    rig.turn("c", "r1")
    conversation = rig.ledger.prepare("c", "r2")
    rig.ledger.finish(conversation, "r2")
    assert rig.ledger.prepare("c", "r3") is conversation
    assert not caplog.records
    assert conversation.completed == 1


def test_the_warning_names_the_conversation_and_both_requests(caplog):
    rig = Rig()
    rig.ledger.prepare("c7", "r1")
    with caplog.at_level(logging.WARNING):
        assert rig.ledger.prepare("c7", "r2") is None
    assert [record.getMessage() for record in caplog.records] == [
        "conversation c7 still computes the prompt of request r1: request r2 is not counted as a turn of it"
    ]


def test_a_turn_without_a_plan_is_told_counted_and_not_retained(caplog):
    rig = Rig(turns=1)
    rig.turn("c7", "r1")
    conversation = rig.ledger.prepare("c7", "r2")
    with caplog.at_level(logging.WARNING):
        rig.ledger.save_plan(conversation, lambda: None)
    assert [record.getMessage() for record in caplog.records] == [
        "conversation c7: blocks of the turn that ended were given up already, so it is not retained"
    ]
    assert (conversation.completed, len(conversation.turns), rig.dropped) == (2, 1, [])


def test_an_ended_conversation_takes_no_plan_and_is_not_removed_twice():
    rig = Rig()
    conversation = rig.ledger.prepare("c", "r1")
    assert rig.ledger.end("c") is True
    assert conversation.ended
    again = rig.ledger.prepare("c", "r2")
    assert again is not conversation
    rig.ledger.save_plan(conversation, lambda: pytest.fail("planned for a conversation that was ended"))
    assert conversation.completed == 0
    rig.ledger.finish(conversation, "r1")
    assert rig.ledger.get("c") is again


def test_ending_drops_every_turn_oldest_first():
    rig = Rig(turns=3)
    for name in ("r1", "r2", "r3"):
        rig.turn("c", name)
    assert rig.ledger.end("c") is True
    assert rig.dropped == ["r1", "r2", "r3"]
    assert rig.ledger.end("c") is False


def test_expiry():
    rig = Rig(timeout=10.0)
    for second, name in enumerate(("a", "b", "c", "d")):
        rig.now = float(second)
        rig.turn(name, name)
    rig.now = 10.0
    assert rig.ledger.expire_idle() == 0  # "a" for exactly the time-out, not for longer
    rig.now = 12.5
    assert rig.ledger.expire_idle() == 3
    assert (rig.tracked(), rig.dropped) == (["d"], ["a", "b", "c"])


def test_an_open_request_keeps_its_conversation_from_expiring():
    rig = Rig(timeout=10.0)
    conversation = rig.ledger.prepare("a", "r1")
    rig.turn("b", "r2")
    rig.now = 100.0
    assert rig.ledger.expire_idle() == 1
    assert rig.tracked() == ["a"]
    rig.ledger.save_plan(conversation, lambda: Handle(rig.dropped, "r1"))
    rig.ledger.finish(conversation, "r1")
    rig.now = 109.0
    assert rig.ledger.expire_idle() == 0  # idle since the turn's end


def test_without_a_timeout_nothing_expires():
    rig = Rig(timeout=None)
    rig.turn("a", "r1")
    rig.now = 1e12
    assert rig.ledger.expire_idle() == 0


def test_the_bound_ends_those_idle_for_longest():
    rig = Rig(tracked=3)
    for second, name in enumerate(("a", "b", "c", "a", "d")):
        rig.now = float(second)
        rig.turn(name, f"{name}{second}")
    assert (rig.tracked(), rig.dropped) == (["c", "a", "d"], ["b1"])


def test_the_bound_spares_open_requests():
    rig = Rig(tracked=2)
    opened = [rig.ledger.prepare(name, name) for name in ("a", "b", "c")]
    rig.ledger.bound()
    assert rig.tracked() == ["a", "b", "c"]
    rig.ledger.save_plan(opened[1], lambda: Handle(rig.dropped, "b"))
    rig.ledger.finish(opened[1], "b")
    rig.turn("d", "d")
    assert (rig.tracked(), rig.dropped) == (["a", "c", "d"], ["b"])


def test_clear():
    rig = Rig()
    rig.turn("a", "r1")
    rig.turn("b", "r2")
    rig.ledger.clear()
    assert (len(rig.ledger), rig.ledger.retained_turns, sorted(rig.dropped)) == (0, 0, ["r1", "r2"])
