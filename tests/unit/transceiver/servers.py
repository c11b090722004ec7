"""Models whose KV is shared out over the ranks of servers, for tests of transfers between unlike layouts."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np

from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from kvcache.storage.layer_major_storage import LayerMajorStorage
from tests.unit.transceiver.rig import SCOPE, SECRET, table
from transceiver import (
    CacheTransceiver,
    CacheTransceiverConfig,
    GrantTicket,
    Publication,
    TransceiverBackend,
    TransferStatus,
)
from transceiver.folded_pull import FoldedPull
from transceiver.mapping import Source, sources_of
from transceiver.parallel_layout import ParallelLayout, RankShare, head_interval, layer_interval

TOKENS, DIM = 8, 8
CONFIG = CacheTransceiverConfig(backend=TransceiverBackend.INPROC)
VALID = (8, 8, 3)
SOURCE_PAGES, TARGET_PAGES = (4, 0, 1), (1, 2, 3)


class Model:
    """KV of `pages` blocks over all layers and heads, and the share of any rank of it."""

    def __init__(self, layers: int, heads: int, *, mla: bool = False, pages: int = 5, dim: int = DIM) -> None:
        self.layers, self.heads, self.mla, self.pages, self.dim = layers, heads, mla, pages, dim
        self.kv = 1 if mla else 2
        shape = (pages, layers, self.kv, heads, TOKENS, dim * 4)
        self.data = np.random.default_rng(layers * 10 + heads).integers(0, 256, shape, dtype=np.uint8)

    def layout(self, server: ParallelLayout, rank: int) -> tuple[KvLayout, RankShare]:
        layers = layer_interval(self.layers, server.pp, server.stage(rank))
        heads = head_interval(self.heads, server.ranks_per_dp, server.rank_in_dp(rank))
        kind = LifeCycleKind.MLA if self.mla else LifeCycleKind.FULL
        group = LayerGroup(kind, tuple(range(layers.start, layers.stop)), len(heads), self.dim, kv_factor=self.kv)
        return KvLayout("m", TOKENS, (group,)), RankShare(self.heads, heads)

    def part(self, server: ParallelLayout, rank: int, page: int) -> bytes:
        layers = layer_interval(self.layers, server.pp, server.stage(rank))
        heads = head_interval(self.heads, server.ranks_per_dp, server.rank_in_dp(rank))
        return self.data[page, layers.start : layers.stop, :, heads.start : heads.stop].tobytes()


class Server:
    """All ranks of one side; `layer_major` pools or block-major ones."""

    def __init__(
        self, stack: ExitStack, name: str, model: Model, server: ParallelLayout, *, filled: bool,
        config: CacheTransceiverConfig = CONFIG, layer_major: bool = False,
    ) -> None:  # fmt: skip
        self.model, self.server = model, server
        self.storages: list[BytesPageStorage] = []
        self.ranks: list[CacheTransceiver] = []
        self.publications: list[Publication] = []
        for rank in range(server.world):
            layout, share = model.layout(server, rank)
            storage = (LayerMajorStorage if layer_major else BytesPageStorage)(layout, [model.pages])
            stack.callback(storage.close)
            storage.generations()[:] = 1
            if filled:
                for page in range(model.pages):
                    view = storage.read_page(page)
                    view[:] = np.frombuffer(model.part(server, rank, page), np.uint8).reshape(view.shape)
            self.storages.append(storage)
            transceiver = CacheTransceiver(
                worker_id=f"{name}-{id(stack)}-{rank}", storage=storage, config=config, secret=SECRET, shares=(share,)
            )
            self.ranks.append(stack.enter_context(transceiver))

    def publish(self, rank: int, name: str, valid: tuple[int, ...] = VALID) -> GrantTicket:
        """Three blocks of a rank."""
        publication = self.ranks[rank].publish(
            name, (table(SOURCE_PAGES, valid=valid),), conversation_id="c", scope=SCOPE, lease_s=20
        )
        self.publications.append(publication)
        return publication.ticket

    def all_released(self) -> bool:
        """True when the receivers acknowledged everything that was published; blocks up to seconds."""
        return all(publication.future.result(5).status is TransferStatus.DONE for publication in self.publications)

    def receive(self, rank: int, sources: list[tuple[Source, GrantTicket]], valid: tuple[int, ...] = VALID) -> int:
        """Pull and check a rank's share of the three blocks; returns the bytes that moved."""
        pulls = [
            self.ranks[rank].pull(
                ticket, (table(TARGET_PAGES, valid=valid),) if source.has_data else (), conversation_id="c",
                scope=SCOPE, timeout_s=20,
            )
            for source, ticket in sources
        ]  # fmt: skip
        folded = FoldedPull(pulls)
        outcome = folded.future.result(20)
        assert outcome.status is TransferStatus.DONE, outcome
        folded.settled.result(5)
        for source_page, page in zip(SOURCE_PAGES, TARGET_PAGES, strict=True):
            assert self.storages[rank].read_page(page).tobytes() == self.model.part(self.server, rank, source_page)
        assert not self.storages[rank].read_page(0).any()
        return outcome.bytes


def run(
    model: Model, ctx: ParallelLayout, gen: ParallelLayout, holder_dp: int = 0, valid: tuple[int, ...] = VALID,
    forms: tuple[bool, bool] = (False, False),
) -> int:  # fmt: skip
    """Hand three blocks from ctx to every gen rank; returns the bytes that moved.

    `forms` says which side is layer-major.
    """
    moved = 0
    with ExitStack() as stack:
        holders = Server(stack, "ctx", model, ctx, filled=True, layer_major=forms[0])
        receivers = Server(stack, "gen", model, gen, filled=False, layer_major=forms[1])
        for rank in range(gen.world):
            sources = [
                (source, holders.publish(source.rank, f"t-{rank}", valid))
                for source in sources_of(model.layers, model.heads, ctx, gen, rank, holder_dp)
            ]
            moved += receivers.receive(rank, sources, valid)
        assert holders.all_released()
    return moved
