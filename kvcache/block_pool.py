"""The pages of one life cycle: a free list on an int32 stack and a few numbers a page, no object a block.

Called by the radix tree and the sequences. It never decides what to evict and never touches page contents.
A page is free, or in the tree, or held (`refs` > 0), or in the tree and held.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import CorruptedCacheError, OutOfPagesError

__all__ = ["BlockPool"]

Pages = NDArray[np.int32]


class BlockPool:
    """Bookkeeping of `num_pages` pages. `generations` is the storage's array: raised each time a page is given out.
    `least_unused` is the fewest unused pages there have been.
    """

    def __init__(self, num_pages: int, generations: NDArray[np.uint64]) -> None:
        self.num_pages = num_pages
        self.generations = generations
        generations += 0  # touch the memory now, not page by page in the first requests
        self._stack: Pages = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self._top = num_pages
        self.refs = np.full(num_pages, 0, dtype=np.int32)  # `full` touches it too
        self.in_tree = np.full(num_pages, False, dtype=np.bool_)
        self.plan_count = np.zeros(num_pages, dtype=np.int32)
        self.anonymous = np.zeros(num_pages, dtype=np.bool_)
        self.coverage = np.zeros(num_pages, dtype=np.int32)
        self.tree_pages = 0
        self.least_unused = num_pages
        self.reserved = 0
        self._moved_plans: dict[tuple[int, int], tuple[int, int, int]] = {}

    @property
    def budget(self) -> int:
        """Pages that may be in use; the others of `num_pages` must stay unused."""
        return self.num_pages - self.reserved

    @property
    def unused_pages(self) -> int:
        """Pages that nobody uses, those beyond the budget included."""
        return self._top

    @property
    def free_pages(self) -> int:
        """Pages that can be given out now."""
        return max(0, self._top - self.reserved)

    def lacking(self, count: int) -> int:
        """How many pages must be given up before `count` can be given out (0 or less: none)."""
        return count + self.reserved - self._top

    def free_list(self) -> Pages:
        """The free pages (a view, for checks)."""
        return self._stack[: self._top]

    def allocate(self, count: int) -> Pages:
        """Give out `count` pages, held once each, adjacent where possible. Raises OutOfPagesError."""
        top = self._top - count
        if top < self.reserved and count:
            raise OutOfPagesError(f"{count} pages wanted and {self.free_pages} free: wait for a sequence to close")
        pages = self._stack[top : self._top][::-1].copy()
        self._top = top
        if top < self.least_unused:
            self.least_unused = top
        index = pages.astype(np.intp)  # numpy is several times slower with int32 indices
        self.generations[index] += 1
        self.refs[index] = 1
        return pages

    def hold(self, pages: Pages) -> None:
        """Add one holder to each of the (distinct) pages."""
        self.refs[pages.astype(np.intp)] += 1

    def release(self, pages: Pages) -> None:
        """Take one holder away from each of the (distinct) pages; a page nobody needs becomes free."""
        if not len(pages):
            return
        index = pages.astype(np.intp)
        left = self.refs[index] - 1
        if int(np.minimum.reduce(left)) < 0:
            raise CorruptedCacheError("a page was released more often than it was held")
        self.refs[index] = left
        self._free(pages[(left == 0) & ~self.in_tree[index]])

    def hand_over(self, pages: Pages) -> None:
        """Take one holder away from each of the (distinct) pages, which are in the tree and stay there."""
        self.refs[pages.astype(np.intp)] -= 1

    def enter_tree(self, pages: Pages) -> None:
        """The tree takes the (distinct) pages over, beside whoever holds them."""
        self.in_tree[pages.astype(np.intp)] = True
        self.tree_pages += len(pages)

    def leave_tree(self, pages: Pages, *, keep: bool = False) -> int:
        """The tree gives the (distinct) pages up, or only for a moment (`keep`). Returns how many became free."""
        index = pages.astype(np.intp)
        self.in_tree[index] = False
        self.tree_pages -= len(pages)
        if keep:
            return 0
        self.plan_count[index] = 0
        self.anonymous[index] = False
        gone = pages[self.refs[index] == 0]
        self._free(gone)
        return len(gone)

    def replace_in_tree(self, old: int, new: int) -> None:
        """`new`, in the tree already, takes the place of `old`, which leaves; plans on `old` count on `new` now."""
        count = int(self.plan_count[old])
        if count:
            self._moved_plans[old, int(self.generations[old])] = (new, int(self.generations[new]), count)
            self.plan_count[new] += count
        self.anonymous[new] |= self.anonymous[old]
        self.leave_tree(np.array([old], dtype=np.int32))

    def planned_page(self, page: int, generation: int) -> int:
        """The page that now stands for a planned one (call once a plan), or -1 when it is gone."""
        while (page, generation) in self._moved_plans:
            new, new_generation, left = self._moved_plans.pop((page, generation))
            if left > 1:
                self._moved_plans[page, generation] = (new, new_generation, left - 1)
            page, generation = new, new_generation
        return page if self.in_tree[page] and int(self.generations[page]) == generation else -1

    def planned_page_now(self, page: int, generation: int) -> int:
        """As `planned_page`, without using the plan up (for checks)."""
        while (page, generation) in self._moved_plans:
            page, generation, _ = self._moved_plans[page, generation]
        return page if self.in_tree[page] and int(self.generations[page]) == generation else -1

    def _free(self, pages: Pages) -> None:
        count = len(pages)
        if count:
            self._stack[self._top : self._top + count] = pages[::-1]
            self._top += count
