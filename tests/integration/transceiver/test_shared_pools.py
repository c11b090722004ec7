"""Pools mapped from another process: nothing of them is left when a side ends, in whatever way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.transceiver.fabrics import UCX_SHM, Local
from tests.integration.transceiver.peer_process import PeerProcess
from tests.unit.transceiver.rig import eventually
from transceiver import TransferStatus

pytest.importorskip("ucxx", reason="needs ucxx")
pytestmark = [pytest.mark.ucx, pytest.mark.timeout(120)]
PAGES = tuple(range(20))


def mapped_files() -> set[int]:
    """Inodes of the memory files of pools that this process maps."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "kvferry-pool" in line}


@pytest.mark.parametrize("end", ["kill", "close"])
def test_a_pool_is_unmapped_when_its_holder_has_ended(end: str) -> None:
    """Else the memory of a dead worker's pool would stay taken, beside that of the one that replaced it."""
    with Local(UCX_SHM) as local:
        own = mapped_files()
        assert len(own) == 2  # pages and generation numbers
        with PeerProcess("holder") as holder:
            done = local.pull(holder.ask("publish", ("t", PAGES, 20.0)), PAGES)
            assert done.future.result(20).status is TransferStatus.DONE
            assert len(mapped_files() - own) == 2
            late = local.pull(holder.ask("publish", ("late", PAGES, 20.0)), PAGES)
            if end == "kill":
                holder.kill()
        assert late.future.result(20).status in (TransferStatus.DONE, TransferStatus.FAILED)
        late.settled.result(20)
        assert eventually(lambda: mapped_files() == own), "something still refers to the mapping"
        assert done.future.done()  # and was referred to until now


def test_a_receiver_that_has_ended_leaves_the_holders_pool_alone() -> None:
    before, descriptors = mapped_files(), []
    with PeerProcess("holder") as holder:
        expected = holder.ask("pages", PAGES)
        for turn in range(3):
            with Local(UCX_SHM) as local:
                pull = local.pull(holder.ask("publish", (f"t{turn}", PAGES, 20.0)), PAGES)
                assert pull.future.result(20).status is TransferStatus.DONE
                assert [bytes(local.storage.page(page)) for page in PAGES] == expected
            assert mapped_files() == before
            descriptors.append(len(os.listdir("/proc/self/fd")))
    assert descriptors[1] == descriptors[2]  # the first one loads UCX
