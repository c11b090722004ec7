"""Where the kernel forbids to read another process (containers, other users), blocks come over TCP, and it is said."""

from __future__ import annotations

import errno
import os

import pytest

from tests.integration.transceiver.fabrics import UCX_CMA, UCX_SHM, Fabric, Local
from tests.integration.transceiver.peer_process import PeerProcess
from tests.unit.transceiver.rig import SCOPE, table
from transceiver import TransferStatus

pytest.importorskip("ucxx", reason="needs ucxx")
pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]
DONE = TransferStatus.DONE


class Refused:
    """Takes the place of `CmaReader`."""

    def __init__(self, pid: int) -> None:
        assert pid > 0

    def read(self, *_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")


def test_where_the_kernel_refuses_cma_blocks_come_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transceiver.ucx_link.CmaReader", Refused)
    with PeerProcess("holder") as holder, Local(UCX_CMA) as local:
        for turn in range(2):
            pull = local.pull(holder.ask("publish", (f"t{turn}", (3, 1), 10.0)), (10, 11))
            outcome = pull.future.result(10)
            assert (outcome.status, outcome.transport) == (DONE, "ucx/tcp")
            assert [bytes(local.storage.page(page)) for page in (10, 11)] == holder.ask("pages", (3, 1))
        assert local.transceiver.links() == {"holder": "ucx/tcp"}
        link = local.transceiver.stats().links[holder.address]
        assert (link.detail, link.retries) == ("messages; the kernel refuses cma: Operation not permitted", 1)


@pytest.mark.parametrize(("here", "there", "refused", "transport"), [
    (UCX_SHM, UCX_SHM, True, "ucx/shm"),  # Yama forbids process_vm_readv, not the mapping
    (UCX_SHM, UCX_CMA, False, "ucx/cma"),  # nothing to map there
    (UCX_CMA, UCX_SHM, False, "ucx/cma"),  # no wish to map here
    (UCX_SHM, UCX_CMA, True, "ucx/tcp"),
])  # fmt: skip
def test_a_pool_is_mapped_where_both_sides_want_it(
    here: Fabric, there: Fabric, refused: bool, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if refused:
        monkeypatch.setattr("transceiver.ucx_link.CmaReader", Refused)
    with PeerProcess("holder", **there.config) as holder, Local(here) as local:
        outcome = local.pull(holder.ask("publish", ("t", (3, 1), 10.0)), (10, 11)).future.result(10)
        assert (outcome.status, outcome.transport) == (DONE, transport)
        assert [bytes(local.storage.page(page)) for page in (10, 11)] == holder.ask("pages", (3, 1))
        assert local.transceiver.links() == {"holder": transport}


def test_where_the_memory_cannot_be_mapped_the_kernel_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unmapped:
        def __init__(self, *_: object) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("transceiver.ucx_link.PeerMemory", Unmapped)
    with PeerProcess("holder") as holder, Local(UCX_SHM) as local:
        outcome = local.pull(holder.ask("publish", ("t", (3, 1), 10.0)), (10, 11)).future.result(10)
        assert (outcome.status, outcome.transport) == (DONE, "ucx/cma")
        detail = local.transceiver.stats().links[holder.address].detail
        assert detail == "process_vm_readv; its pools cannot be mapped: Permission denied"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
def test_another_users_process_is_not_read() -> None:
    """For real: the kernel lets nobody's process not read root's."""
    with Local(UCX_SHM) as local, PeerProcess("receiver", fill=None, uid=65534) as receiver:
        local.storage.generations()[:] = 1
        local.storage.page(3)[:] = bytes(range(256)) * (len(local.storage.page(3)) // 256)
        grant = local.transceiver.publish("t", (table((3,)),), conversation_id="c", scope=SCOPE, lease_s=20)
        receiver.ask("pull", (grant.ticket, (5,), 10.0))
        outcome = receiver.ask("pulled", "t")
        assert (outcome.status, outcome.transport) == (DONE, "ucx/tcp"), outcome
        assert receiver.ask("pages", (5,)) == [bytes(local.storage.page(3))]
        links, details = receiver.ask("links")
        assert set(links.values()) == {"ucx/tcp"}
        assert details == [
            "messages; its pools cannot be mapped: Permission denied; the kernel refuses cma: Operation not permitted"
        ]
