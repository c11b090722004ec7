"""Unlike layouts and pools between two processes: every byte of both sides is what it must be, at once for several
requests and for full attention and two windows in one transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.transceiver.fabrics import FABRICS, UCX_CMA, Fabric
from tests.integration.transceiver.layout_cases import (
    DUPLICATED,
    FORMS,
    LAYOUTS,
    UNEVEN,
    WINDOWS,
    attention,
    pair_id,
)
from tests.integration.transceiver.layout_exchange import EVERYTHING, Processes, exchange, requests_of
from transceiver.parallel_layout import ParallelLayout as P

#: One fabric in the suite, since the mapping knows none; KVFERRY_ALL_FABRICS=1 runs them all.
LAYOUT_FABRICS = FABRICS if EVERYTHING else FABRICS[:1]
#: In the suite every kind of attention in one transfer; with KVFERRY_ALL_FABRICS=1 each combination apart, too.
ATTENTION = [(None, 24, 256), *(WINDOWS.values() if EVERYTHING else ())]
TOGETHER = (30, 60, 80)  # tokens of the requests that are handed over at once
FORM_CASES = [(P(1), P(1)), (P(2), P(1)), (P(1, 2), P(2)), (P(4, 2), P(2, 4))]

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(stack)


@pytest.mark.parametrize("fabric", LAYOUT_FABRICS)
@pytest.mark.parametrize("windows", ATTENTION, ids=pair_id)
@pytest.mark.parametrize(("kind", "ctx", "gen"), LAYOUTS, ids=pair_id)
def test_layouts(
    processes: Processes, fabric: Fabric, kind: str, ctx: P, gen: P, windows: tuple[int | None, ...]
) -> None:
    model = attention(windows, mla=kind == "mla")
    with exchange(fabric, processes[str(fabric)], model, ctx, gen) as sides:
        sides.hand_over(requests_of(TOGETHER))


@pytest.mark.parametrize("fabric", LAYOUT_FABRICS)
@pytest.mark.parametrize("windows", ATTENTION, ids=pair_id)
@pytest.mark.parametrize("layers", [5, 7])
@pytest.mark.parametrize(("kind", "ctx", "gen"), UNEVEN, ids=pair_id)
def test_uneven_stages(
    processes: Processes, fabric: Fabric, kind: str, ctx: P, gen: P, layers: int, windows: tuple[int | None, ...]
) -> None:
    model = attention(windows, mla=kind == "mla", layers=layers)
    with exchange(fabric, processes[str(fabric)], model, ctx, gen) as sides:
        sides.hand_over(requests_of(TOGETHER))


@pytest.mark.parametrize("fabric", LAYOUT_FABRICS)
@pytest.mark.parametrize(("heads", "ctx", "gen"), DUPLICATED, ids=pair_id)
def test_duplicated_heads(processes: Processes, fabric: Fabric, heads: int, ctx: P, gen: P) -> None:
    model = attention((None, 24), heads=heads)
    with exchange(fabric, processes[str(fabric)], model, ctx, gen) as sides:
        sides.hand_over(requests_of(TOGETHER))


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("forms", FORMS, ids=pair_id)
@pytest.mark.parametrize(("ctx", "gen"), FORM_CASES, ids=pair_id)
@pytest.mark.parametrize("dim", [8, 2048])
def test_pool_forms(processes: Processes, fabric: Fabric, forms: tuple[bool, bool], ctx: P, gen: P, dim: int) -> None:
    """Block-major and layer-major on either side; small pieces come through staging, large ones straight."""
    model = attention((None, 24), dim=dim)
    with exchange(fabric, processes[str(fabric)], model, ctx, gen, forms=forms, pages=12) as sides:
        sides.hand_over(requests_of((8, 33) if dim > 8 else (1, 7, 24, 25)))


def test_head_mismatch_is_staged(processes: Processes) -> None:
    """Pages with small pieces come whole into a buffer: far fewer reads than pieces."""
    windows, requests = (None, 24), requests_of((64,))
    with exchange(UCX_CMA, processes[str(UCX_CMA)], attention(windows), P(2), P(1)) as sides:
        _, reads = sides.hand_over(requests)
    pieces = 2 * 2 * 2 * (8 + 3)  # ranks x layers x K and V x blocks of either group
    assert reads <= pieces // 4
