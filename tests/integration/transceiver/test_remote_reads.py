"""Reads by message between processes: one pull's end is no other's, and what a stranger sends ends nobody."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import pytest

from tests.integration.transceiver.fabrics import UCX_TCP, Local
from tests.integration.transceiver.peer_process import PeerProcess
from tests.unit.transceiver.rig import eventually
from transceiver import TransferStatus
from transceiver.host_port import parse_address

pytest.importorskip("ucxx", reason="needs ucxx")
pytestmark = [pytest.mark.ucx, pytest.mark.timeout(120)]
LARGE = {"head_dim": 4096}  # 1 MiB a block
PAGES = tuple(range(30))
OTHERS = tuple(range(30, 60))


@pytest.mark.parametrize("end", ["cancel", "time-out"])
def test_the_end_of_one_pull_leaves_the_link_to_the_others(end: str) -> None:
    """A pull that has ended waits for nothing: else its link would be cut after drain_timeout_ms, others and all."""
    with (
        Local(UCX_TCP, layout=LARGE, drain_timeout_ms=300) as local,
        PeerProcess("holder", layout=LARGE, **UCX_TCP.config) as holder,
    ):
        tickets = [holder.ask("publish", (name, PAGES, 60.0)) for name in ("warm", "unwanted", "wanted")]
        assert local.pull(tickets[0], PAGES).future.result(20).status is TransferStatus.DONE
        wanted = local.pull(tickets[2], OTHERS, timeout_s=30.0)
        unwanted = local.pull(tickets[1], PAGES, timeout_s=0.6 if end == "time-out" else 30.0)
        assert eventually(lambda: unwanted.data.reads > 0 or unwanted.future.done(), 10)
        holder.freeze()
        began = time.monotonic()
        if end == "cancel":
            unwanted.cancel()
        outcome = unwanted.future.result(5)
        unwanted.settled.result(5)
        assert time.monotonic() - began < 2.0
        for page in PAGES:  # they are ours again: nothing may write there
            local.storage.page(page)[:] = b"\xa5" * len(local.storage.page(page))
        time.sleep(0.6)  # more than drain_timeout_ms
        os.kill(holder.pid, signal.SIGCONT)
        assert wanted.future.result(20).status is TransferStatus.DONE
        assert [bytes(local.storage.page(page)) for page in OTHERS] == holder.ask("pages", PAGES)
        if outcome.status is not TransferStatus.DONE:
            assert all(set(bytes(local.storage.page(page))) == {0xA5} for page in PAGES)
        assert local.transceiver.stats().lost_links == 0


@pytest.mark.parametrize("am_id", [23, 24, 25])
def test_a_message_that_is_only_announced_is_dropped(am_id: int) -> None:
    """By rendezvous UCX hands over a description of the data; who takes it for the data reads past it."""
    import ucxx._lib.libucxx as api

    from transceiver.ucp_binding import UcpBinding

    with PeerProcess("holder", **UCX_TCP.config) as holder:
        feature = api.Feature
        context = api.UCXContext({"TLS": "tcp", "RNDV_THRESH": "0"}, (feature.AM, feature.RMA, feature.WAKEUP))
        worker = api.UCXWorker(context, False, False)
        endpoint = api.UCXEndpoint.create(worker, *parse_address("ucx", holder.address), True)
        ucp = UcpBinding()
        ucp._am_param.flags = 0x1 | 0x4  # UCP_AM_SEND_FLAG_REPLY, _RNDV
        data, header = bytes(60_000_000), b"\1" * 20 if am_id == 25 else b""
        for _ in range(50):
            worker.progress()
            time.sleep(0.002)
        ucp._fast.ucp_am_send_nbx(
            endpoint.handle, am_id, header or None, len(header), data, len(data), ctypes.byref(ucp._am_param)
        )
        for _ in range(100):
            worker.progress()
            time.sleep(0.002)
        with Local(UCX_TCP) as local:  # and it serves those who belong here
            outcome = local.pull(holder.ask("publish", ("t", (1, 2), 20.0)), (3, 4)).future.result(20)
            assert outcome.status is TransferStatus.DONE
        endpoint.close_blocking(1_000_000, 50)
