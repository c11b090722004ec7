"""All ranks of one side of a transfer between unlike layouts, with every layer group of a model, filled and checked.

Every page of every rank holds random bytes before a round, the holder's pages of a request its values. After the
transfers the whole of every receiving pool is compared: what was asked for, and that nothing else changed.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
from numpy.typing import NDArray

from kvcache.block_table import BlockTable
from kvcache.layout import LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from kvcache.storage.layer_major_storage import LayerMajorStorage
from tests.integration.transceiver.layout_values import TOKENS, Model, Request, live_blocks
from tests.unit.transceiver.rig import SCOPE, SECRET, table
from transceiver import (
    CacheTransceiver,
    CacheTransceiverConfig,
    GrantTicket,
    Publication,
    TransferOutcome,
    TransferStatus,
    sources_of,
)
from transceiver.chunking import chunk_blocks
from transceiver.folded_pull import FoldedPull
from transceiver.parallel_layout import ParallelLayout
from transceiver.receiver import Pull
from transceiver.transfer_checks import conversation_digest

__all__ = ["Asked", "Side", "sources_by_rank"]

Bytes = NDArray[np.uint8]
#: Per holding rank, in order: the groups of which it gives something. Nothing: it is only told that it is not needed.
Asked = dict[int, list[int]]
_WAIT_S = 30.0


def sources_by_rank(model: Model, ctx: ParallelLayout, gen: ParallelLayout, rank: int, holder_dp: int) -> Asked:
    """What gen `rank` asks of whom, over all groups."""
    asked: Asked = {}
    for index, group in enumerate(model.groups):
        # a state is dealt out over the ranks: as many "heads" as the side with more of them has
        heads = max(ctx.ranks_per_dp, gen.ranks_per_dp) if group.recurrent else group.heads
        for source in sources_of(model.num_layers, heads, ctx, gen, rank, holder_dp):
            groups = asked.setdefault(source.rank, [])
            if source.has_data and set(group.layers) & set(range(source.layers.start, source.layers.stop)):
                groups.append(index)
    return asked


class Side:
    """`name` is "ctx" (holders) or "gen" (receivers). `pages` in every pool."""

    def __init__(
        self, stack: ExitStack, name: str, model: Model, server: ParallelLayout, config: CacheTransceiverConfig,
        *, layer_major: bool = False, pages: int = 40,
    ) -> None:  # fmt: skip
        self.model, self.server, self.name, self.pages = model, server, name, pages
        self.storages: list[BytesPageStorage] = []
        self.ranks: list[CacheTransceiver] = []
        self._publications: list[Publication] = []
        self._held: dict[tuple[int, Request], tuple[BlockTable, ...]] = {}
        self._later: list[tuple[Publication, tuple[BlockTable, ...], bool]] = []
        self._free: list[list[list[int]]] = []
        self._before: list[list[Bytes]] = []
        self._checksums: list[int] = []
        for rank in range(server.world):
            layout, shares = model.rank_layout(server, rank, name)
            storage = (LayerMajorStorage if layer_major else BytesPageStorage)(
                layout, [pages] * len(layout.groups), shared=config.wants_shared_pools
            )
            stack.callback(storage.close)
            self.storages.append(storage)
            self.ranks.append(
                stack.enter_context(
                    CacheTransceiver(
                        worker_id=f"{name}-{id(stack)}-{rank}", storage=storage, config=config, secret=SECRET,
                        shares=shares,
                    )
                )
            )  # fmt: skip

    def new_round(self, seed: int) -> None:
        """Random bytes everywhere, every page free, generations of this round."""
        self._free, self._held, self._publications = [], {}, []
        for rank, storage in enumerate(self.storages):
            rng = np.random.default_rng((seed, rank, self.name == "ctx"))
            self._free.append([rng.permutation(self.pages).tolist() for _ in self.model.groups])
            for group in range(len(self.model.groups)):
                storage.generations(group)[:] += 1
                for page in range(self.pages):
                    view = storage.read_page(page, group)
                    view[:] = rng.integers(0, 256, view.shape, dtype=np.uint8)

    def _take(self, rank: int, group: int, count: int) -> list[int]:
        free = self._free[rank][group]
        return [free.pop() for _ in range(count)]

    def _table(self, rank: int, group: int, blocks: Sequence[int], length: int) -> BlockTable:
        """Pages for `blocks` of a sequence of `length` tokens."""
        generation = int(self.storages[rank].generations(group)[0])
        valid = [min(TOKENS, length - block * TOKENS) for block in blocks]
        return table(self._take(rank, group, len(blocks)), list(blocks), valid, group, generation, TOKENS)

    def _cells(self, rank: int, group: int, pages: Bytes) -> Bytes:
        """Pages as [page][layer][k/v][head][token][byte]."""
        shape = self.storages[rank].layout.groups[group]
        return pages.reshape(len(pages), len(shape.layers), shape.kv_factor, shape.num_kv_heads, TOKENS, -1)

    def _pool(self, rank: int, group: int) -> Bytes:
        """All pages of a pool, copied."""
        storage = self.storages[rank]
        return np.stack([storage.read_page(page, group) for page in range(self.pages)])

    # --- holding side -------------------------------------------------------------------------------------------

    def ticket(self, rank: int, name: str) -> GrantTicket:
        """Of a grant that is yet to come: a receiver may ask before its holder publishes."""
        transceiver = self.ranks[rank]
        token = transceiver._holder.token(name, conversation_digest("c"), SCOPE)
        return GrantTicket(transceiver.address, name, token, 0, 0)

    def publish(self, rank: int, request: Request, name: str) -> GrantTicket:
        """The request's KV, which lies in pages of a rank (`hold`), for one receiver: all of it, or its beginning."""
        tables = () if request.chunks else self._held[rank, request]
        publication = self.ranks[rank].publish(
            name, tables, conversation_id="c", scope=SCOPE, lease_s=_WAIT_S, open_ended=bool(request.chunks)
        )
        self._publications.append(publication)
        if request.chunks:
            steps = self._steps(rank, request)
            publication.extend(steps[0], last=len(steps) == 1)
            self._later += [(publication, tables, number == len(steps)) for number, tables in enumerate(steps[1:], 2)]
        return publication.ticket

    def go_on(self) -> None:
        """Publish what later prefill steps computed."""
        for publication, tables, last in self._later:
            publication.extend(tables, last=last)
        self._later = []

    def _steps(self, rank: int, request: Request) -> list[tuple[BlockTable, ...]]:
        """The held blocks of a request, by the prefill step that they leave with."""
        ends = (*request.chunks, request.computed)
        layout = self.storages[rank].layout
        parts = [(rows, chunk_blocks(layout, rows.group, request.computed, ends)) for rows in self._held[rank, request]]
        return [
            tuple(
                rows if layout.groups[rows.group].kind is LifeCycleKind.RECURRENT and len(blocks[step])
                else rows.select((rows.ordinals >= blocks[step].start) & (rows.ordinals < blocks[step].stop))
                for rows, blocks in parts
            )
            for step in range(len(ends))
        ]  # fmt: skip

    def parked(self) -> int:
        """Requests that came before what they ask for."""
        return sum(rank.stats().parked_requests for rank in self.ranks)

    def hold(self, rank: int, request: Request) -> tuple[BlockTable, ...]:
        """Write the KV of a request into fresh pages of a rank, once; what lies behind its last token is not its."""
        if (rank, request) in self._held:
            return self._held[rank, request]
        model, server, tables = self.model, self.server, []
        for index, group in enumerate(model.groups):
            if not model.layers(server, rank, index):
                continue
            if group.recurrent and not request.state:
                continue
            if group.recurrent:
                tables.append(self._table(rank, index, [(request.computed - 1) // TOKENS], request.computed))
                page = self.storages[rank].read_page(int(tables[-1].pages[0]), index)
                page[:] = model.state(server, rank, index, request)
                continue
            window = None if request.keeps_stale else group.window
            mine = self._table(rank, index, live_blocks(request.computed, window), request.computed)
            values = model.tokens(server, rank, index, request)
            past = model.tokens(server, rank, index, request, past=True)
            for block, page_id, valid in zip(mine.ordinals, mine.pages, mine.valid_tokens, strict=True):
                span = slice(int(block) * TOKENS, (int(block) + 1) * TOKENS)
                content = np.concatenate([values[..., span, :][..., :valid, :], past[..., span, :][..., valid:, :]], -2)
                page = self.storages[rank].read_page(int(page_id), index)
                page[:] = content.reshape(page.shape)
            tables.append(mine)
        self._held[rank, request] = tuple(tables)
        return self._held[rank, request]

    def note(self) -> None:
        """Remember this side's bytes, for `untouched`."""
        self._checksums = self._sums()

    def settled(self) -> list[TransferStatus]:
        """How the publications of this round ended; blocks for it."""
        return [publication.future.result(_WAIT_S).status for publication in self._publications]

    def untouched(self) -> bool:
        """No byte of this side changed since `note`."""
        return bool(self._checksums) and self._sums() == self._checksums

    def _sums(self) -> list[int]:
        ranks, groups = range(self.server.world), range(len(self.model.groups))
        return [zlib.crc32(self._pool(rank, group).tobytes()) for rank in ranks for group in groups]

    # --- receiving side -----------------------------------------------------------------------------------------

    def want(self, rank: int, request: Request) -> tuple[BlockTable, ...]:
        """Tables of what a rank lacks of a request, in fresh pages: one a group."""
        tables = []
        for index, group in enumerate(self.model.groups):
            blocks = [(request.length - 1) // TOKENS] if group.recurrent else live_blocks(request.length, group.window)
            if not group.recurrent:
                blocks = [block for block in blocks if block >= request.cached // TOKENS]
            nothing = not self.model.layers(self.server, rank, index) or (group.recurrent and not request.state)
            if nothing or request.cached == request.length:
                blocks = []
            tables.append(self._table(rank, index, blocks, request.length))
        return tuple(tables)

    def snapshot(self) -> None:
        """Remember every pool, before the pulls."""
        groups = range(len(self.model.groups))
        self._before = [[self._pool(rank, group) for group in groups] for rank in range(self.server.world)]

    def start(
        self, rank: int, wanted: tuple[BlockTable, ...], sources: Sequence[tuple[list[int], GrantTicket]]
    ) -> Pulls:
        """Pull the groups that each source gives."""
        return Pulls(
            [
                self.ranks[rank].pull(
                    ticket, tuple(wanted[group] for group in groups if len(wanted[group])), conversation_id="c",
                    scope=SCOPE, timeout_s=_WAIT_S,
                )
                for groups, ticket in sources
            ]
        )  # fmt: skip

    def wanted_bytes(self, rank: int, wanted: tuple[BlockTable, ...]) -> int:
        """Each wanted block once."""
        layout = self.storages[rank].layout
        return sum(len(rows) * layout.page_bytes(rows.group) for rows in wanted)

    def check(self, rank: int, received: Sequence[tuple[Request, tuple[BlockTable, ...]]]) -> None:
        """Compare every byte of a rank's pools with the reference."""
        for index, group in enumerate(self.model.groups):
            before, now = self._before[rank][index], self._pool(rank, index)
            other = np.ones(self.pages, np.bool_)
            for request, wanted in received:
                rows = wanted[index]
                other[rows.pages] = False
                if not len(rows):
                    continue
                if group.recurrent:
                    expected = self.model.state(self.server, rank, index, request)
                    assert (now[rows.pages[0]] == expected).all(), f"state of group {index}, {request}"
                    continue
                self._check_blocks(rank, index, request, rows, before, now)
            assert (now[other] == before[other]).all(), f"group {index}: bytes of other pages changed"

    def _check_blocks(
        self, rank: int, group: int, request: Request, rows: BlockTable, before: Bytes, now: Bytes
    ) -> None:
        values = self.model.tokens(self.server, rank, group, request)
        past = self.model.tokens(self.server, rank, group, request, past=True)
        for block, page, valid in zip(rows.ordinals.tolist(), rows.pages, rows.valid_tokens.tolist(), strict=True):
            start, stop = block * TOKENS, block * TOKENS + valid
            (mine,), (old,) = self._cells(rank, group, now[page][None]), self._cells(rank, group, before[page][None])
            assert (mine[..., :valid, :] == values[..., start:stop, :]).all(), f"group {group}, {block=}, {request}"
            # behind the last token: as it was, or what the holder has there (its next tokens, or what it never reads)
            end = start + TOKENS
            held = np.concatenate([values[..., : request.computed, :], past[..., request.computed :, :]], -2)
            rest = mine[..., valid:, :]
            alike = (rest == old[..., valid:, :]).all(-1) | (rest == held[..., stop:end, :]).all(-1)
            assert alike.all(), f"foreign bytes behind the last token: group {group}, block {block}, {request}"


class Pulls:
    """One receiver's pulls of one request."""

    def __init__(self, pulls: list[Pull]) -> None:
        self._pulls = pulls
        self._folded = FoldedPull(pulls)

    def finish(self) -> TransferOutcome:
        """Of a whole transfer that must be done."""
        outcome = self._folded.future.result(_WAIT_S)
        assert outcome.status is TransferStatus.DONE, outcome
        self._folded.settled.result(_WAIT_S)
        return outcome

    def bytes_by_source(self) -> list[int]:
        """What each source gave."""
        return [pull.future.result(0).bytes for pull in self._pulls]
