"""The fault matrix between real processes: a part of it always, all of it on request (several minutes a fabric)."""

from __future__ import annotations

import os
from multiprocessing import resource_tracker
from pathlib import Path

import pytest

from tests.integration.transceiver.fabrics import UCX_CMA, UCX_SHM, UCX_TCP, Fabric, as_parameter
from tests.integration.transceiver.fault_matrix import Cell
from tests.integration.transceiver.process_matrix import all_cells, cut_cells, run_matrix, table
from tests.integration.transceiver.two_hosts import NoNamespacesError, namespace_pair, reason_against

#: Cells of the part: every kind, step, moment and direction is there, and each kind more than once.
PART = [cell for number, cell in enumerate(all_cells()) if number % 17 == 3]

#: Not NIXL: what it does not survive is in docs/transceiver.md, and the module prints it where NIXL is installed.
FABRICS = [as_parameter(fabric) for fabric in (UCX_SHM, UCX_CMA, UCX_TCP)]

WHOLE = pytest.mark.skipif(
    not os.environ.get("KVFERRY_WHOLE_MATRIX"), reason="KVFERRY_WHOLE_MATRIX is not set: several minutes a fabric"
)

pytestmark = pytest.mark.ucx


def left_behind() -> set[str]:
    """Children of this process (not the one that multiprocessing keeps), and shared memory that has a name."""
    resource_tracker.ensure_running()
    kept = str(resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    children = {pid for task in tasks for pid in task.read_text().split()} - {kept}
    return children | set(os.listdir("/dev/shm"))


def check(fabric: Fabric, cells: list[Cell], hosts: int = 1) -> None:
    before = left_behind()
    results = run_matrix(fabric, cells, hosts=hosts)
    print(text := table(results))
    assert len(results) == len(cells)
    assert left_behind() <= before
    red = [result for result in results if result.problem]
    assert not red, text


def test_the_part_has_everything() -> None:
    for field in ("kind", "step", "when", "direction"):
        assert {getattr(cell, field) for cell in PART} == {getattr(cell, field) for cell in all_cells()}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("fabric", FABRICS)
def test_a_part_of_the_matrix(fabric: Fabric) -> None:
    check(fabric, PART)


@WHOLE
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fabric", FABRICS)
def test_the_whole_matrix(fabric: Fabric) -> None:
    check(fabric, all_cells())


@WHOLE
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "-")
@pytest.mark.parametrize("fabric", [as_parameter(UCX_TCP)])
def test_a_cable_that_is_cut_at_any_step(fabric: Fabric) -> None:
    """Between two network namespaces: nobody is told, and each side ends by its own deadline."""
    try:
        with namespace_pair("try"):
            pass
    except NoNamespacesError as error:
        pytest.skip(str(error))
    check(fabric, cut_cells(), hosts=2)
