"""SIGKILL and SIGSTOP of either side in the middle of large reads (at the protocol's steps: `process_matrix`).

Pages are large, so that a moment of a few milliseconds falls into the reads. Both directions are the same code: the
process of the test is the receiver in one half of the cells and the holder in the other.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

from tests.integration.transceiver.fabrics import NIXL, PAGES, UCX_SHM, UCX_TCP, Fabric, Local, as_parameter
from tests.integration.transceiver.peer_process import PeerProcess
from tests.unit.transceiver.rig import SCOPE, eventually, table
from transceiver import TransferStatus

DONE, FAILED, CANCELLED, TIMED_OUT = TransferStatus
LARGE: dict[str, Any] = {"head_dim": 4096}  # 1 MiB a block
ALL = tuple(range(PAGES))
#: Milliseconds from the start of the pull to the fault; None: before the pull.
MOMENTS = (None, 3, 12)

pytestmark = [
    pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(300),
    pytest.mark.parametrize("fabric", [as_parameter(fabric) for fabric in (UCX_SHM, UCX_TCP, NIXL)]),
]  # fmt: skip


def wait_until(moment: int, began: float) -> None:
    """Spin to a moment that is too near for a timer."""
    while time.perf_counter() - began < moment / 1000:
        pass


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_holder_dies(fabric: Fabric, moment: int | None) -> None:
    with Local(fabric, layout=LARGE) as local, PeerProcess("holder", layout=LARGE, **fabric.config) as holder:
        assert local.pull(holder.ask("publish", ("warm", (1,), 20.0)), (1,)).future.result(20).status is DONE
        ticket = holder.ask("publish", ("t", ALL, 20.0))
        if moment is None:
            holder.kill()
        began = time.perf_counter()
        pull = local.pull(ticket, ALL)
        if moment is not None:
            wait_until(moment, began)
            holder.kill()
        killed = time.monotonic()
        outcome = pull.future.result(10)
        pull.settled.result(10)
        assert time.monotonic() - killed < 2.0, outcome
        assert outcome.status in (DONE, FAILED)
        assert outcome.status is DONE or outcome.reason
        with PeerProcess("another", layout=LARGE, **fabric.config) as another:
            next_pull = local.pull(another.ask("publish", ("next", (3,), 20.0)), (1,))
            assert next_pull.future.result(20).status is DONE
            assert bytes(local.storage.page(1)) == another.ask("pages", (3,))[0]


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_receiver_dies(fabric: Fabric, moment: int | None) -> None:
    with Local(fabric, layout=LARGE, connect_timeout_ms=1000) as local:
        local.storage.generations()[:] = 1
        publish = local.transceiver.publish
        with PeerProcess("receiver", fill=None, layout=LARGE, **fabric.config) as receiver:
            warm = publish("warm", (table((1,)),), conversation_id="c", scope=SCOPE, lease_s=20)
            receiver.ask("pull", (warm.ticket, (1,), 20.0))
            assert warm.future.result(20).status is DONE
            grant = publish(
                "t", (table(ALL),), conversation_id="c", scope=SCOPE, lease_s=60, receiver="receiver"
            )  # fmt: skip
            if moment is None:
                receiver.kill()
            else:
                receiver.tell("pull", (grant.ticket, ALL, 20.0))
                wait_until(moment, time.perf_counter())
                receiver.kill()
            killed = time.monotonic()
            outcome = grant.future.result(10)
            assert outcome.status in (DONE, FAILED)
            assert time.monotonic() - killed < 3.0, outcome  # one second of it: it might have come back and asked
        assert local.transceiver.stats().open_publications == 0
        with PeerProcess("another", fill=None, layout=LARGE, **fabric.config) as another:
            again = publish("next", (table((1,)),), conversation_id="c", scope=SCOPE, lease_s=20)
            another.ask("pull", (again.ticket, (1,), 20.0))
            assert again.future.result(20).status is DONE


@pytest.mark.parametrize("moment", [None, 3])
def test_the_holder_stands_still_and_goes_on(fabric: Fabric, moment: int | None) -> None:
    with Local(fabric, layout=LARGE, drain_timeout_ms=300) as local, PeerProcess(
        "holder", layout=LARGE, **fabric.config
    ) as holder:  # fmt: skip
        assert local.pull(holder.ask("publish", ("warm", (1,), 20.0)), (1,)).future.result(20).status is DONE
        ticket = holder.ask("publish", ("t", ALL, 20.0))
        if moment is None:
            holder.freeze()
        began = time.perf_counter()
        pull = local.pull(ticket, ALL, timeout_s=1.0)
        if moment is not None:
            wait_until(moment, began)
            os.kill(holder.pid, signal.SIGSTOP)
        outcome = pull.future.result(5)
        assert outcome.status in ((TIMED_OUT,) if moment is None else (DONE, TIMED_OUT)), outcome
        os.kill(holder.pid, signal.SIGCONT)
        pull.settled.result(20)
        assert eventually(lambda: holder.ask("stats").open_publications == 0, 20)

        def works() -> bool:
            ticket = holder.ask("publish", (f"next-{time.monotonic_ns()}", (3,), 20.0))
            return local.pull(ticket, (1,), timeout_s=5.0).future.result(10).status is DONE

        assert eventually(works, 20)
        assert bytes(local.storage.page(1)) == holder.ask("pages", (3,))[0]
