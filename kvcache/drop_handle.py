"""The plan of what to give up when a turn falls out of a conversation's retained ones.

Made at the end of a turn, for all required pages or not at all; used once. It refers to pages weakly (page and
generation) and pins nothing: whatever was evicted meanwhile is skipped.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.errors import DropHandleUsedError
from kvcache.live_range import first_live_block
from kvcache.radix_evict import prune
from kvcache.radix_node import Anchor, RadixNode
from kvcache.radix_path import locate
from kvcache.radix_tree import RadixTree
from kvcache.radix_turns import forget_turn, retain

__all__ = ["DropHandle", "PlannedPage", "plan_drop"]


@dataclass(frozen=True, slots=True)
class PlannedPage:
    """A window page of block `ordinal`, or the snapshot at `position` (ordinal -1)."""

    group: int
    ordinal: int
    position: int
    page: int
    generation: int

    @property
    def page_key(self) -> tuple[int, int]:
        """Identifies the page."""
        return self.group, self.page


class DropHandle:
    """One retained turn: its endpoint in the tree and the planned pages, each counted in `plan_count`."""

    __slots__ = ("_tree", "endpoint", "num_tokens", "pages", "used")

    def __init__(self, tree: RadixTree, endpoint: Anchor, pages: tuple[PlannedPage, ...]) -> None:
        self._tree = tree
        self.endpoint = endpoint
        self.num_tokens = endpoint.node.start + endpoint.offset
        self.pages = pages
        self.used = False
        for planned in pages:
            tree.pools[planned.group].plan_count[planned.page] += 1

    def drop(self) -> int:
        """Give the turn up: pages that no plan, no holder and no anonymous publisher needs become free at once, and
        full-attention blocks that are then superseded go first at the next eviction. Returns the pages freed.
        Raises DropHandleUsedError the second time.
        """
        if self.used:
            raise DropHandleUsedError(
                "this drop handle has already been dropped: plan a new one at the next turn's end"
            )
        self.used = True
        if not self.pages:
            forget_turn(self._tree, self.endpoint)
            return 0
        freed = 0
        touched: list[tuple[RadixNode, int]] = []
        for planned in self.pages:
            pool = self._tree.pools[planned.group]
            page = pool.planned_page(planned.page, planned.generation)
            if page < 0:
                continue
            pool.plan_count[page] -= 1
            if pool.plan_count[page] > 0 or pool.anonymous[page]:
                continue
            if pool.refs[page] > 0:
                continue  # somebody reads it: it is ordinary cached content from now on
            node = self._take_out(planned, page)
            if node is not None:
                freed += 1
                self._tree.evictions.dropped_turn_pages[planned.group] += 1
                touched.append((node, planned.group))
        forget_turn(self._tree, self.endpoint)
        for node, group in touched:
            if node.alive:
                prune(self._tree, node, group)
        return freed

    def _take_out(self, planned: PlannedPage, page: int) -> RadixNode | None:
        if planned.ordinal < 0:
            node: RadixNode | None = self.endpoint.node
            while node is not None and node.states.get((planned.group, planned.position)) != page:
                node = node.parent
            if node is not None:
                self._tree.drop_state(node, (planned.group, planned.position))
            return node
        place = locate(self.endpoint, planned.ordinal, self._tree.shape.block)
        if place is None:
            return None
        node, index = place
        row = node.rows(index + 1)[self._tree.shape.attention.index(planned.group)]
        if row[index] != page:
            return None
        self._tree.pools[planned.group].leave_tree(row[index : index + 1].copy())
        row[index] = -1
        return node


def plan_drop(tree: RadixTree, node: RadixNode, offset: int, prompt_end: int = 0) -> DropHandle | None:
    """Plan for a turn that ends `offset` tokens into `node`, or None when a page it would need is missing.

    What was kept at `prompt_end`, earlier in the same turn, is given up with it (as far as it is still there).
    """
    end = node.start + offset
    if end == 0:
        return None
    if tree.shape.plain:
        return DropHandle(tree, retain(tree, node, offset), ())
    endpoint = Anchor(node, offset)
    required = _pages_at(tree, endpoint, end)
    if any(planned is None for planned in required):
        return None
    earlier = _pages_at(tree, endpoint, prompt_end) if 0 < prompt_end < end else []
    pages = {planned.page_key: planned for planned in (*required, *earlier) if planned is not None}
    return DropHandle(tree, retain(tree, node, offset), tuple(pages.values()))


def _pages_at(tree: RadixTree, endpoint: Anchor, end: int) -> list[PlannedPage | None]:
    """Window pages and snapshots that a match of `end` tokens on the endpoint's path needs; None for a missing one."""
    shape = tree.shape
    pages: list[PlannedPage | None] = []
    for row, group, window in shape.window_rows:
        pool = tree.pools[group]
        for ordinal in range(first_live_block(end, shape.block, window), -(-end // shape.block)):
            place = locate(endpoint, ordinal, shape.block)
            page = -1 if place is None else int(place[0].rows(place[1] + 1)[row, place[1]])
            if page < 0 or pool.coverage[page] < min(shape.block, end - ordinal * shape.block):
                pages.append(None)
            else:
                pages.append(PlannedPage(group, ordinal, -1, page, int(pool.generations[page])))
    for group in shape.recurrent:
        node: RadixNode | None = endpoint.node
        while node is not None and (group, end) not in node.states:
            node = node.parent
        state = None if node is None else node.states[group, end]
        pages.append(
            None if state is None else PlannedPage(group, -1, end, state, int(tree.pools[group].generations[state]))
        )
    return pages
