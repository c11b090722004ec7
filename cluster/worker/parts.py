"""How a worker is put together from its spec: model, pools, cache manager, scheduler, engine, transceiver.

Built once, in a thread, before the worker takes calls; nothing here runs afterwards.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from cluster.engine import free_memory_bytes, load_runner, make_storage
from cluster.engine_loop import EngineLoop
from cluster.scheduler import Scheduler, SequenceEvent
from cluster.worker.messages import WorkerInfo, WorkerRole
from cluster.worker.pool_size import pool_pages
from cluster.worker.spec import WorkerSpec
from kvcache import KvCacheManager
from kvcache.storage import PageStorage
from transceiver import CacheTransceiver
from transceiver.testing import FaultInjector

__all__ = ["WorkerParts", "build_parts", "own_address"]


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What belongs together. `transceiver` is started, and None on an aggregated worker; `engine` is not started."""

    storage: PageStorage
    manager: KvCacheManager
    engine: EngineLoop
    transceiver: CacheTransceiver | None
    eos_token_ids: frozenset[int]
    max_seq_len: int

    def info(self, spec: WorkerSpec, incarnation: str) -> WorkerInfo:
        """Who the worker is."""
        layout = self.manager.layout
        return WorkerInfo(
            worker_id=spec.worker_id,
            role=spec.role,
            incarnation=incarnation,
            pid=os.getpid(),
            host=socket.gethostname(),
            transceiver_address=self.transceiver.address if self.transceiver else "",
            layout_fingerprint=layout.fingerprint(),
            tokens_per_block=layout.tokens_per_block,
            page_bytes=layout.page_bytes(),
            capacity_tokens=self.storage.num_pages(0) * layout.tokens_per_block,
            max_seq_len=self.max_seq_len,
        )


def build_parts(
    spec: WorkerSpec, deliver: Callable[[list[SequenceEvent]], None], faults: FaultInjector | None
) -> WorkerParts:
    """Load the model, map the pools, open the transceiver. Blocks for as long as that takes.

    `deliver` gets the engine's events, in its thread. Raises what the parts raise; then nothing is left open.
    """
    runner = load_runner(
        spec.model, tokens_per_block=spec.kv_cache.tokens_per_block, device=spec.device, dtype=spec.dtype
    )
    free_bytes = int(free_memory_bytes(spec.device) * spec.memory_share)
    num_pages = pool_pages(spec.kv_cache, runner.layout, free_bytes)
    with contextlib.ExitStack() as undo:
        storage = make_storage(runner, num_pages, shared=spec.transceiver.wants_shared_pools)
        undo.callback(storage.close)
        runner.bind(storage)
        manager = KvCacheManager(runner.layout, spec.kv_cache, storage, worker_id=spec.worker_id)
        scheduler = Scheduler(
            manager,
            max_batch_size=spec.max_batch_size,
            max_num_tokens=spec.max_num_tokens,
            enable_chunked_prefill=spec.enable_chunked_prefill,
            max_suspended_bytes=spec.kv_cache.host_cache_size,
        )
        engine = EngineLoop(runner, manager, scheduler, deliver, name=f"{spec.worker_id}-engine")
        transceiver = None
        if spec.role is not WorkerRole.AGGREGATED:
            transceiver = CacheTransceiver(
                worker_id=spec.worker_id,
                storage=storage,
                config=spec.transceiver,
                secret=spec.secret,
                host=own_address(spec.reachable_from),
                faults=faults,
            )
            transceiver.start()
        undo.pop_all()
    max_seq_len = min(spec.max_seq_len, runner.max_position)
    return WorkerParts(storage, manager, engine, transceiver, runner.eos_token_ids, max_seq_len)


def own_address(peer: str) -> str:
    """This machine's address on the route to `peer`. Sends nothing; blocks while a name is looked up."""
    family = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])
