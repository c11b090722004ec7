"""What moved in and out of one lower tier since the start."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.tiers.tier_block import TierBlock

__all__ = ["TierTraffic"]


@dataclass(slots=True)
class TierTraffic:
    """Counters as `kvcache.totals.TierTotals` shows them; `LowerTiers` writes them."""

    stored_blocks: int = 0
    stored_bytes: int = 0
    onboarded_blocks: int = 0
    onboarded_bytes: int = 0
    lifted_blocks: int = 0
    dropped_blocks: int = 0
    corrupt_blocks: int = 0

    def store(self, block: TierBlock) -> None:
        """A block came into the tier."""
        self.stored_blocks += 1
        self.stored_bytes += block.nbytes
