"""Two cache managers and two transceivers under random transfers, cancels, faults and deaths: nothing leaks, no byte is
wrong. A longer run over a range of seeds: ``python -m tests.property.transceiver.fault_walk``.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvcache.errors import OutOfPagesError
from tests.integration.transceiver.cached_side import CachedSide, Fetch, prompt_of
from tests.unit.transceiver.rig import eventually
from transceiver import CacheTransceiverConfig, Publication, TransceiverBackend, TransferStatus
from transceiver.inproc import InprocTransport
from transceiver.testing import Fault, FaultKind

STEPS_PER_EXAMPLE = 100
TOTAL_STEPS = int(os.environ.get("KVFERRY_FAULT_STEPS", "10000"))
CONFIG = CacheTransceiverConfig(
    backend=TransceiverBackend.INPROC,
    connect_timeout_ms=150,
    drain_timeout_ms=60,
    early_request_ttl_ms=150,
    refusal_ttl_ms=20,
)
MESSAGES = ("Hello", "Challenge", "Proof", "Welcome", "PullRequest", "Grant", "Digests", "get", "Ack", "")
SURVIVABLE = tuple(kind for kind in FaultKind if kind not in (FaultKind.KILL, FaultKind.STALL))
PROMPTS = st.integers(0, 15)  # more than a pool holds, so that blocks are evicted
TIMES = st.sampled_from((0.02, 0.15))
_numbers = itertools.count()
#: What the walks of this process did: steps, faults that fired, deaths, transfers by status.
TALLY: Counter[str] = Counter()


class RandomFaults(RuleBasedStateMachine):
    """Offers, fetches, cancels, faults and evictions in any order."""

    grants: Bundle[tuple[int, int, Publication]] = Bundle("grants")
    fetches: Bundle[tuple[int, Fetch]] = Bundle("fetches")

    def __init__(self) -> None:
        super().__init__()
        number = next(_numbers)
        self.sides = [CachedSide(f"{name}-walk-{number}", CONFIG) for name in ("a", "b")]
        self.names = itertools.count()
        self.open_grants: list[Publication] = []
        self.open_fetches: list[tuple[int, Fetch]] = []

    @rule(target=grants, side=st.integers(0, 1), prompt=PROMPTS, lease=TIMES, bound=st.booleans())
    def offer(self, side: int, prompt: int, lease: float, bound: bool) -> tuple[int, int, Publication]:
        receiver = self.sides[1 - side].transceiver._ctx.worker_id if bound else None
        return side, prompt, self.publish(side, prompt, lease, receiver)

    def publish(self, side: int, prompt: int, lease: float, receiver: str | None = None) -> Publication:
        try:
            grant = self.sides[side].offer(f"t{next(self.names)}", prompt_of(prompt), lease, receiver)
        except OutOfPagesError:
            self.settle()  # everything is pinned: let it end, then there is room
            grant = self.sides[side].offer(f"t{next(self.names)}", prompt_of(prompt), lease, receiver)
        self.open_grants.append(grant)
        return grant

    @rule(target=fetches, grant=grants, timeout=TIMES)
    def fetch(self, grant: tuple[int, int, Publication], timeout: float) -> tuple[int, Fetch]:
        return self.begin(*grant, timeout)

    def begin(self, side: int, prompt: int, publication: Publication, timeout: float) -> tuple[int, Fetch]:
        receiver = self.sides[1 - side]
        try:
            fetch = receiver.fetch(publication.ticket, prompt_of(prompt), timeout)
        except OutOfPagesError:
            self.settle()
            fetch = receiver.fetch(publication.ticket, prompt_of(prompt), timeout)
        self.open_fetches.append((1 - side, fetch))
        return 1 - side, fetch

    @rule(fetch=consumes(fetches))
    def finish(self, fetch: tuple[int, Fetch]) -> None:
        if fetch in self.open_fetches:
            self.open_fetches.remove(fetch)
            self.end(fetch)

    def end(self, fetch: tuple[int, Fetch]) -> None:
        TALLY[self.sides[fetch[0]].finish(fetch[1], 10).value] += 1

    @rule(grant=grants)
    def cancel_grant(self, grant: tuple[int, int, Publication]) -> None:
        grant[2].cancel()

    @rule(fetch=fetches)
    def cancel_fetch(self, fetch: tuple[int, Fetch]) -> None:
        fetch[1].pull.cancel()

    @rule(
        side=st.integers(0, 1), kind=st.sampled_from(SURVIVABLE), step=st.sampled_from(MESSAGES), skip=st.integers(0, 2)
    )
    def break_something(self, side: int, kind: FaultKind, step: str, skip: int) -> None:
        self.sides[side].faults.add(Fault(kind, step, skip=skip, seconds=0.01))

    @rule(side=st.integers(0, 1))
    def heal(self, side: int) -> None:
        self.clear_faults(side)

    def clear_faults(self, side: int) -> None:
        TALLY["faults"] += self.sides[side].faults.fired
        self.sides[side].faults.clear()

    @rule(side=st.integers(0, 1), stall=st.booleans())
    def stall(self, side: int, stall: bool) -> None:
        transport = self.sides[side].transceiver._transport
        assert isinstance(transport, InprocTransport)
        transport._stalled = stall
        transport.wake()

    @rule(side=st.integers(0, 1))
    def forget_cached_blocks(self, side: int) -> None:
        with self.sides[side].lock:
            if not self.sides[side].manager.stats().open_sequences:
                self.sides[side].manager.clear()

    @rule(
        side=st.integers(0, 1), prompt=PROMPTS, kind=st.sampled_from(SURVIVABLE), step=st.sampled_from(MESSAGES),
        skip=st.integers(0, 1), here=st.booleans(), timeout=TIMES,
    )  # fmt: skip
    def hand_off_with_a_fault(
        self, side: int, prompt: int, kind: FaultKind, step: str, skip: int, here: bool, timeout: float
    ) -> None:
        """A fault and, at once, a transfer that may meet it; all of it stays open."""
        self.sides[side if here else 1 - side].faults.add(Fault(kind, step, skip=skip, seconds=0.01))
        self.begin(side, prompt, self.publish(side, prompt, 0.15), timeout)

    @rule(side=st.integers(0, 1), chance=st.integers(0, 7))
    def die_and_restart(self, side: int, chance: int) -> None:
        """The process vanishes without a word; another one takes its place with the pools as they were."""
        if chance or not self.open_fetches:
            return  # no precondition: what is open depends on time, and what is drawn must not
        victim = self.sides[side]
        transport = victim.transceiver._transport
        assert isinstance(transport, InprocTransport)
        victim.transceiver._ctx.post(transport.kill)
        victim.replace()
        TALLY["deaths"] += 1

    @invariant()
    def pools_are_whole(self) -> None:
        TALLY["steps"] += 1
        for side in self.sides:
            with side.lock:
                side.manager.check_integrity()

    def settle(self) -> None:
        for side in self.sides:
            transport = side.transceiver._transport
            assert isinstance(transport, InprocTransport)
            transport.resume()
        while self.open_fetches:
            self.end(self.open_fetches.pop())
        while self.open_grants:
            self.open_grants.pop().future.result(10)

    def works(self, sender: CachedSide, receiver: CachedSide) -> bool:
        grant = sender.offer(f"t{next(self.names)}", prompt_of(99), 5)
        return receiver.finish(receiver.fetch(grant.ticket, prompt_of(99), 5), 10) is TransferStatus.DONE

    def teardown(self) -> None:
        try:
            for index in range(2):
                self.clear_faults(index)
            self.settle()
            for side in self.sides:
                assert eventually(side.at_rest), "something is left open"
            for sender, receiver in (self.sides, self.sides[::-1]):  # and it still works
                assert eventually(lambda s=sender, r=receiver: self.works(s, r), 10)  # type: ignore[misc]
        finally:
            for side in self.sides:
                side.close()


def walk_settings(steps: int) -> settings:
    """So many examples that they take `steps` steps together."""
    return settings(
        max_examples=max(1, steps // STEPS_PER_EXAMPLE),
        stateful_step_count=STEPS_PER_EXAMPLE,
        deadline=None,
        database=None,  # threads: an example does not fail again for certain, and shrinking would chase timing
        phases=(Phase.explicit, Phase.generate),
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


TestRandomFaults = RandomFaults.TestCase
TestRandomFaults.settings = walk_settings(TOTAL_STEPS)
TestRandomFaults = pytest.mark.timeout(0)(TestRandomFaults)
