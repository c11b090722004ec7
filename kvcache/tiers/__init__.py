"""Lower tiers: whole blocks that left the device, in host memory and on disk, by chained key."""

from __future__ import annotations

from kvcache.tiers.disk_tier import DiskTier
from kvcache.tiers.host_tier import HostTier
from kvcache.tiers.lower_tiers import LowerTiers
from kvcache.tiers.tier_block import TierBlock

__all__ = ["DiskTier", "HostTier", "LowerTiers", "TierBlock"]
