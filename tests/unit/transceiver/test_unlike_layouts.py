"""Whole servers of unlike layouts exchange blocks through real transceivers; every rank's pages are byte-equal."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from kvcache.errors import KvCacheError
from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.bytes_storage import BytesPageStorage
from kvcache.storage.layer_major_storage import LayerMajorStorage
from tests.unit.transceiver.rig import SCOPE, SECRET, make_layout, make_storage, pair, table
from tests.unit.transceiver.servers import CONFIG, Model, run
from transceiver import CacheTransceiver, TransferStatus
from transceiver.folded_pull import FoldedPull
from transceiver.page_part import PoolShape, default_shares, part_between
from transceiver.parallel_layout import Interval, ParallelLayout, RankShare
from transceiver.pull_reads import STAGING_BYTES

P = ParallelLayout


def form_names(forms: object) -> str | None:
    """For test names: which side keeps its layers together."""
    names = ("block", "layer")
    return "->".join(names[form] for form in forms) if isinstance(forms, tuple) else None


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


@pytest.mark.parametrize("forms", [(False, False), (True, False), (False, True), (True, True)], ids=form_names)
def test_recurrent_state_is_cut_by_section(forms: tuple[bool, bool]) -> None:
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
                make = LayerMajorStorage if forms[side == "gen"] else BytesPageStorage
                storage = make(KvLayout("m", 8, (group,)), [2])
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
                view = storage.read_page(1)
                view[:] = np.frombuffer(state(ctx, rank), np.uint8).reshape(view.shape)
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
                assert storage.read_page(0).tobytes() == state(gen, rank)


def test_staging_buffers_fit_the_pages_of_every_group() -> None:
    """Two groups of one pull go through staging: small pages, and pages larger than a staging buffer is at first."""

    def rank(stack: ExitStack, name: str, heads: Interval) -> tuple[CacheTransceiver, BytesPageStorage]:
        small = LayerGroup(LifeCycleKind.FULL, (0,), len(heads), 16)
        large = LayerGroup(LifeCycleKind.SLIDING, tuple(range(1, 97)), len(heads), 64, window=64)
        storage = make_storage(KvLayout("m", 8, (small, large)), (9, 9), fill=1 if name == "ctx" else None)
        stack.callback(storage.close)
        shares = (RankShare(8, heads),) * 2
        return stack.enter_context(
            CacheTransceiver(
                worker_id=f"{name}-{id(stack)}", storage=storage, config=CONFIG, secret=SECRET, shares=shares
            )
        ), storage

    pages = tuple(range(1, 9))
    tables = (table(pages[:2]), table(pages, group=1))
    with ExitStack() as stack:
        holder, source = rank(stack, "ctx", Interval(0, 4))
        receiver, target = rank(stack, "gen", Interval(0, 8))
        assert source.layout.page_bytes(1) > STAGING_BYTES
        grant = holder.publish("t", tables, conversation_id="c", scope=SCOPE, lease_s=20)
        outcome = receiver.fetch(grant.ticket, tables, conversation_id="c", scope=SCOPE, timeout_s=20)
        assert outcome.status is TransferStatus.DONE, outcome
        assert outcome.segments < 8 * 96  # pages came whole, not in their fragments
        for group, page in ((0, 1), (0, 2), *((1, page) for page in pages)):
            layers = len(source.layout.groups[group].layers)
            mine = target.read_page(page, group).reshape(layers, 2, 8, -1)
            assert (mine[:, :, :4] == source.read_page(page, group).reshape(layers, 2, 4, -1)).all()
            assert not mine[:, :, 4:].any()


@pytest.mark.parametrize("kind", [LifeCycleKind.FULL, LifeCycleKind.RECURRENT], ids=str)
def test_a_rank_that_shares_no_layer_of_a_group_gives_nothing_of_it(kind: LifeCycleKind) -> None:
    """A source of some groups may be asked for all of them: those of other layers move no byte and pass every check."""

    def layout(layers: tuple[int, ...]) -> KvLayout:
        state = {"state_bytes_per_layer": 64} if kind is LifeCycleKind.RECURRENT else {"num_kv_heads": 2, "head_dim": 8}
        return KvLayout("m", 8, (LayerGroup(LifeCycleKind.FULL, (0,), 2, 8), LayerGroup(kind, layers, **state)))

    with ExitStack() as stack:
        sides = []
        for name, layers in (("ctx", (1,)), ("gen", (2,))):
            storage = make_storage(layout(layers), (4, 4), fill=len(name) + layers[0])
            stack.callback(storage.close)
            last = (
                RankShare(1, Interval(0, 1), (64,)) if kind is LifeCycleKind.RECURRENT else RankShare(2, Interval(0, 2))
            )
            shares = (RankShare(2, Interval(0, 2)), last)
            sides.append(
                stack.enter_context(
                    CacheTransceiver(
                        worker_id=f"{name}-{id(stack)}", storage=storage, config=CONFIG, secret=SECRET, shares=shares
                    )
                )
            )
        before = storage.read_page(2, 1).copy()
        tables = (table((1,)), table((2,), group=1))
        grant = sides[0].publish("t", tables, conversation_id="c", scope=SCOPE, lease_s=20)
        outcome = sides[1].fetch(grant.ticket, tables, conversation_id="c", scope=SCOPE, timeout_s=20)
        assert (outcome.status, outcome.bytes) == (TransferStatus.DONE, layout((1,)).page_bytes(0)), outcome
        assert (storage.read_page(2, 1) == before).all()


@pytest.mark.parametrize(
    ("state_bytes", "share"),
    [(16, RankShare(2, Interval(0, 1), (64,))), (64, RankShare(2, Interval(0, 1), (64,))),
     (64, RankShare(2, Interval(0, 2), (64,))), (21, RankShare(3, Interval(0, 1), (64,)))],
    ids=str,
)  # fmt: skip
def test_a_share_that_is_not_the_layouts_state_is_refused(state_bytes: int, share: RankShare) -> None:
    """Cut by it, bytes would land in the next layer's state or the next page."""
    holder = LayerGroup(LifeCycleKind.RECURRENT, (0, 1), state_bytes_per_layer=64)
    receiver = LayerGroup(LifeCycleKind.RECURRENT, (0, 1), state_bytes_per_layer=state_bytes)
    with pytest.raises(ValueError, match=r"state"):
        part_between(8, holder, RankShare(1, Interval(0, 1), (64,)), receiver, share)


