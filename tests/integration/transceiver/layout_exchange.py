"""One side hands requests to every rank of another: all pulls at once, then every byte of both sides is checked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count

from tests.integration.transceiver.fabrics import FABRICS, Fabric
from tests.integration.transceiver.layout_process import HolderProcess, Holders
from tests.integration.transceiver.layout_sides import Side, sources_by_rank
from tests.integration.transceiver.layout_values import Model, Request
from transceiver import CacheTransceiverConfig, TransferStatus
from transceiver.parallel_layout import ParallelLayout

__all__ = ["EVERYTHING", "INPROC", "Exchange", "Processes", "requests_of"]

#: Every layout with every length, form and fabric: minutes, not part of the suite.
EVERYTHING = bool(os.environ.get("KVFERRY_ALL_FABRICS"))
INPROC = Fabric("inproc", "numpy", {"backend": "inproc"})
_seeds = count(1)
_numbers = count(1)


def requests_of(lengths: Sequence[int], **options: int | bool) -> list[Request]:
    """One request a length, each with values of its own."""
    return [Request(next(_numbers), length, **options) for length in lengths]  # type: ignore[arg-type]


class Processes(dict[str, HolderProcess]):
    """One holding process a fabric, started when it is first asked for; ends with `stack`."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, name: str) -> HolderProcess:
        fabric = next(p.values[0] for p in FABRICS if str(p.values[0]) == name)
        self[name] = self._stack.enter_context(HolderProcess(fabric.config))
        return self[name]


class Exchange:
    """A holding and a receiving side of one model. Made by `exchange`."""

    def __init__(self, holders: Holders, ctx: ParallelLayout, receivers: Side) -> None:
        self.holders, self.ctx, self.receivers = holders, ctx, receivers

    def hand_over(self, requests: Sequence[Request]) -> tuple[int, int]:
        """Give all requests to every rank, at once, each from the next data-parallel group; (bytes, reads)."""
        receivers, seed = self.receivers, next(_seeds)
        model, gen = receivers.model, receivers.server
        receivers.new_round(seed)
        plan = [
            (rank, request, sources_by_rank(model, self.ctx, gen, rank, index % self.ctx.dp))
            for rank in range(gen.world)
            for index, request in enumerate(requests)
        ]
        offers = [(source, r, f"t-{seed}-{rank}-{r.number}") for rank, r, asked in plan for source in asked]
        tickets = iter(self.holders.publish(seed, offers))
        wanted = [receivers.want(rank, request) for rank, request, _ in plan]
        receivers.snapshot()
        pulls = [
            receivers.start(rank, tables, [(groups, next(tickets)) for groups in asked.values()])
            for (rank, _, asked), tables in zip(plan, wanted, strict=True)
        ]
        moved = reads = 0
        for (rank, request, asked), tables, pull in zip(plan, wanted, pulls, strict=True):
            nbytes, blocks, segments = pull.finish()
            assert nbytes == receivers.wanted_bytes(rank, tables), f"each byte once: rank {rank}, {request}"
            assert blocks == sum(len(rows) for rows in tables)
            for groups, given in zip(asked.values(), pull.bytes_by_source(), strict=True):
                assert groups or not given
            moved, reads = moved + nbytes, reads + segments
        for rank in range(gen.world):
            mine = [(r, tables) for (at, r, _), tables in zip(plan, wanted, strict=True) if at == rank]
            receivers.check(rank, mine)
        assert self.holders.finish() == ({TransferStatus.DONE}, True)
        return moved, reads


@contextmanager
def exchange(
    fabric: Fabric, holders: Holders, model: Model, ctx: ParallelLayout, gen: ParallelLayout, *,
    forms: tuple[bool, bool] = (False, False), pages: int = 40,
) -> Iterator[Exchange]:  # fmt: skip
    """Both sides, started; `forms`: which side's pools are layer-major."""
    holders.start(model, ctx, forms[0], pages)
    with ExitStack() as stack:
        config = CacheTransceiverConfig(**fabric.config)
        yield Exchange(holders, ctx, Side(stack, "gen", model, gen, config, layer_major=forms[1], pages=pages))
