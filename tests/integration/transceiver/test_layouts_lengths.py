"""Prompts of every length at the edges of a block and of a window, between unlike layouts: which blocks move, which
bytes they hold, and that nothing else changes. See `layout_sides` for what is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import pytest

from tests.integration.transceiver.fabrics import FABRICS, UCX_CMA, Fabric
from tests.integration.transceiver.layout_cases import (
    BOUNDARY_LENGTHS,
    BOUNDARY_PAIRS,
    LAYOUTS,
    UNEVEN,
    WINDOWS,
    attention,
    pair_id,
)
from tests.integration.transceiver.layout_exchange import (
    ALL_FABRICS,
    EVERYTHING,
    FEW_FABRICS,
    SOME_FABRICS,
    Processes,
    exchange,
    requests_of,
)
from tests.integration.transceiver.layout_values import Request
from transceiver import TransferStatus
from transceiver.parallel_layout import ParallelLayout as P

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]
_numbers = count(1_000_000)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(stack)


def request(length: int, **options: int | bool | tuple[int, ...]) -> Request:
    return Request(next(_numbers), length, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("fabric", SOME_FABRICS)
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=pair_id)
@pytest.mark.parametrize(("ctx", "gen"), BOUNDARY_PAIRS, ids=pair_id)
def test_boundary_lengths(
    processes: Processes, fabric: Fabric, windows: tuple[int | None, ...], ctx: P, gen: P
) -> None:
    with exchange(fabric, processes[str(fabric)], attention(windows), ctx, gen) as sides:
        sides.hand_over(requests_of(BOUNDARY_LENGTHS))


#: Every layout with every length, window, number of layers and fabric, if asked for.
EVERY_CASE = [
    pytest.param(fabric.values[0], kind, ctx, gen, windows, layers, marks=fabric.marks)
    for fabric in ALL_FABRICS
    for kind, ctx, gen in (*LAYOUTS, *UNEVEN)
    for windows in (*WINDOWS.values(), (None, 24, 256))
    for layers in (4, 7)
    if EVERYTHING
]


@pytest.mark.slow
@pytest.mark.parametrize(("fabric", "kind", "ctx", "gen", "windows", "layers"), EVERY_CASE, ids=pair_id)
def test_boundary_lengths_of_every_layout(
    processes: Processes, fabric: Fabric, windows: tuple[int | None, ...], kind: str, ctx: P, gen: P, layers: int
) -> None:
    """Minutes, with KVFERRY_ALL_FABRICS=1 only."""
    model = attention(windows, mla=kind == "mla", layers=layers)
    with exchange(fabric, processes[str(fabric)], model, ctx, gen) as sides:
        sides.hand_over(requests_of(BOUNDARY_LENGTHS))
        sides.hand_over(requests_of((13, 26, 39), keeps_stale=True))


@pytest.mark.parametrize("fabric", FABRICS)
def test_lengths_around_a_long_window(processes: Processes, fabric: Fabric) -> None:
    """A window of 256 and one of 24: the last prompt without a stale block, and those behind it."""
    with exchange(fabric, processes[str(fabric)], attention((256, 24)), P(2), P(1, 2), pages=420) as sides:
        sides.hand_over(requests_of((247, 254, 255, 256, 257, 262, 263, 264, 265, 271, 272)))


@pytest.mark.parametrize("fabric", FEW_FABRICS)
@pytest.mark.parametrize("windows", [(1024,), (1024, 24)], ids=pair_id)
@pytest.mark.parametrize(("ctx", "gen"), [(P(1), P(1)), (P(1, 2), P(1)), (P(1), P(1, 2)), (P(1, 2), P(2))], ids=pair_id)
def test_windows_longer_than_the_prompt(
    processes: Processes, fabric: Fabric, windows: tuple[int | None, ...], ctx: P, gen: P
) -> None:
    with exchange(fabric, processes[str(fabric)], attention(windows), ctx, gen) as sides:
        sides.hand_over(requests_of((16, 32, 64)))


@pytest.mark.parametrize("fabric", SOME_FABRICS)
@pytest.mark.parametrize(("ctx", "gen"), [(P(1), P(1)), (P(2), P(1)), (P(1, 2), P(4))], ids=pair_id)
def test_only_missing_blocks_move(processes: Processes, fabric: Fabric, ctx: P, gen: P) -> None:
    """The receiver has a prefix: of whole blocks, ending inside a block or inside the window, or everything."""
    has = [(32, 16), (30, 11), (33, 32), (9, 8), (40, 15), (25, 24), (64, 24), (64, 49), (7, 6)]
    with exchange(fabric, processes[str(fabric)], attention((None, 24)), ctx, gen, pages=60) as sides:
        sides.hand_over([request(length, cached=cached) for length, cached in has])
        assert sides.hand_over([request(length, cached=length) for length in (8, 29)]) == (0, 0)


@pytest.mark.parametrize("fabric", SOME_FABRICS)
@pytest.mark.parametrize(("ctx", "gen"), [(P(1), P(1)), (P(2), P(1)), (P(1, 2), P(4))], ids=pair_id)
def test_the_holder_has_more(processes: Processes, fabric: Fabric, ctx: P, gen: P) -> None:
    """Its last block is fuller than what is wanted of it, or there are more blocks, or blocks before the window."""
    more = [(13, 20), (30, 47), (1, 2), (7, 8), (8, 9), (23, 24), (31, 33), (9, 16)]
    with exchange(fabric, processes[str(fabric)], attention((None, 24)), ctx, gen) as sides:
        sides.hand_over([request(length, held=held, keeps_stale=True) for length, held in more])
        sides.hand_over(requests_of((31, 32, 40), keeps_stale=True))


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_window_that_the_holder_has_left_is_named(processes: Processes, fabric: Fabric) -> None:
    """The holder is 17 tokens further: blocks 0 to 2 of the window are gone there, everything else arrives."""
    asked = request(30, held=47)
    with exchange(fabric, processes[str(fabric)], attention((None, 24)), P(1), P(1)) as sides:
        receivers = sides.receivers
        receivers.new_round(7)
        sides.holders.prepare(7, [(0, asked, "t")])
        (ticket,) = sides.holders.publish([(0, asked, "t")])
        full, window = receivers.want(0, asked)
        assert window.ordinals.tolist() == [0, 1, 2, 3]
        receivers.snapshot()
        outcome = receivers.ranks[0].fetch(ticket, (full, window), conversation_id="c", scope=b"scope", timeout_s=20)
        assert outcome.status is TransferStatus.FAILED
        assert outcome.bad_ordinals == ((1, 0), (1, 1), (1, 2))
        assert "3 not held by the holder" in outcome.reason
        receivers.check(0, [(asked, (full, window.select(window.ordinals == 3)))])
        assert sides.holders.finish() == ({TransferStatus.FAILED}, True)


#: The thirteen layouts of the tests of order.
ORDER_PAIRS = [
    *((side, side) for side in (P(1), P(2), P(1, 2), P(2, 2), P(4))),
    (P(1, 2), P(1)), (P(1), P(1, 2)), (P(2), P(1, 2)), (P(1, 2), P(2)), (P(2), P(1)), (P(4), P(2, 2)), (P(2, 2), P(4)),
    (P(2, attention_dp=True), P(1, 2)),
]  # fmt: skip


@pytest.mark.parametrize("receive_first", [False, True], ids=["send first", "receive first"])
@pytest.mark.parametrize(("ctx", "gen"), ORDER_PAIRS, ids=pair_id)
def test_either_side_may_come_first(processes: Processes, ctx: P, gen: P, receive_first: bool) -> None:
    with exchange(UCX_CMA, processes[str(UCX_CMA)], attention((None, 24)), ctx, gen) as sides:
        sides.hand_over(requests_of((30, 60)), receive_first=receive_first)


@pytest.mark.parametrize("fabric", ALL_FABRICS)
@pytest.mark.parametrize(("ctx", "gen"), [(P(1), P(1)), (P(2), P(2)), (P(2), P(1)), (P(1, 2), P(4))], ids=pair_id)
def test_blocks_leave_chunk_by_chunk(processes: Processes, fabric: Fabric, ctx: P, gen: P) -> None:
    """Aligned and unaligned ends of prefill steps, a prefix that the receiver has; windows leave at the end."""
    requests = [
        request(64, chunks=(16, 32)), request(60, chunks=(13, 27, 51)), request(33, chunks=(32,)),
        request(40, chunks=(8, 24), cached=17), request(9, chunks=(3, 5)),
    ]  # fmt: skip
    with exchange(fabric, processes[str(fabric)], attention((None, 24)), ctx, gen) as sides:
        sides.hand_over(requests)
        sides.hand_over(requests_of((50,), chunks=(7, 49)), receive_first=True)
