"""Orders in which cached runs are given up."""

from __future__ import annotations

from kvcache.eviction.eviction_order import EvictionOrder
from kvcache.eviction.lru_order import LruOrder

__all__ = ["EvictionOrder", "LruOrder"]
