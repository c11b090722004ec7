"""When and how a sequence's computed blocks are published into the tree.

The rules of the policies live here, and nowhere else. Called by `SequenceCache` under the manager's guard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvcache.config import ReusePolicy
from kvcache.drop_handle import DropHandle, plan_drop
from kvcache.live_range import first_live_block
from kvcache.other_holders import lock_for_others
from kvcache.radix_insert import insert
from kvcache.radix_node import Anchor, RadixNode
from kvcache.radix_path import locate
from kvcache.radix_turns import claim_anonymous
from kvcache.sequence_pages import boundary, let_sources_go
from kvcache.snapshot_points import snapshot_points

if TYPE_CHECKING:
    from kvcache.sequence_cache import SequenceCache

__all__ = ["after_append", "end_turn", "publish", "set_points"]


def after_append(sequence: SequenceCache, end_of_prompt: bool) -> None:
    """Publish what the policy publishes after `append_computed`."""
    manager = sequence._manager
    if end_of_prompt and sequence.conversation is not None:
        manager.require_ledger().end_of_prompt(sequence.conversation, sequence.request_id)
    if not manager.config.enable_block_reuse:
        return
    done = sequence.num_computed_tokens
    if sequence.points and (passed := [point for point in sequence.points if point <= done]):
        sequence.points = sequence.points[len(passed) :]
        exact = [done] if passed[-1] == done else []
        for point in exact if sequence._shape.recurrent else passed:
            if point > sequence.num_committed_tokens:
                publish(sequence, point, last=False)
    if end_of_prompt:
        sequence.prompt_end = done
        if not sequence.explicit_points:
            publish(sequence, done)
    elif manager.policy is ReusePolicy.ALL_REUSABLE and not sequence.explicit_points:
        publish(sequence, done - done % sequence._shape.block)


def end_turn(sequence: SequenceCache) -> None:
    """Publish everything and save the conversation's plan."""
    manager = sequence._manager
    conversation = sequence.conversation
    if conversation is not None:
        manager.require_ledger().end_of_prompt(conversation, sequence.request_id)
    if not manager.config.enable_block_reuse or sequence.num_computed_tokens == 0:
        return
    if sequence.sources or sequence.state_sources:
        let_sources_go(sequence)  # nothing was computed beyond the match: it stands in the tree as it is
    publish(sequence, sequence.num_computed_tokens, last=True)
    if conversation is not None:
        manager.require_ledger().save_plan(conversation, lambda: _plan(sequence))


def set_points(sequence: SequenceCache, fork: int) -> None:
    """Decide where the prompt's chunks must end so that a state or a window can be published there. `fork`: tokens
    after which the prompt leaves a cached path that goes on differently (0: it does not).
    """
    manager, shape = sequence._manager, sequence._shape
    if shape.plain or not manager.config.enable_block_reuse:
        return
    points = (
        set(snapshot_points(manager.config.recurrent_state_config, sequence.prompt_tokens))
        if shape.recurrent
        else set()
    )
    sequence.explicit_points = bool(points)
    reused = sequence.num_computed_tokens
    branch = fork - fork % shape.block
    if manager.config.block_reuse_config.enable_branch_snapshot and reused < branch < sequence.prompt_tokens:
        points.add(branch)
    sequence.points = tuple(sorted(point for point in points if point > reused))


def _plan(sequence: SequenceCache) -> DropHandle | None:
    lock = sequence.lock
    if lock is None or lock.node.start + lock.offset != sequence.num_computed_tokens:
        return None
    return plan_drop(sequence._tree, lock.node, lock.offset, sequence.prompt_end)


