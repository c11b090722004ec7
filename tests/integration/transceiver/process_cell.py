"""One cell of the process matrix: a fault of one kind, at one step of one transfer between two processes."""

from __future__ import annotations

import time
from typing import Any

from tests.integration.transceiver.cached_side import prompt_of
from tests.integration.transceiver.fault_matrix import FROM_HOLDER, Cell
from tests.integration.transceiver.fault_matrix import STEPS as INPROC_STEPS
from tests.integration.transceiver.fault_peer import FaultPeer
from tests.integration.transceiver.process_arena import DRAIN_S, Arena
from tests.integration.transceiver.step_hook import ABOUT_TO_SEND, ARRIVED, HANDLED, READS, SENT

__all__ = ["KINDS", "STEPS", "ProcessCell"]

#: Those of the matrix over inproc, the read of generation numbers after that of the data, and a holder's cancel.
STEPS = (*INPROC_STEPS[:-1], "generations", INPROC_STEPS[-1], "Cancel")
#: "stall": the sender of the step stops and is woken when the other side has ended; "for good": it never is.
KINDS = ("cut", "kill sender", "kill receiver", "stall", "stall receiver", "stall for good", "full queue")
PROMPT_BLOCKS, ANSWER_BLOCKS = 5, 3
TIMEOUT_S, LEASE_S = 0.8, 1.2
TIMEOUT_AT_A_DEATH_S, LEASE_AT_A_DEATH_S = 2.0, 2.5  # what ends by itself must not end before it, on a busy machine
REPORTED_S = 1.0
LATE_S = 3.0  # beyond its own deadline, on a machine that is busy with others
NEXT_S = 15.0
PATIENCE_S = 20.0
ENDS = ("done", "failed", "cancelled", "timed_out")


