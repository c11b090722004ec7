"""Real processes over every fabric: bytes, death, cancel, time-out, refusal, several peers, nothing left behind."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.integration.transceiver.fabrics import FABRICS, Fabric, Local
from tests.integration.transceiver.peer_process import PeerProcess
from tests.unit.transceiver.rig import SCOPE, eventually, table
from transceiver import GrantTicket, Interval, RankShare, TransferStatus

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300), pytest.mark.parametrize("fabric", FABRICS)]
DONE, FAILED, CANCELLED, TIMED_OUT = TransferStatus


@pytest.fixture
def local(fabric: Fabric) -> Iterator[Local]:
    with Local(fabric) as one:
        yield one


def test_bytes_arrive_and_the_real_transport_is_named(fabric: Fabric, local: Local) -> None:
    with PeerProcess("holder", **fabric.config) as holder:
        for turn in range(3):
            ticket = holder.ask("publish", (f"t{turn}", (3, 1, 2, 9), 10.0))
            pull = local.pull(ticket, (10, 11, 12, 13))
            outcome = pull.future.result(10)
            assert (outcome.status, outcome.blocks, outcome.reason) == (DONE, 4, "")
            assert outcome.transport == fabric.transport
            pull.settled.result(5)
            theirs = holder.ask("pages", (3, 1, 2, 9))
            assert [bytes(local.storage.page(page)) for page in (10, 11, 12, 13)] == theirs
            assert holder.ask("published", f"t{turn}").status is DONE
        assert local.transceiver.links() == {"holder": fabric.transport}


def test_a_killed_holder_is_an_error_at_once(fabric: Fabric, local: Local) -> None:
    with PeerProcess("holder", **fabric.config) as holder, PeerProcess("other", **fabric.config) as other:
        assert local.pull(holder.ask("publish", ("warm", (1,), 10.0)), (1,)).future.result(10).status is DONE
        holder.freeze()  # the request stays unanswered until the death
        ticket = holder_ticket(holder)
        pull = local.pull(ticket, (4,))
        started = time.monotonic()
        holder.kill()
        outcome = pull.future.result(5)
        assert (outcome.status, "lost" in outcome.reason) == (FAILED, True)
        assert time.monotonic() - started < 1.0
        pull.settled.result(1)
        again = local.pull(ticket, (4,), timeout_s=3.0).future.result(6)
        assert again.status in (FAILED, TIMED_OUT)
        assert local.pull(other.ask("publish", ("t", (5,), 10.0)), (4,)).future.result(10).status is DONE
        assert bytes(local.storage.page(4)) == other.ask("pages", (5,))[0]


def holder_ticket(holder: PeerProcess):  # type: ignore[no-untyped-def]
    """A ticket of a publication that the stopped holder will never answer for."""
    return GrantTicket(holder.address, "never", bytes(32), 8, 1)


def test_a_killed_receiver_frees_the_holder(fabric: Fabric, local: Local) -> None:
    local.storage.generations()[:] = 1
    with PeerProcess("receiver", fill=None, **fabric.config) as receiver:
        publish = local.transceiver.publish
        warm = publish("warm", (table((1,)),), conversation_id="c", scope=SCOPE, lease_s=10)
        receiver.ask("pull", (warm.ticket, (1,), 10.0))
        assert warm.future.result(10).status is DONE
        blocker = threading.Event()
        local.transceiver._executor.submit(blocker.wait, 20)  # digests do not come: the receiver waits for them
        publication = publish("t", (table((2,)),), conversation_id="c", scope=SCOPE, lease_s=60)
        receiver.ask("pull", (publication.ticket, (2,), 10.0))
        assert eventually(lambda: publication.state.value == "transferring")
        started = time.monotonic()
        receiver.kill()
        outcome = publication.future.result(5)
        blocker.set()
        assert (outcome.status, "receiver lost" in outcome.reason) == (FAILED, True)
        assert time.monotonic() - started < 1.0


def test_a_receivers_time_out_and_cancel_reach_the_holder(fabric: Fabric, local: Local) -> None:
    with PeerProcess("holder", **fabric.config) as holder:
        assert local.pull(holder.ask("publish", ("warm", (1,), 10.0)), (1,)).future.result(10).status is DONE
        holder.freeze()
        holder.tell("publish", ("late", (1,), 10.0))
        stuck = local.pull(holder_ticket(holder), (1,), timeout_s=0.2)
        assert stuck.future.result(2).status is TIMED_OUT
        stuck.settled.result(5)
        cancelled = local.pull(holder_ticket(holder), (1,), timeout_s=10)
        cancelled.cancel()
        assert cancelled.future.result(2).status is CANCELLED
        os.kill(holder.pid, signal.SIGCONT)
        ticket = holder._receive()
        assert eventually(lambda: holder.ask("stats").stale_messages + holder.ask("stats").refused_pulls >= 2)
        assert local.pull(ticket, (5,)).future.result(10).status is DONE


def test_a_holders_cancel_and_lease_reach_the_receiver(fabric: Fabric, local: Local) -> None:
    local.storage.generations()[:] = 1
    with PeerProcess("receiver", fill=None, **fabric.config) as receiver:
        blocker = threading.Event()
        local.transceiver._executor.submit(blocker.wait, 20)
        publish = local.transceiver.publish
        first = publish("first", (table((1,)),), conversation_id="c", scope=SCOPE, lease_s=60)
        receiver.ask("pull", (first.ticket, (1,), 10.0))
        assert eventually(lambda: first.state.value == "transferring")
        started = time.monotonic()
        first.cancel()
        assert receiver.ask("pulled", "first").status is CANCELLED
        assert first.future.result(1).status is CANCELLED
        assert time.monotonic() - started < 1.0
        second = publish("second", (table((1,)),), conversation_id="c", scope=SCOPE, lease_s=0.3)
        receiver.ask("pull", (second.ticket, (1,), 10.0))
        outcome = receiver.ask("pulled", "second")
        blocker.set()
        assert (outcome.status, "lease" in outcome.reason) == (FAILED, True)
        assert second.future.result(1).status is TIMED_OUT


def test_a_wrong_secret_is_refused_and_others_go_on(fabric: Fabric, local: Local) -> None:
    with (
        PeerProcess("holder", **fabric.config) as holder,
        Local(fabric, secret=b"a wrong secret of some length") as stranger,
    ):
        ticket = holder.ask("publish", ("t", (1, 2), 10.0))
        outcome = stranger.pull(ticket, (1, 2)).future.result(5)
        assert (outcome.status, "same secret" in outcome.reason) == (FAILED, True)
        assert local.pull(ticket, (1, 2)).future.result(10).status is DONE
        assert holder.ask("stats").refused_links == 1


def test_a_layout_mismatch_is_refused_by_field(fabric: Fabric, local: Local) -> None:
    with PeerProcess("holder", layout={"tokens_per_block": 16}, **fabric.config) as holder:
        outcome = local.pull(holder.ask("publish", ("t", (1,), 10.0)), (1,)).future.result(5)
        assert (outcome.status, "tokens_per_block: 16 here, 8 at the peer" in outcome.reason) == (FAILED, True)


@pytest.mark.parametrize("head_dim", [256, 16])
def test_two_ranks_of_two_heads_fill_one_of_four(fabric: Fabric, head_dim: int) -> None:
    """Fragments of 16 KiB go straight to their place over cma; small ones, and all over TCP, through staging."""
    layout, whole = {"num_kv_heads": 2, "head_dim": head_dim}, {"num_kv_heads": 4, "head_dim": head_dim}
    shares = [(RankShare(4, Interval(start, start + 2)),) for start in (0, 2)]
    with (
        PeerProcess("rank0", layout=layout, shares=shares[0], fill=1, **fabric.config) as first,
        PeerProcess("rank1", layout=layout, shares=shares[1], fill=2, **fabric.config) as second,
        Local(fabric, layout=whole, shares=(RankShare(4, Interval(0, 4)),)) as local,
    ):
        tickets = [rank.ask("publish", ("t", (3, 1, 2), 10.0)) for rank in (first, second)]
        pulls = [local.pull(ticket, (7, 5, 6)) for ticket in tickets]
        assert [pull.future.result(10).status for pull in pulls] == [DONE, DONE]
        parts = [
            [np.frombuffer(page, np.uint8).reshape(2, 2, 2, -1) for page in rank.ask("pages", (3, 1, 2))]
            for rank in (first, second)
        ]
        for page, left, right in zip((7, 5, 6), *parts, strict=True):
            assert bytes(local.storage.page(page)) == np.concatenate([left, right], axis=2).tobytes()


def test_several_holders_at_once(fabric: Fabric, local: Local) -> None:
    with PeerProcess("a", fill=1, **fabric.config) as a, PeerProcess("b", fill=2, **fabric.config) as b:
        pulls = []
        for turn in range(6):
            holder = (a, b)[turn % 2]
            ticket = holder.ask("publish", (f"t{turn}", (turn, turn + 10), 10.0))
            pulls.append((holder, turn, local.pull(ticket, (2 * turn, 2 * turn + 1))))
        for holder, turn, pull in pulls:
            assert pull.future.result(10).status is DONE
            mine = [bytes(local.storage.page(2 * turn + i)) for i in range(2)]
            assert mine == holder.ask("pages", (turn, turn + 10))


def test_nobody_listens(fabric: Fabric, local: Local) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ticket = GrantTicket(f"{local.transceiver.address.partition(':')[0]}://127.0.0.1:{port}", "t", bytes(32), 8, 1)
    assert local.pull(ticket, (1,), timeout_s=5).future.result(6).status is FAILED


def test_close_leaves_no_thread_and_no_port(fabric: Fabric) -> None:
    with PeerProcess("holder", **fabric.config) as holder, Local(fabric) as local:
        assert local.pull(holder.ask("publish", ("t", (1,), 10.0)), (1,)).future.result(10).status is DONE
        assert holder.ask("close") == ["MainThread", "commands"]
        port = int(holder.address.rpartition(":")[2])
        with socket.socket() as probe:
            probe.settimeout(2)
            assert probe.connect_ex(("127.0.0.1", port)) != 0
    assert not [t.name for t in threading.enumerate() if t.name.startswith("kvferry")]
