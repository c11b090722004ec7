"""One side hands requests to every rank of another: all pulls at once, then every byte of both sides is checked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

from tests.integration.transceiver.fabrics import FABRICS, UCX_CMA, UCX_TCP, Fabric, as_parameter
from tests.integration.transceiver.layout_process import HolderProcess, Holders, LocalHolders
from tests.integration.transceiver.layout_sides import Side, sources_by_rank
from tests.integration.transceiver.layout_values import Model, Request
from tests.unit.transceiver.rig import eventually
from transceiver import CacheTransceiverConfig, TransferStatus
from transceiver.parallel_layout import ParallelLayout

__all__ = [
    "ALL_FABRICS",
    "EVERYTHING",
    "FEW_FABRICS",
    "INPROC",
    "SOME_FABRICS",
    "Exchange",
    "Processes",
    "exchange",
    "requests_of",
]

#: Every layout with every length, form and fabric: minutes, not part of the suite.
EVERYTHING = bool(os.environ.get("KVFERRY_ALL_FABRICS"))
INPROC = Fabric("inproc", "numpy", {"backend": "inproc"})
#: pytest parameters: inside one process, and every way between two.
ALL_FABRICS = [as_parameter(INPROC), *FABRICS]
#: Of these the suite takes, where a case is about lengths or groups: inproc, cma and TCP, or the first two.
SOME_FABRICS = ALL_FABRICS if EVERYTHING else [as_parameter(fabric) for fabric in (INPROC, UCX_CMA, UCX_TCP)]
FEW_FABRICS = ALL_FABRICS if EVERYTHING else SOME_FABRICS[:2]
_seeds = count(1)
_numbers = count(1)


def config_of(fabric: Fabric) -> dict[str, Any]:
    """Of either side; grants may grow."""
    return {**fabric.config, "enable_pipelined_transfer": True}


def requests_of(lengths: Sequence[int], **options: Any) -> list[Request]:
    """One request a length, each with values of its own; `options` as of `Request`."""
    return [Request(next(_numbers), length, **options) for length in lengths]


class Processes(dict[str, Holders]):
    """Holders by the name of the fabric: a process each, made when it is first asked for; it ends with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, name: str) -> Holders:
        if name == str(INPROC):
            self[name] = LocalHolders(self._stack, config_of(INPROC))
        else:
            fabric = next(p.values[0] for p in FABRICS if str(p.values[0]) == name)
            self[name] = self._stack.enter_context(HolderProcess(config_of(fabric)))
        return self[name]


class Exchange:
    """A holding and a receiving side of one model. Made by `exchange`."""

    def __init__(self, fabric: Fabric, holders: Holders, ctx: ParallelLayout, receivers: Side) -> None:
        self._fabric, self.holders, self.ctx, self.receivers = fabric, holders, ctx, receivers

    def hand_over(self, requests: Sequence[Request], *, receive_first: bool = False) -> tuple[int, int]:
        """Give all requests to every rank, at once, each from the next data-parallel group; (bytes, reads).

        `receive_first`: every receiver asks before anything is published.
        """
        receivers, seed = self.receivers, next(_seeds)
        model, gen = receivers.model, receivers.server
        receivers.new_round(seed)
        plan = [
            (rank, request, sources_by_rank(model, self.ctx, gen, rank, index % self.ctx.dp))
            for rank in range(gen.world)
            for index, request in enumerate(requests)
        ]
        offers = [(source, r, f"t-{seed}-{rank}-{r.number}") for rank, r, asked in plan for source in asked]
        promised = self.holders.prepare(seed, offers)
        tickets = iter(promised if receive_first else self.holders.publish(offers))
        wanted = [receivers.want(rank, request) for rank, request, _ in plan]
        receivers.snapshot()
        pulls = [
            receivers.start(rank, tables, [(groups, next(tickets)) for groups in asked.values()])
            for (rank, _, asked), tables in zip(plan, wanted, strict=True)
        ]
        if receive_first:
            assert eventually(lambda: self.holders.parked() == len(offers), 20)
            self.holders.publish(offers)
        self.holders.go_on()
        moved = reads = 0
        for (rank, request, asked), tables, pull in zip(plan, wanted, pulls, strict=True):
            outcome = pull.finish()
            assert outcome.transport == self._fabric.transport
            assert outcome.bytes == receivers.wanted_bytes(rank, tables), f"each byte once: rank {rank}, {request}"
            assert outcome.blocks == sum(len(rows) for rows in tables)
            for groups, given in zip(asked.values(), pull.bytes_by_source(), strict=True):
                assert groups or not given
            moved, reads = moved + outcome.bytes, reads + outcome.segments
        for rank in range(gen.world):
            mine = [(r, tables) for (at, r, _), tables in zip(plan, wanted, strict=True) if at == rank]
            receivers.check(rank, mine)
        assert self.holders.finish() == ({TransferStatus.DONE}, True)
        return moved, reads


@contextmanager
def exchange(
    fabric: Fabric, holders: Holders, model: Model, ctx: ParallelLayout, gen: ParallelLayout, *,
    forms: tuple[bool, bool] = (False, False), pages: int = 40, backwards: bool = False,
) -> Iterator[Exchange]:  # fmt: skip
    """Both sides, started; `forms`: which side's pools are layer-major; `backwards`: the receivers' order of layers."""
    holders.start(model, ctx, forms[0], pages)
    with ExitStack() as stack:
        config = CacheTransceiverConfig(**config_of(fabric))
        theirs = replace(model, backwards=backwards)
        receivers = Side(stack, "gen", theirs, gen, config, layer_major=forms[1], pages=pages)
        yield Exchange(fabric, holders, ctx, receivers)
