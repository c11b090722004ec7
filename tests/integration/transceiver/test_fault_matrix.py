"""The fault matrix is green, and every cell's fault really happened."""

from __future__ import annotations

import pytest

from tests.integration.transceiver.fault_matrix import (
    DIRECTIONS,
    KINDS,
    STEPS,
    WHENS,
    all_cells,
    render,
    run_matrix,
)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("when", WHENS)
def test_every_fault_at_every_step(when: str) -> None:
    cells = [cell for cell in all_cells() if cell.when == when]
    results = run_matrix(cells)
    table = render(results)
    print(table)
    assert len(results) == len(KINDS) * len(STEPS) * len(DIRECTIONS)
    assert not [result for result in results if result.problem], table
    idle = [result.cell for result in results if not result.fired and result.cell.kind != "kill receiver"]
    assert not idle, f"these faults never happened: {idle}"
