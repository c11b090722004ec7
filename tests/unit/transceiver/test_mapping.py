"""Mapping between unlike layouts: golden rows, every combination once, and bytes that land where they belong."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transceiver.mapping import Fragment, PoolForm, page_fragments, sources_of, state_fragments
from transceiver.parallel_layout import Interval, ParallelLayout, head_interval, layer_interval

CASES = Path(__file__).parents[4] / "shared" / "cases" / "turn_retention.json"
SIZES = (1, 2, 4, 8)


def golden_rows() -> list[dict[str, Any]]:
    if not CASES.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(CASES.read_text())["head_mapping"]
    return rows


@pytest.mark.parametrize("row", golden_rows(), ids=lambda row: f"{row['ctx']}->{row['gen']}")
def test_golden_rows(row: dict[str, Any]) -> None:
    ctx, gen = ParallelLayout(**row["ctx"]), ParallelLayout(**row["gen"])
    for rank in range(gen.world):
        sources = sources_of(row.get("layers", 4), row["kv_heads"], ctx, gen, rank)
        if "writers" in row:
            assert [s.rank for s in sources] == row["writers"][str(rank)]
        if "writers_with_data" in row:
            assert [s.rank for s in sources if s.has_data] == row["writers_with_data"][str(rank)]


def test_the_golden_file_is_found_or_the_rows_are_skipped_openly() -> None:
    if not CASES.exists():
        pytest.skip("no ../shared next to this checkout: golden mapping rows are not checked")
    assert golden_rows()


@pytest.mark.parametrize(
    ("heads", "ctx", "gen", "dp_rank", "expected"),
    [
        (1, ParallelLayout(4), ParallelLayout(4, attention_dp=True), 0, {r: ([0, 1, 2, 3], [r]) for r in range(4)}),
        (1, ParallelLayout(4), ParallelLayout(8), 0, {r: ([r // 2], [r // 2]) for r in range(8)}),
        (4, ParallelLayout(2, attention_dp=True), ParallelLayout(pp=2), 1, {0: ([1], [1]), 1: ([1], [1])}),
        (2, ParallelLayout(4), ParallelLayout(2), 0, {0: ([0, 1], [0]), 1: ([2, 3], [2])}),
    ],
)
def test_known_rows(
    heads: int, ctx: ParallelLayout, gen: ParallelLayout, dp_rank: int, expected: dict[int, tuple[list[int], list[int]]]
) -> None:
    for rank, (asked, giving) in expected.items():
        sources = sources_of(4, heads, ctx, gen, rank, dp_rank)
        assert ([s.rank for s in sources], [s.rank for s in sources if s.has_data]) == (asked, giving)


def test_every_combination_covers_each_head_and_layer_once() -> None:
    cases = 0
    for heads, ctx_tp, gen_tp, ctx_dp, gen_dp in itertools.product(SIZES, SIZES, SIZES, (False, True), (False, True)):
        for ctx_pp, gen_pp in ((1, 1), (2, 3), (4, 1)):
            ctx, gen = ParallelLayout(ctx_tp, ctx_pp, ctx_dp), ParallelLayout(gen_tp, gen_pp, gen_dp)
            for rank, dp_rank in itertools.product(range(gen.world), range(ctx.dp)):
                cases += 1
                want = head_interval(heads, gen.ranks_per_dp, gen.rank_in_dp(rank))
                layers = layer_interval(7, gen_pp, gen.stage(rank))
                seen: list[tuple[int, int]] = []
                for source in sources_of(7, heads, ctx, gen, rank, dp_rank):
                    assert ctx.dp_rank(source.rank) == dp_rank
                    held = head_interval(heads, ctx.ranks_per_dp, ctx.rank_in_dp(source.rank))
                    assert source.heads == held & want
                    if source.has_data:
                        seen += itertools.product(
                            range(source.layers.start, source.layers.stop), range(source.heads.start, source.heads.stop)
                        )
                assert sorted(seen) == list(
                    itertools.product(range(layers.start, layers.stop), range(want.start, want.stop))
                )
    assert cases > 5000


def test_uneven_stages_and_impossible_sizes() -> None:
    assert [len(layer_interval(7, 3, stage)) for stage in range(3)] == [3, 2, 2]
    assert [len(layer_interval(5, 4, stage)) for stage in range(4)] == [2, 1, 1, 1]
    for function, arguments in ((head_interval, (3, 2, 0)), (layer_interval, (2, 3, 0)), (head_interval, (2, 2, 2))):
        with pytest.raises(ValueError):
            function(*arguments)
    with pytest.raises(ValueError, match="must divide"):
        sources_of(4, 6, ParallelLayout(2), ParallelLayout(3), 0)


TOKENS, DIM = 8, 4
CELL = TOKENS * DIM


def _pool(form: PoolForm, data: np.ndarray[Any, Any], layers: Interval, heads: Interval) -> np.ndarray[Any, Any]:
    """Pages of one rank out of ``data[page, layer, kv, head, token x dim]``, flat."""
    own = data[:, layers.start : layers.stop, :, heads.start : heads.stop]
    return np.ascontiguousarray(own if form is PoolForm.BLOCK_MAJOR else own.swapaxes(0, 1)).reshape(-1)


LAYOUTS = [ParallelLayout(tp, pp) for tp in (1, 2, 4) for pp in (1, 2, 4)] + [
    ParallelLayout(tp, pp, attention_dp=True) for tp, pp in ((2, 1), (4, 1), (2, 2))
]


@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("source_form", "target_form"), list(itertools.product(PoolForm, PoolForm)))
def test_bytes_land_where_they_belong(heads: int, source_form: PoolForm, target_form: PoolForm) -> None:
    layers, pages, kv = 5, 3, 2 if heads > 1 else 1
    data = np.random.default_rng(1).integers(0, 255, (pages, layers, kv, heads, CELL), dtype=np.uint8)
    for ctx, gen in itertools.product(LAYOUTS, LAYOUTS):
        for rank in range(gen.world):
            mine_layers = layer_interval(layers, gen.pp, gen.stage(rank))
            mine_heads = head_interval(heads, gen.ranks_per_dp, gen.rank_in_dp(rank))
            expected = _pool(target_form, data, mine_layers, mine_heads)
            target = np.zeros_like(expected)
            written = np.zeros_like(expected)
            for source in sources_of(layers, heads, ctx, gen, rank, ctx.dp - 1):
                if not source.has_data:
                    continue
                their_layers = layer_interval(layers, ctx.pp, ctx.stage(source.rank))
                their_heads = head_interval(heads, ctx.ranks_per_dp, ctx.rank_in_dp(source.rank))
                pool = _pool(source_form, data, their_layers, their_heads)
                for page in range(pages):
                    for piece in page_fragments(
                        range(their_layers.start, their_layers.stop), their_heads,
                        range(mine_layers.start, mine_layers.stop), mine_heads, kv, CELL,
                        source_page=page, target_page=page, source_form=source_form, target_form=target_form,
                        source_pages=pages, target_pages=pages,
                    ):  # fmt: skip
                        span = slice(piece.target, piece.target + piece.nbytes)
                        target[span] = pool[piece.source : piece.source + piece.nbytes]
                        written[span] += 1
            assert (written == 1).all()
            assert (target == expected).all()


def test_like_layouts_need_one_copy_a_block() -> None:
    assert page_fragments((0, 1), Interval(0, 2), (0, 1), Interval(0, 2), 2, 10) == (Fragment(0, 0, 80),)
    assert page_fragments((0, 1, 2), Interval(0, 2), (1, 2), Interval(0, 2), 2, 10) == (Fragment(40, 0, 80),)
    assert len(page_fragments((0, 1), Interval(0, 1), (0, 1), Interval(0, 2), 2, 10)) == 4


@pytest.mark.parametrize(("ctx", "gen"), list(itertools.product((1, 2, 4), repeat=2)))
def test_conv_state_is_cut_section_by_section(ctx: int, gen: int) -> None:
    sections = (32, 8, 8, 64)
    whole = [np.arange(size, dtype=np.uint8) + 64 * index for index, size in enumerate(sections)]

    def part(ranks: int, rank: int) -> np.ndarray[Any, Any]:
        return np.concatenate([s[rank * len(s) // ranks : (rank + 1) * len(s) // ranks] for s in whole])

    for rank in range(gen):
        target = np.zeros_like(part(gen, rank))
        for source in range(ctx):
            for piece in state_fragments(sections, ctx, source, gen, rank):
                target[piece.target : piece.target + piece.nbytes] = part(ctx, source)[
                    piece.source : piece.source + piece.nbytes
                ]
        assert (target == part(gen, rank)).all()
    with pytest.raises(ValueError, match="does not divide"):
        state_fragments((6,), 4, 0, 2, 0)
