"""Unlike layouts and pools between two processes, over every fabric: all ranks' pages are byte-equal."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.integration.transceiver.fabrics import FABRICS, Fabric
from tests.integration.transceiver.server_process import ServerProcess
from tests.unit.transceiver.servers import Model, Server
from transceiver import CacheTransceiverConfig, ParallelLayout, sources_of

P = ParallelLayout
MHA: dict[str, Any] = {"layers": 4, "heads": 4}
MLA: dict[str, Any] = {"layers": 4, "heads": 1, "mla": True}
DP2, DP4 = P(2, attention_dp=True), P(4, attention_dp=True)
DP22, DP42 = P(2, 2, attention_dp=True), P(4, 2, attention_dp=True)
SIDES = [P(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4) if tp * pp <= 8]
#: (model, ctx, gen): the layouts of the transceiver's acceptance cases
CASES: list[tuple[dict[str, Any], ParallelLayout, ParallelLayout]] = [
    *((MHA, side, side) for side in SIDES),
    (MHA, P(1, 2), P(1)), (MHA, P(2), P(1, 2)), (MHA, P(4), P(2, 2)), (MHA, P(4), P(1, 4)), (MHA, P(2, 2), P(4)),
    (MHA, P(1, 4), P(4)), (MHA, P(4, 2), P(2, 4)), (MHA, P(2), P(1)), (MHA, P(4), P(2)),
    (MHA, DP2, DP2), (MHA, DP4, DP4), (MHA, DP22, DP22), (MHA, DP42, DP42), (MHA, DP2, P(1, 2)), (MHA, DP4, P(2, 2)),
    (MLA, P(1), P(1)), (MLA, P(2), P(2)), (MLA, P(4), P(4)), (MLA, P(2, 2), P(2, 2)), (MLA, P(4, 2), P(4, 2)),
    (MLA, DP2, P(2)), (MLA, DP4, DP4), (MLA, P(2), P(1, 2)), (MLA, DP4, P(8)), (MLA, P(4), P(8)),
    *(({**MHA, "layers": layers}, ctx, gen) for layers in (5, 7) for ctx, gen in (
        (P(1, 2), P(1, 2)), (P(1, 3), P(1, 3)), (P(1, 4), P(1, 4)), (P(2), P(1, 2)), (P(1, 2), P(2)), (P(4), P(1, 4)),
        (P(1, 4), P(4)), (P(2, 2), P(1, 4)))),
    *(({**MLA, "layers": layers}, P(1, 2), P(1, 3)) for layers in (5, 7)),
    ({"layers": 2, "heads": 2}, P(4), P(2)), (MHA, P(8), P(2)),
]  # fmt: skip
#: One fabric in the suite, since the mapping knows none; KVFERRY_ALL_FABRICS=1 runs them all.
LAYOUT_FABRICS = FABRICS if os.environ.get("KVFERRY_ALL_FABRICS") else FABRICS[:1]
FORMS = [(False, False), (True, False), (False, True), (True, True)]
FORM_CASES = [(P(1), P(1)), (P(2), P(1)), (P(1), P(2)), (P(1, 2), P(2)), (P(4, 2), P(2, 4))]

pytestmark = [pytest.mark.ucx, pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, ServerProcess]]:
    """One process a fabric, started when it is first asked for."""
    with ExitStack() as stack:

        class Started(dict[str, ServerProcess]):
            def __missing__(self, name: str) -> ServerProcess:
                fabric = next(p.values[0] for p in FABRICS if str(p.values[0]) == name)
                self[name] = stack.enter_context(ServerProcess(fabric.config))
                return self[name]

        yield Started()


def hand_over(
    fabric: Fabric, process: ServerProcess, model: dict[str, Any], ctx: P, gen: P, forms: tuple[bool, bool]
) -> int:
    """Three blocks to every gen rank from the other process; returns the bytes that moved."""
    process.start(model, ctx, forms[0])
    moved = 0
    with ExitStack() as stack:
        receivers = Server(
            stack, "gen", Model(**model), gen, filled=False, config=CacheTransceiverConfig(**fabric.config),
            layer_major=forms[1],
        )  # fmt: skip
        for holder_dp in range(ctx.dp):
            for storage in receivers.storages:  # each group's transfer must fill the pages by itself
                storage.read_page(1)[:] = storage.read_page(2)[:] = storage.read_page(3)[:] = 0
            for rank in range(gen.world):
                sources = [
                    (source, process.publish(source.rank, f"t-{holder_dp}-{rank}"))
                    for source in sources_of(model["layers"], model["heads"], ctx, gen, rank, holder_dp)
                ]
                moved += receivers.receive(rank, sources)
    assert process.all_released()
    return moved


@pytest.mark.parametrize("fabric", LAYOUT_FABRICS)
@pytest.mark.parametrize(("model", "ctx", "gen"), CASES, ids=str)
def test_layouts(servers: dict[str, ServerProcess], fabric: Fabric, model: dict[str, Any], ctx: P, gen: P) -> None:
    assert hand_over(fabric, servers[str(fabric)], model, ctx, gen, (False, False)) > 0


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize("forms", FORMS, ids=str)
@pytest.mark.parametrize(("ctx", "gen"), FORM_CASES, ids=str)
@pytest.mark.parametrize("dim", [8, 2048])
def test_pool_forms(
    servers: dict[str, ServerProcess], fabric: Fabric, forms: tuple[bool, bool], ctx: P, gen: P, dim: int
) -> None:
    model = {**MHA, "dim": dim}
    whole = 3 * Model(**model).data[0].nbytes
    assert hand_over(fabric, servers[str(fabric)], model, ctx, gen, forms) == whole
