"""What a configuration asks for: the specs of its workers, and an orchestrator over them. Starts nothing."""

from __future__ import annotations

import math
import os
import secrets
from dataclasses import replace

from cluster.config import ClusterConfig, ServerSectionConfig
from cluster.fleet import Fleet
from cluster.orchestrator import Orchestrator, OrchestratorSettings
from cluster.routing import make_router
from cluster.worker import ContextWorker, GenerationWorker, WorkerRole, WorkerSpec
from transceiver import BackflowMode

__all__ = ["WORKER_CLASS", "cluster_secret", "make_orchestrator", "plan_workers"]

WORKER_CLASS: dict[WorkerRole, type[ContextWorker] | type[GenerationWorker]] = {
    WorkerRole.CONTEXT: ContextWorker,
    WorkerRole.GENERATION: GenerationWorker,
    WorkerRole.AGGREGATED: GenerationWorker,
}


def plan_workers(
    config: ClusterConfig,
    *,
    aggregated: bool,
    secret: bytes,
    reachable_from: str = "127.0.0.1",
    log_level: str | None = None,
    num_nodes: int = 1,
) -> list[WorkerSpec]:
    """A spec for every worker. Aggregated: only the generation section's workers, which then do both halves.

    num_nodes  machines that the workers are spread over
    """
    if aggregated:
        sections = [(WorkerRole.AGGREGATED, config.generation_servers)]
    else:
        sections = [(WorkerRole.CONTEXT, config.context_servers), (WorkerRole.GENERATION, config.generation_servers)]
    specs = [
        _spec(config, role, section, index) for role, section in sections for index in range(section.num_instances)
    ]
    share = 1 / math.ceil(len(specs) / num_nodes)
    return [
        replace(spec, secret=secret, reachable_from=reachable_from, log_level=log_level, memory_share=share)
        for spec in specs
    ]


def _spec(config: ClusterConfig, role: WorkerRole, section: ServerSectionConfig, index: int) -> WorkerSpec:
    engine = section.engine
    return WorkerSpec(
        worker_id=f"{role}-{index}",
        role=role,
        model=config.model,
        kv_cache=section.kv_cache_config,
        transceiver=section.cache_transceiver_config,
        device=engine.device,
        dtype=engine.dtype,
        max_batch_size=engine.max_batch_size,
        max_num_tokens=engine.max_num_tokens,
        max_seq_len=engine.max_seq_len,
        enable_chunked_prefill=engine.enable_chunked_prefill,
    )


def make_orchestrator(config: ClusterConfig, fleet: Fleet) -> Orchestrator:
    """An orchestrator with the configuration's routers and limits over a fleet."""
    tokens_per_block = config.kv_cache_config.tokens_per_block
    context = config.context_servers
    pipelined = context.cache_transceiver_config.enable_pipelined_transfer
    return Orchestrator(
        fleet,
        make_router(config.context_servers.router, tokens_per_block=tokens_per_block),
        make_router(config.generation_servers.router, tokens_per_block=tokens_per_block),
        OrchestratorSettings(
            max_queued_requests=config.server.max_queued_requests,
            max_retries=config.max_retries,
            max_local_prefill_length=config.conditional_disagg_config.max_local_prefill_length,
            tokens_per_block=tokens_per_block,
            prefix_pull=context.cache_transceiver_config.kv_prefix_pull is not BackflowMode.OFF,
            pipeline_from=context.engine.max_num_tokens if pipelined else None,
        ),
    )


def cluster_secret() -> bytes:
    """The secret that the workers of one cluster share: KVFERRY_CLUSTER_SECRET when set, else a new random one."""
    given = os.environ.get("KVFERRY_CLUSTER_SECRET")
    return given.encode() if given else secrets.token_bytes(32)