class ProcessCell:
    """One cell, from the first hand-off to the transfer after the fault."""

    def __init__(self, arena: Arena, cell: Cell, number: int) -> None:
        self.arena, self.cell, self.number = arena, cell, number
        self.holder, self.receiver = (arena.ctx, arena.gen) if cell.direction == "ctx->gen" else (arena.gen, arena.ctx)
        self.from_holder = cell.step in FROM_HOLDER or cell.step == "Cancel"
        self.sender, self.other = (self.holder, self.receiver) if self.from_holder else (self.receiver, self.holder)
        self.victim = {
            "kill receiver": self.other, "stall receiver": self.other, "full queue": self.other, "cut": None,
        }.get(cell.kind, self.sender)  # fmt: skip
        dies = cell.kind.startswith("kill")
        self.timeout_s = TIMEOUT_AT_A_DEATH_S if dies else TIMEOUT_S
        self.lease_s = LEASE_AT_A_DEATH_S if dies else LEASE_S
        self.fresh: FaultPeer | None = None  # a process that has replaced a dead one
        self.fires = self.sender  # whose trap the fault is
        self.prompt = prompt_of(2 * number, PROMPT_BLOCKS)
        self.tokens = prompt_of(2 * number, PROMPT_BLOCKS + (0 if cell.direction == "ctx->gen" else ANSWER_BLOCKS))

    def run(self) -> str:
        """Returns "receiver's end/holder's end"; raises AssertionError with what is wrong."""
        cell = self.cell
        self._begin()
        if cell.direction == "gen->ctx":
            self._hand_over()
        self.holder.ask("send_digests", {"Digests": "late", "Cancel": "never"}.get(cell.step, "early"))
        self._arm()
        name = self.arena.name()
        ticket = self.holder.ask("offer", name, self.tokens, self.lease_s, self.receiver.worker_id)
        self.receiver.tell("fetch", ticket, self.tokens, self.timeout_s)
        ends = self._ends(name)
        self._begin()
        if cell.direction == "gen->ctx":  # what was over before the fault is still there
            have = self.receiver.ask("cached_tokens", self.prompt)
            assert self.receiver is self.fresh or have == len(self.prompt) - 1, "an earlier transfer lost blocks"
        self._next_works()
        self._begin()
        for side in (self.holder, self.receiver):
            side.ask("leaves_nothing")
        return ends

    def _begin(self) -> None:
        for side in (self.holder, self.receiver):
            side.ask("begin")

    def _hand_over(self) -> None:
        """The prompt goes the other way first. Links were cut a moment ago: that may cost one pull."""
        said = [self._transfer(self.receiver, self.holder, self.prompt)]
        if said[0] != "done/done":
            said.append(self._transfer(self.receiver, self.holder, self.prompt))
        assert said[-1] == "done/done", f"the first hand-off fails: {said}"

    # --- the fault ------------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        cell, sender, other, victim = self.cell, self.sender, self.other, self.victim
        step, is_read = cell.step, cell.step in READS
        mine = {"before": ABOUT_TO_SEND, "during": SENT, "after": HANDLED}[cell.when]
        if step == "Cancel":
            self.holder.ask("arm", "PullRequest", HANDLED, "cancel", 0)
        if cell.kind == "cut":
            side = sender if is_read or cell.when != "after" else other
            side.ask("arm", step, mine, "cut", 0)
            self.fires = side
        elif cell.kind == "full queue":
            assert victim is not None
            if cell.when == "after" and not is_read:
                other.ask("arm", step, HANDLED, "stop", victim.pid)
                sender.ask("arm", step, SENT, "fill when stopped", victim.pid)
            else:
                sender.ask("arm", step, mine, "stop and fill", victim.pid)
            self.fires = sender
        else:
            assert victim is not None
            action = "kill" if cell.kind.startswith("kill") else "stop"
            if is_read:
                side, point = sender, mine
            elif victim is sender:
                side, point = (other if cell.when == "after" else sender), mine
            else:
                side, point = (sender if cell.when == "before" else other), (ARRIVED if cell.when == "during" else mine)
            side.ask("arm", step, point, action, victim.pid)
            self.fires = side

    # --- the ends -------------------------------------------------------------------------------------------------

    def _ends(self, name: str) -> str:
        kind = self.cell.kind
        if kind.startswith("kill"):
            return self._after_a_death(name)
        if kind == "cut":
            return self._after_a_cut(name)
        return self._after_a_stop(name)

    def _was_asked(self) -> bool:
        """The holder has acted on the request, so that a receiver's death is reported to the grant."""
        place = STEPS.index(self.cell.step) - STEPS.index("PullRequest")
        return place > 0 or (place == 0 and self.cell.when == "after")

    def _after_a_death(self, name: str) -> str:
        victim = self.victim
        assert victim is not None
        died = victim.wait_dead(PATIENCE_S)
        survivor = self.holder if victim is self.receiver else self.receiver
        end, at = self._end_of(survivor, name)
        reported = survivor is self.receiver or self._was_asked()
        limit = REPORTED_S if reported else self.lease_s + DRAIN_S + LATE_S
        assert at - died < limit, f"the end came {at - died:.2f} s after the death"
        survivor.ask("at_rest", NEXT_S)
        self._swap(victim, self.arena.replace(victim))
        return f"{end}/dead" if survivor is self.receiver else f"dead/{end}"

    def _after_a_cut(self, name: str) -> str:
        began = time.monotonic()
        if self.receiver.catch_up() is None:
            mine, at = self._end_of(self.receiver, name)
        assert at - began < TIMEOUT_S + DRAIN_S + LATE_S, f"the receiver's end came after {at - began:.2f} s"
        theirs, at = self._end_of(self.holder, name)
        assert at - began < LEASE_S + DRAIN_S + LATE_S, f"the holder's end came after {at - began:.2f} s"
        self.fires.ask("happened")
        assert theirs != "done" or mine == "done", "released as done, not done"
        self._at_rest()
        return f"{mine}/{theirs}"

    def _after_a_stop(self, name: str) -> str:
        victim, kind = self.victim, self.cell.kind
        assert victim is not None
        began = time.monotonic()
        victim.wait_stopped(PATIENCE_S)
        if self.fires is not victim:
            self.fires.ask("happened")
            began = time.monotonic()  # filling a queue takes the loop a while
        survivor = self.holder if victim is self.receiver else self.receiver
        waits = self._waits_for_the_stopped(survivor)
        if kind == "stall for good" and waits:  # see the end of the process, as its operator would
            victim.close()
        elif waits:
            time.sleep(max(0.0, began + TIMEOUT_S + DRAIN_S + 0.3 - time.monotonic()))
            victim.wake()
        end, at = self._end_of(survivor, name)
        own = TIMEOUT_S if survivor is self.receiver else LEASE_S
        assert at - began < own + DRAIN_S + LATE_S, f"the end came {at - began:.2f} s after the stop"
        survivor.ask("at_rest", NEXT_S)
        if kind == "stall for good":
            self._next_works(survivor_of=victim)
            self._swap(victim, self.arena.replace(victim))
            return f"{end}/stopped" if survivor is self.receiver else f"stopped/{end}"
        victim.wake()
        if victim is self.receiver:
            victim.catch_up()
        theirs, _ = self._end_of(victim, name)
        mine, held = (theirs, end) if victim is self.receiver else (end, theirs)
        assert held != "done" or mine == "done", "released as done, not done"
        self._at_rest()
        return f"{mine}/{held}"

    def _waits_for_the_stopped(self, survivor: FaultPeer) -> bool:
        """A read under way from a stopped holder cannot be given up on this fabric: it settles when that goes on."""
        reading = STEPS.index("Grant") <= STEPS.index(self.cell.step)
        return survivor is self.receiver and reading and not self.arena.fabric.drops_reads

    def _end_of(self, side: FaultPeer, name: str) -> tuple[str, float]:
        if side is self.receiver and self.cell.kind != "cut" and side is not self.victim:
            side.catch_up()
        end, _, at = side.ask("fetched" if side is self.receiver else "granted", name, PATIENCE_S)
        assert end in ENDS
        return end, at

    def _at_rest(self) -> None:
        self._heal()
        for side in (self.holder, self.receiver):
            side.ask("at_rest", NEXT_S)

    def _heal(self) -> None:
        if self.cell.kind == "cut":
            self.arena.heal()

    # --- afterwards -----------------------------------------------------------------------------------------------

    def _swap(self, old: FaultPeer, new: FaultPeer) -> None:
        self.holder = new if self.holder is old else self.holder
        self.receiver = new if self.receiver is old else self.receiver
        self.fresh = new

    def _next_works(self, survivor_of: FaultPeer | None = None) -> None:
        """A transfer of another prompt between the two; beside a stopped process, with a third one."""
        holder, receiver, third = self.holder, self.receiver, None
        if survivor_of is not None:
            third = self.arena.start(0 if survivor_of is self.arena.ctx else 1)
            holder, receiver = (third, receiver) if holder is survivor_of else (holder, third)
        try:
            tokens, deadline, tries = prompt_of(2 * self.number + 1, PROMPT_BLOCKS), time.monotonic() + NEXT_S, 0
            while (last := self._transfer(holder, receiver, tokens)) != "done/done":
                tries += 1
                said = last
                assert time.monotonic() < deadline, f"the next transfer does not work: {last}"
            assert tries < 3, f"the next transfer worked after {tries} that did not, the last {said}"
            for side in (holder, receiver):
                side.ask("at_rest", NEXT_S)
            assert receiver.ask("transport") == [self.arena.fabric.transport]
        finally:
            if third is not None:
                third.close()

    def _transfer(self, holder: FaultPeer, receiver: FaultPeer, tokens: Any) -> str:
        name = self.arena.name()
        ticket = holder.ask("offer", name, tokens, 2 * PATIENCE_S, receiver.worker_id)
        receiver.ask("fetch", ticket, tokens, PATIENCE_S / 2)
        mine, why, _ = receiver.ask("fetched", name, PATIENCE_S)
        if mine != "done":  # a grant that nobody asked for would stand for its whole lease
            holder.ask("cancel", name)
        theirs, _, _ = holder.ask("granted", name, PATIENCE_S)
        return f"{mine}/{theirs}" if mine == "done" else f"{mine}/{theirs} ({why})"
