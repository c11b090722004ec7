"""Everything a worker needs to start, as one value that the controller hands to it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.worker.messages import WorkerRole
from kvcache import KvCacheConfig
from transceiver import CacheTransceiverConfig

__all__ = ["WorkerSpec"]


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """How to build one worker.

    max_seq_len     tokens of the longest sequence (prompt and answer)
    secret          shared by the workers of one cluster; proves membership in the transceiver's handshake
    reachable_from  address of the orchestrator's node; the worker tells its peers the address that it has on the route
                    to it (loopback for loopback)
    memory_share    share of the device's free memory that this worker may count on: workers that share a node's memory
                    do not promise it twice
    log_level       what the worker's process logs to stderr; None leaves logging as it is
    """

    worker_id: str
    role: WorkerRole
    model: str
    kv_cache: KvCacheConfig
    transceiver: CacheTransceiverConfig
    secret: bytes = b""
    device: str = "auto"
    dtype: str = "auto"
    max_batch_size: int = 16
    max_num_tokens: int = 2048
    max_seq_len: int = 8192
    enable_chunked_prefill: bool = True
    reachable_from: str = "127.0.0.1"
    memory_share: float = 1.0
    log_level: str | None = None
