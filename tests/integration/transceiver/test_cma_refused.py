"""Where the kernel forbids to read another process (containers, other users), blocks come over TCP, and it is said."""

from __future__ import annotations

import errno

import pytest

from tests.integration.transceiver.fabrics import Local
from tests.integration.transceiver.peer_process import PeerProcess
from transceiver import TransferStatus

pytest.importorskip("ucxx", reason="needs ucxx")
pytestmark = [pytest.mark.ucx, pytest.mark.timeout(120)]
DONE = TransferStatus.DONE


def test_where_the_kernel_refuses_cma_blocks_come_over_tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused:
        def __init__(self, pid: int) -> None:
            assert pid > 0

        def read(self, *_: object) -> None:
            raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("transceiver.ucx_link.CmaReader", Refused)
    with PeerProcess("holder") as holder, Local() as local:
        for turn in range(2):
            pull = local.pull(holder.ask("publish", (f"t{turn}", (3, 1), 10.0)), (10, 11))
            outcome = pull.future.result(10)
            assert (outcome.status, outcome.transport) == (DONE, "ucx/tcp")
            assert [bytes(local.storage.page(page)) for page in (10, 11)] == holder.ask("pages", (3, 1))
        assert local.transceiver.links() == {"holder": "ucx/tcp"}