@pytest.mark.parametrize("heads", [0, 4])
def test_without_a_share_all_of_a_state_is_the_ranks(heads: int) -> None:
    """Also where the layer group names heads; and a layer-major pool on one side is no other share."""
    group = LayerGroup(LifeCycleKind.RECURRENT, (0, 1), heads, dtype="uint8", state_bytes_per_layer=64)
    (share,) = default_shares(KvLayout("m", 8, (group,)))
    part = part_between(8, group, share, group, share, PoolShape(layer_major=True, num_pages=3))
    assert part is not None and part.nbytes == group.page_bytes(8)


def test_shares_that_do_not_describe_the_layout_are_refused() -> None:
    with pair(layout=make_layout(num_kv_heads=2), receiver_layout=make_layout(num_kv_heads=1)) as p:
        outcome = p.pull(p.publish()).future.result(5)
        assert "groups[0].num_kv_heads: 2 here, 1 at the peer" in outcome.reason  # without shares: equal or nothing


FORMS = [(True, False), (False, True), (True, True)]
FORM_CASES = [
    (P(1), P(1)), (P(2), P(2)), (P(1, 2), P(1)), (P(1), P(1, 2)), (P(2), P(1)), (P(1), P(4)), (P(2), P(1, 2)),
    (P(2, 2), P(4)), (P(4, 2), P(2, 4)),
]  # fmt: skip


@pytest.mark.parametrize("forms", FORMS, ids=form_names)
@pytest.mark.parametrize(("ctx", "gen"), FORM_CASES, ids=str)
@pytest.mark.parametrize("dim", [8, 4096])
def test_layer_major_pools(ctx: ParallelLayout, gen: ParallelLayout, forms: tuple[bool, bool], dim: int) -> None:
    """Small fragments go through staging, large ones straight to their place."""
    model = Model(4, 4, dim=dim, pages=5)
    assert run(model, ctx, gen, forms=forms) == 3 * model.data[0].nbytes


@pytest.mark.parametrize("forms", FORMS, ids=form_names)
@pytest.mark.parametrize("model", [Model(7, 4), Model(4, 1, mla=True)], ids=["seven layers", "mla"])
def test_layer_major_pools_of_uneven_stages_and_mla(model: Model, forms: tuple[bool, bool]) -> None:
    assert run(model, P(1, 2), P(1, 3), forms=forms) == 3 * model.data[0].nbytes


def test_layer_major_storage() -> None:
    layout = make_layout()
    storage = LayerMajorStorage(layout, [3])
    storage.read_page(1)[:] = np.arange(layout.page_bytes(), dtype=np.int64).reshape(2, -1) % 251
    storage.copy_page(1, 2)
    assert storage.read_page(2).tobytes() == storage.read_page(1).tobytes()
    assert storage.pool()[1, 2].tobytes() == storage.read_page(2)[1].tobytes()
    assert not storage.read_page(0).any()
    assert storage.region().layer_major
    with pytest.raises(KvCacheError, match="not one piece"):
        storage.page(0)
    with pytest.raises(KvCacheError, match="page 3"):
        storage.read_page(3)
    storage.close()
    storage.close()