def publish(sequence: SequenceCache, end: int, *, last: bool = False) -> None:
    """Insert the computed tokens before `end` that are not in the tree yet."""
    tree, block, lock = sequence._tree, sequence._shape.block, sequence.lock
    if (
        sequence._shape.plain
        and lock is not None
        and end == sequence.num_committed_tokens == lock.node.start + lock.offset
    ):
        return  # everything stands there already, and so does the lock
    if end > sequence.num_committed_tokens or (last and end == sequence.num_committed_tokens):
        if sequence.lock is None:
            root = tree.root(sequence.scope)
            sequence.lock = tree.lock(root, 0)
        start_node, start_offset = boundary(sequence)
        first = (start_node.start + start_offset) // block
        rows = sequence.rows[:, first : -(-end // block)]
        if sequence._shape.window_rows and sequence._manager.policy is not ReusePolicy.ALL_REUSABLE:
            rows = rows.copy()
            for row, _, window in sequence._shape.window_rows:
                rows[row, : max(0, first_live_block(end, block, window) - first)] = -1
        tokens = sequence.tokens(first * block, end)
        node, offset, known = insert(tree, start_node, start_offset, tokens, rows, sequence.origins_from(first))
        tree.move_lock(sequence.lock, node, offset)
        sequence.num_committed_tokens = end
        _hand_over(sequence, first, first + known, end // block)
        if len(sequence._manager.pins) or sequence._manager.cleared:
            lock_for_others(sequence, first + known, end)
        if sequence._shape.recurrent:
            _snapshot(sequence, node, end, last)
        if sequence._shape.window_rows:
            _complete_window(sequence, node, offset, end)
        tree.touch(node, sequence.owner)
        if not sequence._shape.plain:
            tree.windows.note(node)
        if sequence.conversation is None:
            _claim(sequence, node, offset)


def _hand_over(sequence: SequenceCache, first: int, fresh: int, last: int) -> None:
    """Blocks `first` .. `last` of a sequence are protected by its lock from now on, not held page by page.

    Those before `fresh` the tree had already, from another request. They are rebased: the sequence goes on with the
    tree's pages and gives its own ones back. It would hold both otherwise, and could wait for ever for a page that it
    has itself.
    """
    if last <= first:
        return
    shape, tree, lock = sequence._shape, sequence._tree, sequence.lock
    assert lock is not None and first == sequence.owned_from
    for row in shape.full_rows:
        pool = tree.pools[shape.attention[row]]
        if fresh > first:
            known = sequence.rows[row, first:fresh]
            pool.release(known)
            known[:] = tree.rows(lock.node, lock.offset)[row, first:fresh]
        pool.hand_over(sequence.rows[row, fresh:last])
    sequence.owned_from = last


def _complete_window(sequence: SequenceCache, node: RadixNode, offset: int, end: int) -> None:
    """Publish copies of window pages that the tree did not take, where a page can be had: another request's longer
    block took this sequence's partial one over with its page, and this sequence's block went on in another way.
    """
    manager, block, place = sequence._manager, sequence._shape.block, Anchor(node, offset)
    for row, group, window in sequence._shape.window_rows:
        pool = manager.pools[group]
        for ordinal in range(first_live_block(end, block, window), -(-end // block)):
            page, found = int(sequence.rows[row, ordinal]), locate(place, ordinal, block)
            if found is None or page < 0:
                continue
            slots = found[0].rows(found[1] + 1)[row, found[1] :]
            if slots[0] >= 0 or not manager.room.try_reserve({group: 1}) or slots[0] >= 0:
                continue
            new = pool.allocate(1)
            manager.copy_page(page, int(new[0]), group)
            pool.coverage[new] = min(block, end - ordinal * block)
            pool.enter_tree(new)
            pool.release(new)
            found[0].rows(found[1] + 1)[row, found[1]] = new[0]


def _snapshot(sequence: SequenceCache, node: RadixNode, end: int, last: bool) -> None:
    """Keep the recurrent state at `end` (skipped when it is there already or when no page can be had)."""
    manager = sequence._manager
    for group in sequence._shape.recurrent:
        if (group, end) in node.states or end != sequence.num_computed_tokens or group not in sequence.state_pages:
            continue
        pool = manager.pools[group]
        if last:
            page = sequence.state_pages[group]
            if pool.in_tree[page]:
                continue
            pool.enter_tree(np.array([page], dtype=np.int32))
            node.states[group, end] = page
            continue
        if not manager.room.try_reserve({group: 1}):
            manager.counters.snapshots_skipped += 1
            continue
        pages = pool.allocate(1)
        manager.copy_page(sequence.state_pages[group], int(pages[0]), group)
        pool.enter_tree(pages)
        pool.release(pages)
        node.states[group, end] = int(pages[0])


def _claim(sequence: SequenceCache, node: RadixNode, offset: int) -> None:
    """A publisher without a conversation counts as one: no conversation's plan drops what it published too."""
    if sequence._manager.policy is not ReusePolicy.PER_CONVERSATION:
        return
    tree, shape = sequence._tree, sequence._shape
    claim_anonymous(node, offset)
    end = node.start + offset
    if not shape.window_rows and not shape.recurrent:
        return
    rows = tree.rows(node, offset)
    for row, group, window in shape.window_rows:
        pages = rows[row, first_live_block(end, shape.block, window) :]
        tree.pools[group].anonymous[pages[pages >= 0]] = True
    for group in shape.recurrent:
        if (group, end) in node.states:
            tree.pools[group].anonymous[node.states[group, end]] = True
