"""Pools beside the attention layers' own, between unlike layouts: recurrent state cut by heads and by sections, index
keys that every tensor rank has, stages without a layer of a group, and all of them with windows in one transfer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.integration.transceiver.fabrics import FABRICS, Fabric
from tests.integration.transceiver.layout_cases import (
    FORMS,
    INDEX_PAIRS,
    STATE_PAIRS,
    attention,
    hybrid,
    pair_id,
    with_index_keys,
)
from tests.integration.transceiver.layout_exchange import ALL_FABRICS, FEW_FABRICS, Processes, exchange, requests_of
from tests.integration.transceiver.layout_sides import Side
from transceiver import CacheTransceiverConfig, TransferStatus
from transceiver.parallel_layout import ParallelLayout as P

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]
LENGTHS = (1, 8, 25, 33)


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    with ExitStack() as stack:
        yield Processes(stack)


@pytest.mark.parametrize("fabric", FEW_FABRICS)
@pytest.mark.parametrize(("ctx", "gen"), STATE_PAIRS, ids=pair_id)
def test_all_kinds_of_groups_in_one_transfer(processes: Processes, fabric: Fabric, ctx: P, gen: P) -> None:
    """Full attention, a window, SSM and convolution state, index keys: five pools of four dtypes."""
    with exchange(fabric, processes[str(fabric)], hybrid(), ctx, gen) as sides:
        sides.hand_over(requests_of(LENGTHS))


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("forms", FORMS, ids=pair_id)
@pytest.mark.parametrize("dim", [8, 1024])
def test_all_kinds_of_groups_in_all_forms(
    processes: Processes, fabric: Fabric, forms: tuple[bool, bool], dim: int
) -> None:
    """With the larger heads some groups come in pieces and others through staging, in one pull."""
    ctx, gen = P(1, 2), P(2, 3)
    with exchange(fabric, processes[str(fabric)], hybrid(dim=dim, layers=12), ctx, gen, forms=forms, pages=9) as sides:
        sides.hand_over(requests_of((9, 32)))


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("dim", [8, 1024])
def test_layers_in_another_order(processes: Processes, fabric: Fabric, dim: int) -> None:
    """Slots are found by the layers' numbers, not by their order."""
    with exchange(fabric, processes[str(fabric)], hybrid(dim=dim), P(2, 2), P(1), backwards=True, pages=16) as sides:
        sides.hand_over(requests_of((9, 32)))


@pytest.mark.parametrize("fabric", FABRICS)
def test_a_prompt_without_state(processes: Processes, fabric: Fabric) -> None:
    """A group with no slot is left out; other requests have one."""
    with exchange(fabric, processes[str(fabric)], hybrid(), P(2), P(1, 2)) as sides:
        sides.hand_over([*requests_of((30,), state=False), *requests_of((31,))])


@pytest.mark.parametrize("fabric", ALL_FABRICS)
def test_state_leaves_with_the_last_chunk(processes: Processes, fabric: Fabric) -> None:
    with exchange(fabric, processes[str(fabric)], hybrid(), P(2), P(1)) as sides:
        sides.hand_over(requests_of((50, 33), chunks=(7, 24)))


@pytest.mark.parametrize("fabric", FEW_FABRICS)
@pytest.mark.parametrize(("ctx", "gen"), INDEX_PAIRS, ids=pair_id)
def test_replicated_index_keys(processes: Processes, fabric: Fabric, ctx: P, gen: P) -> None:
    with exchange(fabric, processes[str(fabric)], with_index_keys(attention((None, 24)), range(4)), ctx, gen) as sides:
        sides.hand_over(requests_of(LENGTHS))


@pytest.mark.parametrize("fabric", FEW_FABRICS)
@pytest.mark.parametrize("layers", [range(2), range(2, 4), (3,)], ids=str)
@pytest.mark.parametrize(("ctx", "gen"), [(P(1, 2), P(1)), (P(1), P(1, 2)), (P(2, 2), P(1, 4)), (P(1, 4), P(2, 2))])
def test_stages_without_index_keys(processes: Processes, fabric: Fabric, layers: range, ctx: P, gen: P) -> None:
    with exchange(fabric, processes[str(fabric)], with_index_keys(attention((None, 24)), layers), ctx, gen) as sides:
        sides.hand_over(requests_of(LENGTHS))


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("holder_has_it", [True, False])
def test_state_on_one_side_only_is_refused(processes: Processes, fabric: Fabric, holder_has_it: bool) -> None:
    with_state, without = hybrid(), attention((None, 24), layers=6)
    models = (with_state, without) if holder_has_it else (without, with_state)
    with ExitStack() as stack, exchange(fabric, processes[str(fabric)], models[0], P(1), P(1)) as sides:
        (request,) = requests_of((8,))
        sides.holders.prepare(1, [(0, request, "t")])
        (ticket,) = sides.holders.publish([(0, request, "t")])
        config = CacheTransceiverConfig(**fabric.config)
        other = Side(stack, "gen", models[1], P(1), config)
        other.new_round(1)
        wanted = other.want(0, request)
        outcome = other.ranks[0].fetch(ticket, wanted[:1], conversation_id="c", scope=b"scope", timeout_s=10)
        assert (outcome.status, outcome.bytes) == (TransferStatus.FAILED, 0)
        assert "the KV layouts differ in groups" in outcome.reason
