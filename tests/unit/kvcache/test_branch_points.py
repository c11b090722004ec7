"""Where a new prompt leaves a cached path, and which states look old: branch snapshots under pressure."""

from __future__ import annotations

import pytest

LIFE_CYCLES = [{"windows": (4,)}, {"recurrent": 1}]


@pytest.mark.parametrize("life_cycles", LIFE_CYCLES)
def test_a_fork_gets_a_state(bench, life_cycles):
    b = bench(enable_branch_snapshot=True, turns=5, **life_cycles)
    b.turn([*range(24)], "one")
    fork = b.start([*range(12), *range(50, 60)], "two")
    assert fork.points == (12,)
    b.compute(fork, [*range(12)])
    b.compute(fork, [*range(50, 60)], end=True)
    fork.end_turn()
    fork.close()
    assert b.probe([*range(12), 99]) == 12


@pytest.mark.parametrize("life_cycles", LIFE_CYCLES)
def test_where_a_path_only_ends_there_is_no_fork(bench, life_cycles):
    """The end of a conversation was evicted, its state with it: coming back is no reason to keep one at the cut."""
    b = bench(enable_branch_snapshot=True, turns=5, pages=12, **life_cycles)
    b.turn([*range(24)], "one")
    b.turn([*range(100, 128)], "two")  # seven blocks: one gives up the end of its path
    again = b.start([*range(30)], "one")
    assert again.num_reused_tokens == 0 < again.matched_tokens < 24
    assert again.points == ()
    again.close()


@pytest.mark.parametrize("life_cycles", LIFE_CYCLES)
def test_what_is_matched_does_not_look_old(bench, life_cycles):
    """No lock protects the other states of a matched path: making room must not begin with them."""
    b = bench(turns=5, **life_cycles)
    b.turn([*range(8)], "one")
    b.turn([*range(16)], "one")
    b.turn([*range(100, 108)], "two")
    windows = b.manager.tree.windows
    before = windows.oldest_use(1)
    again = b.start([*range(20)], "one")
    assert again.num_reused_tokens == 16
    assert windows.oldest_use(1) > before
    again.close()
