"""What eviction, pruning and dropped turns give up, page by page: counts, order, and what they leave alone."""

from __future__ import annotations

import pytest

from kvcache.radix_evict import evict, evict_all, evictable_pages, prune


def kept(b, tokens, row: int = 1) -> list[int]:
    """Indices of the blocks of a cached prompt whose page of `row` is in the tree."""
    root = next(iter(b.manager.tree.roots.values()))
    found, rest = [], list(tokens)
    node = root
    while rest:
        node = next(n for n in node.children.values() if n.tokens().tolist() == rest[: n.length])
        found += (node.rows(node.num_blocks(4))[row] >= 0).tolist()
        rest = rest[node.length :]
    return [index for index, there in enumerate(found) if there]


FIRST, SECOND = range(24), range(100, 124)


def test_windows_go_oldest_run_first_and_in_it_oldest_position_first(bench):
    b = bench(windows=(8,), policy="all_reusable")
    b.turn(FIRST)
    b.turn(SECOND)
    tree = b.manager.tree
    assert (evictable_pages(tree, 1), b.cached(1)) == (12, 12)
    assert evict(tree, 1, 2) == 2
    assert (kept(b, FIRST), kept(b, SECOND)) == ([2, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert [b.probe([*FIRST[:end], 999]) for end in (8, 16, 24)] == [0, 16, 24]
    assert evict(tree, 1, 1) == 1
    assert kept(b, FIRST) == [3, 4, 5]
    assert b.manager.stats().life_cycles[1].evictions["window"] == 3
    assert b.cached(0) == 12  # full attention stays while some window is there
    b.manager.check_integrity()
    assert evict(tree, 1, 4) == 4  # the rest of the first run, with it the run itself, and one of the second
    assert kept(b, SECOND) == [1, 2, 3, 4, 5]
    assert (b.cached(0), b.cached(1), evictable_pages(tree, 1)) == (6, 5, 5)
    evictions = b.manager.stats().evictions
    assert (evictions["window"], evictions["pruned"], evictions["capacity"]) == (7, 6, 0)
    b.manager.check_integrity()
    assert evict(tree, 1, 100) == 5
    assert (b.cached(0), b.cached(1), tree.roots) == (0, 0, {})
    assert b.manager.stats().evictions["pruned"] == 12


def test_a_used_run_is_younger(bench):
    b = bench(windows=(8,), policy="all_reusable")
    b.turn(FIRST)
    b.turn(SECOND)
    b.turn([*FIRST, 50])
    assert evict(b.manager.tree, 1, 3) == 3
    assert kept(b, SECOND) == [3, 4, 5]


def test_window_pages_that_somebody_reads_stay_and_go_later(bench):
    b = bench(windows=(8,), policy="all_reusable")
    b.turn(FIRST)
    b.turn(SECOND)
    reader = b.start([*FIRST, 999])  # holds the window's last two blocks
    tree = b.manager.tree
    assert evictable_pages(tree, 1) == 10
    assert evict(tree, 1, 100) == 10
    assert kept(b, FIRST) == [4, 5]
    b.check(reader, copied=False)
    assert evict(tree, 1, 1) == 0
    reader.close()
    assert evictable_pages(tree, 1) == 2
    assert evict(tree, 1, 1) == 1
    assert evict(tree, 1, 5) == 1


def test_a_held_run_does_not_stop_the_search(bench):
    b = bench(windows=(8,), policy="per_request")
    b.turn(FIRST)
    reader = b.start([*FIRST, 999])
    b.turn(SECOND)
    tree = b.manager.tree
    assert evict(tree, 1, 2) == 2
    assert kept(b, FIRST) == [4, 5]
    reader.close()
    assert evict(tree, 1, 2) == 2  # it is considered again
    assert b.cached(0) == 0


def test_runs_are_pruned_to_the_last_block_that_a_window_makes_useful(bench):
    b = bench(windows=(4,), policy="all_reusable")
    b.turn(FIRST)
    tree = b.manager.tree
    (run,) = (node for node in tree.nodes() if node.parent is not None)
    pages = run.rows(6)[1]
    gone = pages[3:].copy()
    pages[3:] = -1  # as a dropped turn leaves it
    b.manager.pools[1].leave_tree(gone)
    prune(tree, run, 1)
    assert (run.length, b.cached(0), b.cached(1)) == (12, 3, 3)
    assert b.manager.stats().evictions["pruned"] == 3
    b.manager.check_integrity()


def test_snapshots_go_oldest_position_first_and_only_of_the_life_cycle_that_lacks(bench):
    b = bench(recurrent=2, turns=5)
    for end in (8, 16, 24):
        b.turn(range(end), "c")
    tree = b.manager.tree
    assert evict(tree, 1, 1) == 1
    assert [sorted(at for group, at in positions(b) if group == g) for g in (1, 2)] == [[16, 24], [8, 16, 24]]
    assert [b.probe([*range(end), 999]) for end in (8, 16, 24)] == [0, 16, 24]
    reader = b.start([*range(16), 999], "d")
    assert evictable_pages(tree, 1) == 1
    assert evict(tree, 1, 5) == 1
    reader.close()
    assert evict(tree, 1, 5) == 1
    assert [sorted(at for group, at in positions(b) if group == g) for g in (1, 2)] == [[], []]
    assert b.cached(0) == 0  # without any state of life cycle 1 no block is of use


def positions(b) -> list[tuple[int, int]]:
    return [at for node in b.manager.tree.nodes() for at in node.states]


def test_a_run_is_pruned_to_its_last_snapshot(bench):
    b = bench(recurrent=1, turns=1)
    b.turn(range(10), "c")
    b.turn(range(22), "d")
    b.manager.end_conversation("d")  # the snapshot at 22 goes: blocks behind the one at 10 are of no use
    assert (b.cached(0), positions(b)) == (3, [(1, 10)])
    assert b.manager.stats().evictions["pruned"] == 3


def test_blocks_under_locks_count_once(bench):
    b = bench(policy="per_request")
    b.turn(range(32))
    b.turn([*range(16), *range(50, 58)])
    b.turn(range(200, 208))
    tree = b.manager.tree
    assert evictable_pages(tree, 0) == 8 + 2 + 2
    readers = [b.start([*prompt, 999]) for prompt in (range(20), range(32), [*range(16), *range(50, 54)], range(20))]
    assert evictable_pages(tree, 0) == 12 - 8 - 1
    readers.pop(1).close()
    assert evictable_pages(tree, 0) == 12 - 5 - 1
    assert evict(tree, 0, 100) == 6
    assert b.cached(0) == 6
    for reader in readers:
        reader.close()
    assert evict(tree, 0, 4) == 4
    assert b.cached(0) == 2


def test_tails_are_taken_exactly(bench):
    b = bench(policy="per_request")
    b.turn(range(32))
    b.turn(range(100, 132))
    tree = b.manager.tree
    assert evict(tree, 0, 3) == 3
    assert [b.probe([*range(first, first + 32), 999]) for first in (0, 100)] == [20, 32]
    assert evict(tree, 0, 7) == 7
    assert [b.probe([*range(first, first + 32), 999]) for first in (0, 100)] == [0, 24]
    assert b.manager.stats().evicted_blocks == 10


def test_superseded_blocks_are_counted_apart(bench):
    b = bench(turns=1)
    for first in (0, 100, 200):
        b.turn(range(first, first + 16), "c")
    tree = b.manager.tree
    assert evict(tree, 0, 3) == 3
    assert evict(tree, 0, 2) == 2
    assert evict(tree, 0, 5) == 5
    assert b.manager.stats().evictions["superseded"] == 8
    assert b.manager.stats().evictions["capacity"] == 2


def test_everything_that_is_not_locked(bench):
    b = bench(windows=(8,), policy="per_request")
    b.turn(range(32))
    b.turn([*range(16), *range(50, 58)])
    reader = b.start([*range(16), *range(50, 58), 1])
    evict_all(b.manager.tree)
    assert b.cached(0) == 6
    assert b.manager.stats().evictions["capacity"] == 0
    b.manager.check_integrity()
    reader.close()
    assert evict(b.manager.tree, 0, 2) == 2  # it is offered to the order again
    evict_all(b.manager.tree)
    assert b.cached(0) == 0


# dropped turns


@pytest.mark.parametrize("kind", [{"windows": (8,)}, {"recurrent": 1}, {"windows": (8,), "recurrent": 2}])
def test_a_dropped_turn_frees_what_its_prompts_end_and_its_own_end_needed(bench, kind):
    b = bench(turns=1, **kind)
    b.turn(range(12), "c", range(50, 69))  # ends at 30: other blocks of the window, another state
    (handle,) = b.manager.ledger.get("c").turns
    before = [b.cached(group) for group in range(len(b.layout.groups))]
    assert handle.num_tokens == 30
    planned = len(handle.pages)
    b.turn(range(200, 204), "c")
    after = [b.cached(group) for group in range(len(b.layout.groups))]
    windows = 1 if "windows" in kind else 0
    assert after == [1] * len(before)  # the new turn's only block, window and states: nothing of the old one is left
    assert planned == sum(before[1:])
    assert b.manager.stats().evictions["dropped_turn"] == planned
    assert windows == 0 or before[1] == 2 + 3


def test_drop_returns_the_pages_it_freed(bench):
    b = bench(windows=(8,), turns=5)
    for end in (12, 24, 36):
        b.turn(range(end), "c")
    turns = b.manager.ledger.get("c").turns
    assert [turns.popleft().drop() for _ in range(3)] == [2, 2, 2]
    assert b.manager.stats().life_cycles[1].evictions["dropped_turn"] == 6


def test_a_drop_without_pages_frees_none(bench):
    b = bench(turns=5)
    b.turn(range(12), "c")
    assert b.manager.ledger.get("c").turns.popleft().drop() == 0


def test_a_drop_goes_on_behind_a_page_that_was_evicted(bench):
    b = bench(windows=(12,), turns=5)
    b.turn(range(12), "c")
    assert evict(b.manager.tree, 1, 1) == 1
    assert b.manager.ledger.get("c").turns.popleft().drop() == 2
    assert b.cached(1) == 0


def test_a_drop_finds_a_state_and_a_window_in_a_run_above(bench):
    """Another branch split the run of the turn since, and the turn's own answer went on below the split."""
    b = bench(windows=(12,), recurrent=1, turns=1)
    b.turn(range(16), "c")
    b.turn([*range(12), 70, 71], "other")
    b.turn([*range(8), 80, 81], "third")
    (handle,) = b.manager.ledger.get("c").turns
    assert handle.endpoint.node.start > 0
    before = b.cached(1)
    assert handle.drop() > 0
    b.manager.ledger.get("c").turns.clear()
    b.manager.check_integrity()
    assert b.cached(1) < before
    assert b.probe([*range(16), 999]) == 0


def test_a_turn_of_one_token_is_retained(bench):
    b = bench(windows=(8,), recurrent=1, turns=2)
    b.turn([5], "c")
    assert [turn.num_tokens for turn in b.manager.ledger.get("c").turns] == [1]
    assert b.probe([5, 6]) == 1


def test_an_ended_turn_supersedes_up_to_the_next_one_that_is_retained(bench):
    """Up the path as far as nothing else stands: other ends, anonymous parts and live branches stop it."""
    b = bench(turns=1)
    b.turn(range(8), "a")
    b.turn(range(16), "b")
    b.turn([*range(12), *range(60, 64)], None)
    b.turn(range(24), "c")
    assert superseded(b) == []
    b.manager.end_conversation("c")
    assert superseded(b) == [(16, 24)]
    b.manager.end_conversation("b")
    assert superseded(b) == [(12, 16), (16, 24)]
    b.manager.end_conversation("a")
    assert superseded(b) == [(12, 16), (16, 24)]  # the anonymous prompt needs the blocks before
    assert b.manager.stats().superseded_blocks == 3
    b.turn(range(24), "d")
    assert superseded(b) == []


def superseded(b) -> list[tuple[int, int]]:
    return sorted((node.start, node.end) for node in b.manager.tree.nodes() if node.superseded)
