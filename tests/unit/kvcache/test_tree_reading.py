"""What is read upward from a place in the tree, and the queues of runs with window pages: edges that mutants showed."""

from __future__ import annotations

import numpy as np

from kvcache import BlockOrigin
from kvcache.radix_evict import evict
from kvcache.radix_node import Anchor
from kvcache.radix_path import locate, path, path_rows


def leaf(b):
    node = next(iter(b.manager.tree.roots.values()))
    while node.children:
        node = next(iter(node.children.values()))
    return node


def test_rows_of_a_path_end_where_it_ends(bench):
    b = bench(policy="per_request")
    b.turn(range(40))
    b.turn(range(44))
    node = leaf(b)
    assert path_rows(node, 41, 4).shape == (1, 11)
    assert path_rows(node, 40, 4).shape == (1, 10)


def test_a_block_behind_the_anchor_is_not_located(bench):
    b = bench(policy="per_request")
    b.turn(range(12))
    b.turn([*range(8), 50, 51])
    node = next(n for n in b.manager.tree.nodes() if n.tokens().tolist() == [50, 51])
    front = node.parent
    assert [n.start for n in path(node)] == [8, 0, 0]
    assert locate(Anchor(node, 2), 2, 4) == (node, 0)
    assert locate(Anchor(node, 2), 3, 4) is None
    assert [locate(Anchor(front, 4), ordinal, 4) for ordinal in (0, 1, 2)] == [(front, 0), None, None]
    assert locate(Anchor(node, 2), 1, 4) == (front, 1)


def test_provenance_ends_where_the_match_ends(bench):
    b = bench(policy="per_request")
    cache = b.start(range(16))
    for start, origin in ((0, BlockOrigin.CTX_TO_GEN), (8, BlockOrigin.COMPUTED)):
        tokens = np.arange(start, start + 8, dtype=np.int32)
        cache.resize(start + 8)
        b.model.compute(cache, tokens)
        cache.append_computed(tokens, end_of_prompt=start == 8, origin=origin)
    cache.close()

    def found(end: int) -> list[tuple[int, int, BlockOrigin]]:
        asked = np.array([*range(end), 99], dtype=np.int32)
        return [(one.first, one.last, one.provenance.origin) for one in b.manager.provenance(asked)]

    first, second = BlockOrigin.CTX_TO_GEN, BlockOrigin.COMPUTED
    assert found(4) == [(0, 1, first)]
    assert found(8) == [(0, 2, first)]
    assert found(12) == [(0, 2, first), (2, 3, second)]
    assert found(16) == [(0, 2, first), (2, 4, second)]


def test_page_0_is_a_page_as_any_other(bench):
    b = bench(windows=(8,), policy="all_reusable")
    b.turn(range(4))
    assert leaf(b).rows(1).tolist() == [[0], [0]]
    assert evict(b.manager.tree, 1, 1) == 1


def test_queues_do_not_grow_for_ever(bench):
    b = bench(windows=(8,), policy="all_reusable", pages=16)
    windows = b.manager.tree.windows
    b.turn(range(8))
    b.turn(range(100, 108))
    entries, compacted = windows._queues[1], 0
    for _ in range(50):
        windows._compact_at = 10
        b.turn([*range(8), 50])
        compacted += windows._compact_at == 4096  # never below what is cheap
        assert len(entries) <= 12
    assert compacted > 5
    windows._compact(entries)
    assert len({id(entry[2]) for entry in entries}) == len(entries)
    first = windows.pop(1)
    assert first is not None and first.tokens().tolist() == list(range(100, 108))  # the least recently used comes first
