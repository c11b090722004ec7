"""Gives a manager the lower tiers that its configuration asks for. Called once, by the manager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvcache.config import KvCacheConfig
from kvcache.radix_tree import RadixTree
from kvcache.storage.page_storage import PageStorage
from kvcache.tiers import DiskTier, HostTier, LowerTiers

__all__ = ["set_up_tiers"]


def set_up_tiers(
    config: KvCacheConfig, tree: RadixTree, storage: PageStorage, clock: Callable[[], float]
) -> LowerTiers | None:
    """The tiers, which `tree` knows from now on, or None. Raises what a storage without host memory raises."""
    if not (config.host_cache_size or config.disk_cache_size):
        return None
    storage.page(0)  # lower tiers and suspension copy through host memory: a storage that cannot says so here
    if not config.enable_block_reuse:
        return None
    disk = None
    if config.disk_cache_size and config.disk_cache_path is not None:
        disk = DiskTier(Path(config.disk_cache_path), config.disk_cache_size, clock)
    host = HostTier(config.host_cache_size)
    tree.tiers = LowerTiers(tree.shape, storage, tree.pools, host, disk, tree.events, tree.keys)
    tree.keep_keys = True
    return tree.tiers
