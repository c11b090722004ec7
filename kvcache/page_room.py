"""Makes room in the pools: says whether a request can ever fit, and evicts exactly what lacks.

Owned by the manager; sequences, suspension, snapshots and onboarding ask here before they allocate.
"""

from __future__ import annotations

from kvcache.errors import NeverFitsError, OutOfPagesError
from kvcache.radix_evict import evict, evictable_pages
from kvcache.radix_tree import RadixTree

__all__ = ["PageRoom"]


class PageRoom:
    """Room for new pages in the pools of `tree`; `need` is a number of pages by group."""

    __slots__ = ("_pools", "_tree")

    def __init__(self, tree: RadixTree) -> None:
        self._tree = tree
        self._pools = tree.pools

    def check_fits(self, num_tokens: int, total: dict[int, int]) -> None:
        """Raises NeverFitsError when even empty pools could not hold the `total` pages that `num_tokens` take."""
        for group, pages in total.items():
            pool = self._pools[group]
            if pages > pool.num_pages - pool.reserved:
                raise NeverFitsError(
                    f"{num_tokens} tokens need {pages} pages of life cycle {group} and the pool has {pool.budget}: "
                    "shorten the request or raise kv_cache_config.max_tokens"
                )

    def reserve(self, need: dict[int, int]) -> None:
        """See to it that every group has `need` free pages, by evicting exactly what lacks. All or nothing.
        Raises OutOfPagesError without having evicted anything.
        """
        short = False
        for group, count in need.items():
            lack = self._pools[group].lacking(count) if count else 0
            if lack > 0:
                short = True
                if evictable_pages(self._tree, group) < lack:
                    raise OutOfPagesError(
                        f"life cycle {group}: {count} pages wanted, {self._pools[group].free_pages} free and too few "
                        "evictable: try again when another sequence has closed"
                    )
        if not short:
            return
        for group, count in need.items():
            lack = self._pools[group].lacking(count) if count else 0
            if lack > 0 and evict(self._tree, group, lack) < lack:
                raise OutOfPagesError(f"life cycle {group}: eviction freed too little, try again later")

    def try_reserve(self, need: dict[int, int]) -> bool:
        """`reserve` that says no instead of raising."""
        try:
            self.reserve(need)
        except OutOfPagesError:
            return False
        return True
