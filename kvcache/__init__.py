"""KV cache of one worker: block pools, page-run radix tree, conversations and drop handles, storage.

Model-independent: a `KvLayout` describes a model. Knows no network, no Ray, no text.
"""

from __future__ import annotations

from kvcache.block_table import BlockTable
from kvcache.config import BlockReuseConfig, EvictionPolicyName, KvCacheConfig, RecurrentStateConfig, ReusePolicy
from kvcache.errors import (
    ClosedManagerError,
    ClosedSequenceError,
    CorruptedCacheError,
    DropHandleUsedError,
    InvalidArgumentError,
    InvalidSizeError,
    InvalidTokensError,
    KvCacheError,
    NeverFitsError,
    OutOfPagesError,
    PinLimitError,
    SuspendedSequenceError,
    TurnEndedError,
    UnknownLifeCycleError,
)
from kvcache.events import EventKind, KvEvent, StoredBlock, Tier
from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.manager import KvCacheManager
from kvcache.page_pin import PagePin
from kvcache.provenance import BlockOrigin, BlockProvenance, Provenance
from kvcache.reuse_scope import ReuseScope
from kvcache.sequence_cache import SequenceCache
from kvcache.stats import CacheStats, PoolStats, TierStats
from kvcache.storage import BytesPageStorage, MemoryRegion, PageStorage, TorchPageStorage
from kvcache.totals import CacheTotals, LifeCycleTotals, TierTotals

__all__ = [
    "BlockOrigin",
    "BlockProvenance",
    "BlockReuseConfig",
    "BlockTable",
    "BytesPageStorage",
    "CacheStats",
    "CacheTotals",
    "ClosedManagerError",
    "ClosedSequenceError",
    "CorruptedCacheError",
    "DropHandleUsedError",
    "EventKind",
    "EvictionPolicyName",
    "InvalidArgumentError",
    "InvalidSizeError",
    "InvalidTokensError",
    "KvCacheConfig",
    "KvCacheError",
    "KvCacheManager",
    "KvEvent",
    "KvLayout",
    "LayerGroup",
    "LifeCycleKind",
    "LifeCycleTotals",
    "MemoryRegion",
    "NeverFitsError",
    "OutOfPagesError",
    "PagePin",
    "PageStorage",
    "PinLimitError",
    "PoolStats",
    "Provenance",
    "RecurrentStateConfig",
    "ReusePolicy",
    "ReuseScope",
    "SequenceCache",
    "StoredBlock",
    "SuspendedSequenceError",
    "Tier",
    "TierStats",
    "TierTotals",
    "TorchPageStorage",
    "TurnEndedError",
    "UnknownLifeCycleError",
]
