"""Whole servers of unlike layouts exchange blocks through real transceivers; every rank's pages are byte-equal."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from tests.unit.transceiver.rig import SCOPE, SECRET, make_layout, pair, table
from transceiver import CacheTransceiver, CacheTransceiverConfig, TransceiverBackend, TransferStatus
from transceiver.folded_pull import FoldedPull
from transceiver.mapping import sources_of
from transceiver.parallel_layout import Interval, ParallelLayout, RankShare, head_interval, layer_interval

TOKENS, DIM = 8, 8
CONFIG = CacheTransceiverConfig(backend=TransceiverBackend.INPROC)
P = ParallelLayout


class Model:
    """KV of `pages` blocks over all layers and heads, and the share of any rank of it."""

    def __init__(self, layers: int, heads: int, *, mla: bool = False, pages: int = 5) -> None:
        self.layers, self.heads, self.mla, self.pages = layers, heads, mla, pages
        self.kv = 1 if mla else 2
        shape = (pages, layers, self.kv, heads, TOKENS, DIM * 4)
        self.data = np.random.default_rng(layers * 10 + heads).integers(0, 256, shape, dtype=np.uint8)

    def layout(self, server: ParallelLayout, rank: int) -> tuple[KvLayout, RankShare]:
        layers = layer_interval(self.layers, server.pp, server.stage(rank))
        heads = head_interval(self.heads, server.ranks_per_dp, server.rank_in_dp(rank))
        kind = LifeCycleKind.MLA if self.mla else LifeCycleKind.FULL
        group = LayerGroup(kind, tuple(range(layers.start, layers.stop)), len(heads), DIM, kv_factor=self.kv)
        return KvLayout("m", TOKENS, (group,)), RankShare(self.heads, heads)

    def part(self, server: ParallelLayout, rank: int, page: int) -> bytes:
        layers = layer_interval(self.layers, server.pp, server.stage(rank))
        heads = head_interval(self.heads, server.ranks_per_dp, server.rank_in_dp(rank))
        return self.data[page, layers.start : layers.stop, :, heads.start : heads.stop].tobytes()


class Server:
    """All ranks of one side."""

    def __init__(self, stack: ExitStack, name: str, model: Model, server: ParallelLayout, *, filled: bool) -> None:
        self.server = server
        self.storages: list[BytesPageStorage] = []
        self.ranks: list[CacheTransceiver] = []
        for rank in range(server.world):
            layout, share = model.layout(server, rank)
            storage = BytesPageStorage(layout, [model.pages])
            stack.callback(storage.close)
            storage.generations()[:] = 1
            if filled:
                for page in range(model.pages):
                    storage.page(page)[:] = model.part(server, rank, page)
            self.storages.append(storage)
            transceiver = CacheTransceiver(
                worker_id=f"{name}-{id(stack)}-{rank}", storage=storage, config=CONFIG, secret=SECRET, shares=(share,)
            )
            self.ranks.append(stack.enter_context(transceiver))


def run(
    model: Model, ctx: ParallelLayout, gen: ParallelLayout, holder_dp: int = 0, valid: tuple[int, ...] = (8, 8, 3)
) -> int:
    """Hand three blocks from ctx to every gen rank; returns the bytes that moved."""
    moved = 0
    with ExitStack() as stack:
        holders = Server(stack, "ctx", model, ctx, filled=True)
        receivers = Server(stack, "gen", model, gen, filled=False)
        for rank in range(gen.world):
            pulls, publications = [], []
            for source in sources_of(model.layers, model.heads, ctx, gen, rank, holder_dp):
                publication = holders.ranks[source.rank].publish(
                    f"t-{rank}", (table((4, 0, 1), valid=valid),), conversation_id="c", scope=SCOPE, lease_s=20
                )
                publications.append(publication)
                wanted = (table((1, 2, 3), valid=valid),) if source.has_data else ()
                pulls.append(
                    receivers.ranks[rank].pull(
                        publication.ticket, wanted, conversation_id="c", scope=SCOPE, timeout_s=20
                    )
                )
            folded = FoldedPull(pulls)
            outcome = folded.future.result(20)
            assert outcome.status is TransferStatus.DONE, outcome
            folded.settled.result(5)
            moved += outcome.bytes
            assert all(p.future.result(5).status is TransferStatus.DONE for p in publications)
            for source_page, page in ((4, 1), (0, 2), (1, 3)):
                assert bytes(receivers.storages[rank].page(page)) == model.part(gen, rank, source_page)
            assert not bytes(receivers.storages[rank].page(0)).strip(b"\0")
    return moved


SYMMETRIC = [P(1), P(2), P(4), P(1, 2), P(2, 2), P(4, 2), P(1, 4)]
UNLIKE = [
    (P(1, 2), P(1)), (P(2), P(1, 2)), (P(4), P(2, 2)), (P(4), P(1, 4)), (P(2, 2), P(4)), (P(1, 4), P(4)),
    (P(4, 2), P(2, 4)), (P(2), P(1)), (P(1), P(2)), (P(1), P(4)),
]  # fmt: skip


@pytest.mark.parametrize("layout", SYMMETRIC, ids=str)
def test_equal_layouts(layout: ParallelLayout) -> None:
    model = Model(4, 4)
    assert run(model, layout, layout) == 3 * model.data[0].nbytes


@pytest.mark.parametrize(("ctx", "gen"), UNLIKE, ids=str)
def test_unlike_layouts(ctx: ParallelLayout, gen: ParallelLayout) -> None:
    model = Model(4, 4)
    assert run(model, ctx, gen) == 3 * model.data[0].nbytes  # every byte once


@pytest.mark.parametrize(
    ("ctx", "gen"),
    [(P(2, attention_dp=True), P(2, attention_dp=True)), (P(4, attention_dp=True), P(1, 2)),
     (P(2, 2, attention_dp=True), P(2, 2)), (P(2), P(2, attention_dp=True))],
    ids=str,
)  # fmt: skip
def test_attention_data_parallel(ctx: ParallelLayout, gen: ParallelLayout) -> None:
    for holder_dp in range(ctx.dp):
        run(Model(4, 4), ctx, gen, holder_dp)


@pytest.mark.parametrize(
    ("ctx", "gen"),
    [(P(1), P(1)), (P(2), P(2)), (P(4), P(4)), (P(2, 2), P(2, 2)), (P(4), P(4, attention_dp=True)), (P(4), P(8)),
     (P(2), P(1, 2)), (P(4, attention_dp=True), P(8))],
    ids=str,
)  # fmt: skip
def test_mla(ctx: ParallelLayout, gen: ParallelLayout) -> None:
    model = Model(4, 1, mla=True)
    copies = gen.tp  # every tensor rank needs the latent of its layers
    assert run(model, ctx, gen) == copies * 3 * model.data[0].nbytes


@pytest.mark.parametrize("layers", [5, 7])
@pytest.mark.parametrize(
    ("ctx", "gen"),
    [(P(1, 2), P(1, 3)), (P(1, 4), P(1, 2)), (P(2), P(1, 2)), (P(1, 2), P(2)), (P(4), P(1, 4)), (P(1, 4), P(4)),
     (P(2, 2), P(1, 4))],
    ids=str,
)  # fmt: skip
def test_uneven_stages(layers: int, ctx: ParallelLayout, gen: ParallelLayout) -> None:
    model = Model(layers, 4)
    assert run(model, ctx, gen) == 3 * model.data[0].nbytes


@pytest.mark.parametrize(
    ("ctx", "gen"), [(P(4), P(2)), (P(8), P(2)), (P(2), P(4)), (P(2), P(8)), (P(8), P(4))], ids=str
)
def test_duplicated_heads(ctx: ParallelLayout, gen: ParallelLayout) -> None:
    model = Model(2, 2 if ctx.tp < 8 else 4)
    copies = max(1, gen.tp // model.heads)
    assert run(model, ctx, gen) == copies * 3 * model.data[0].nbytes


def test_recurrent_state_is_cut_by_section() -> None:
    sections, layers = (64, 16, 16), 2
    whole = np.random.default_rng(5).integers(0, 256, (layers, sum(sections)), dtype=np.uint8)

    def state(ranks: int, rank: int) -> bytes:
        rows = []
        for layer in range(layers):
            at = 0
            for size in sections:
                rows.append(whole[layer, at + rank * size // ranks : at + (rank + 1) * size // ranks])
                at += size
        return np.concatenate(rows).tobytes()

    for ctx, gen in ((2, 1), (1, 2), (4, 2), (2, 2)):
        with ExitStack() as stack:

            def rank_of(
                side: str, ranks: int, rank: int, stack: ExitStack = stack
            ) -> tuple[CacheTransceiver, BytesPageStorage]:
                group = LayerGroup(
                    LifeCycleKind.RECURRENT, (0, 1), dtype="uint8", state_bytes_per_layer=sum(sections) // ranks
                )
                storage = BytesPageStorage(KvLayout("m", 8, (group,)), [2])
                stack.callback(storage.close)
                storage.generations()[:] = 1
                share = RankShare(ranks, Interval(rank, rank + 1), sections)
                return stack.enter_context(
                    CacheTransceiver(
                        worker_id=f"{side}-{id(stack)}-{rank}",
                        storage=storage,
                        config=CONFIG,
                        secret=SECRET,
                        shares=(share,),
                    )
                ), storage

            holders = [rank_of("ctx", ctx, rank) for rank in range(ctx)]
            for rank, (_, storage) in enumerate(holders):
                storage.page(1)[:] = state(ctx, rank)
            for rank in range(gen):
                receiver, storage = rank_of("gen", gen, rank)
                first, last = rank * ctx // gen, max(rank * ctx // gen + 1, (rank + 1) * ctx // gen)
                pulls = []
                for holder, _ in holders[first:last]:
                    publication = holder.publish(
                        f"t-{rank}", (table((1,), valid=(1,)),), conversation_id=None, scope=b"", lease_s=9
                    )
                    pulls.append(
                        receiver.pull(
                            publication.ticket, (table((0,), valid=(1,)),), conversation_id=None, scope=b"", timeout_s=9
                        )
                    )
                assert FoldedPull(pulls).future.result(9).status is TransferStatus.DONE
                assert bytes(storage.page(0)) == state(gen, rank)


def test_one_failed_part_fails_the_whole_and_ends_the_others() -> None:
    model, ctx, gen = Model(4, 4), P(2), P(1)
    with ExitStack() as stack:
        holders = Server(stack, "ctx", model, ctx, filled=True)
        receivers = Server(stack, "gen", model, gen, filled=False)
        publications = [
            rank.publish("t", (table((1, 2)),), conversation_id="c", scope=SCOPE, lease_s=20) for rank in holders.ranks
        ]
        holders.storages[1].generations()[1] = 9  # this rank's block changed hands
        pulls = [
            receivers.ranks[0].pull(p.ticket, (table((1, 2)),), conversation_id="c", scope=SCOPE, timeout_s=20)
            for p in publications
        ]
        folded = FoldedPull(pulls)
        outcome = folded.future.result(5)
        assert (outcome.status, (0, 0) in outcome.bad_ordinals) == (TransferStatus.FAILED, True)
        assert all(p.future.result(5) is not None for p in publications)


def test_shares_that_do_not_describe_the_layout_are_refused() -> None:
    with pair(layout=make_layout(num_kv_heads=2), receiver_layout=make_layout(num_kv_heads=1)) as p:
        outcome = p.pull(p.publish()).future.result(5)
        assert "groups[0].num_kv_heads: 2 here, 1 at the peer" in outcome.reason  # without shares: equal or nothing
