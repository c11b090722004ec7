"""Configuration of a cache transceiver: what may move, how fast it must end, and every bound a peer could exhaust.

Nested into the cluster's configuration tree as `cache_transceiver_config`. Values only; it must import no transport.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["BackflowMode", "CacheTransceiverConfig", "TransceiverBackend"]

PositiveInt = Annotated[int, Field(ge=1)]


class TransceiverBackend(StrEnum):
    """Transport family."""

    UCX = "ucx"
    NIXL = "nixl"
    INPROC = "inproc"


class BackflowMode(StrEnum):
    """When a context worker takes what only another worker has: an answer's blocks, a prompt's prefix."""

    AUTO = "auto"
    EAGER = "eager"
    OFF = "off"


class CacheTransceiverConfig(BaseModel):
    """How KV blocks travel between workers. Unknown keys are refused; the value is immutable."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)

    backend: Annotated[TransceiverBackend, Field(strict=False)] = TransceiverBackend.UCX
    """Transport: `ucx` between processes and hosts, `nixl` the same over NVIDIA NIXL (needs the extra `nixl`), `inproc`
    inside one process (tests, single-process runs)."""
    kv_transfer_timeout_ms: PositiveInt = 60_000
    """Longest time one transfer may take, from its request to its end (milliseconds). It cannot be switched off."""
    verify: bool = True
    """Send a digest per block and check it before the block is used; a mismatch is recomputed."""
    kv_backflow: Annotated[BackflowMode, Field(strict=False)] = BackflowMode.AUTO
    """Return of the answer's blocks to the context side: when cheaper (`auto`), always (`eager`), never (`off`)."""
    kv_prefix_pull: Annotated[BackflowMode, Field(strict=False)] = BackflowMode.AUTO
    """Pull of a prompt's prefix from whichever worker holds it, before prefill: as for `kv_backflow`."""
    enable_pipelined_transfer: bool = False
    """Send the blocks of a prefill chunk while the next one computes (block reuse off or `all_reusable` only)."""
    ucx_tls: str = "tcp,cma"
    """UCX transports that may be used, as in UCX_TLS."""
    ucx_options: dict[str, str] = Field(default_factory=dict)
    """Further UCX options by name without the UCX_ prefix; they win over the built-in ones."""
    nixl_options: dict[str, str] = Field(default_factory=dict)
    """Options of NIXL's UCX backend by name, for example `ucx_devices`."""
    max_segment_bytes: PositiveInt = 64 << 20
    """Size of one batch of reads (bytes). Between hosts at most 8 MiB, with digests 1 MiB: the step in which a transfer
    goes on and is cancelled there."""
    max_segments_in_flight: PositiveInt = 8
    """Batches of reads under way per transfer."""
    shared_pools: bool = True
    """Host pools lie in shared memory, and those of peers on the same host are mapped and copied from (`ucx/shm`):
    faster than `ucx/cma`, and allowed where Yama forbids that. Off: private memory. Needs `cma` in `ucx_tls`."""
    copy_threads: Annotated[int, Field(ge=1, le=16)] = 2
    """Threads that copy from processes of the same host (`ucx/shm`, `ucx/cma`), the transceiver's own one included."""
    max_publications: PositiveInt = 4096
    """Grants open at once on the holding side; further ones are refused."""
    max_pulls: PositiveInt = 1024
    """Pulls open at once on the receiving side; further ones are refused."""
    max_blocks_per_pull: PositiveInt = 1 << 20
    """Blocks one request may name."""
    max_links: PositiveInt = 1024
    """Peers connected to this worker at once."""
    connect_timeout_ms: PositiveInt = 5_000
    """Longest time for connecting and the handshake (milliseconds)."""
    refusal_ttl_ms: PositiveInt = 1_000
    """How long an address that refused this side (secret, layout) is not asked again (milliseconds)."""
    early_request_ttl_ms: PositiveInt = 120_000
    """How long a request that arrives before its publication is kept (milliseconds)."""
    drain_timeout_ms: PositiveInt = 2_000
    """After a time-out or cancel: how long reads under way may still run before the link is cut (milliseconds)."""
    perf_csv: str | None = None
    """File that gets one line per transfer (a header once); none by default."""

    @property
    def allows_cma(self) -> bool:
        """`ucx_tls` lets this process's memory be read by processes of its host."""
        return self.ucx_tls == "all" or "cma" in self.ucx_tls.split(",")

    @property
    def wants_shared_pools(self) -> bool:
        """Host pools of this worker are best made with ``shared=True``."""
        return self.backend == "ucx" and self.shared_pools and self.allows_cma
