"""Orders in which cached runs are given up."""

from __future__ import annotations

from kvcache.eviction.eviction_order import EvictionOrder
from kvcache.eviction.lru_order import LruOrder
from kvcache.eviction.return_hazard import ReturnHazard
from kvcache.eviction.turn_aware_order import TurnAwareOrder

__all__ = ["EvictionOrder", "LruOrder", "ReturnHazard", "TurnAwareOrder"]
