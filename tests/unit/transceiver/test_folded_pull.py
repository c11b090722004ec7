"""Several sources' pulls into the same pages, seen as one: when it ends, how, and when its pages are free."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.unit.transceiver.rig import SCOPE, SECRET, eventually, table
from tests.unit.transceiver.servers import CONFIG, VALID, Model, Server
from transceiver import CacheTransceiver, TransferStatus
from transceiver.folded_pull import FoldedPull
from transceiver.parallel_layout import ParallelLayout as P
from transceiver.testing import Fault, FaultInjector, FaultKind


def test_one_failed_part_fails_the_whole_and_ends_the_others() -> None:
    model, ctx, gen = Model(4, 4), P(2), P(1)
    with ExitStack() as stack:
        holders = Server(stack, "ctx", model, ctx, filled=True)
        receivers = Server(stack, "gen", model, gen, filled=False)
        publications = [
            rank.publish("t", (table((1, 2)),), conversation_id="c", scope=SCOPE, lease_s=20) for rank in holders.ranks
        ]
        holders.storages[1].generations()[1] = 9  # this rank's block changed hands
        pulls = [
            receivers.ranks[0].pull(p.ticket, (table((1, 2)),), conversation_id="c", scope=SCOPE, timeout_s=20)
            for p in publications
        ]
        folded = FoldedPull(pulls)
        outcome = folded.future.result(5)
        assert (outcome.status, (0, 0) in outcome.bad_ordinals) == (TransferStatus.FAILED, True)
        assert all(p.future.result(5) is not None for p in publications)


@pytest.mark.parametrize("end", [TransferStatus.CANCELLED, TransferStatus.TIMED_OUT])
def test_a_folded_pull_keeps_its_pages_until_every_part_has_ended(end: TransferStatus) -> None:
    """One source's read is under way when the transfer ends; the other's is over."""
    with ExitStack() as stack:
        model, faults = Model(4, 4), FaultInjector()
        holders = Server(stack, "ctx", model, P(2), filled=True)
        receivers = Server(stack, "gen", model, P(1), filled=False)
        rank = stack.enter_context(
            CacheTransceiver(
                worker_id=f"slow-{id(stack)}", storage=receivers.storages[0], config=CONFIG, secret=SECRET,
                faults=faults, shares=(model.layout(P(1), 0)[1],),
            )
        )  # fmt: skip
        faults.add(Fault(FaultKind.DELAY, "get", seconds=0.4))  # the first read only
        timeout_s = 0.15 if end is TransferStatus.TIMED_OUT else 9
        pulls = []
        for number in range(2):
            ticket, wanted = holders.publish(number, "t"), (table((1, 2, 3), valid=VALID),)
            pulls.append(rank.pull(ticket, wanted, conversation_id="c", scope=SCOPE, timeout_s=timeout_s))
            assert eventually(lambda: pulls[-1].state.value != "init")
        folded = FoldedPull(pulls)
        assert eventually(lambda: pulls[1].settled.done())
        if end is TransferStatus.CANCELLED:
            assert not folded.cancel()
        assert pulls[0].future.result(5).status is end
        assert not pulls[0].settled.done() and not folded.settled.done() and not folded.future.done()
        assert folded.future.result(5).status is end
        folded.settled.result(5)
        assert folded.cancel()
        assert folded.future.result(0).status is end
