"""A scrape of a serving cluster, read back by Prometheus' own parser."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from cluster.config import ClusterConfig
from cluster.local_cluster import local_cluster
from cluster.metrics import metrics_text
from cluster.request import SamplingParams
from cluster.serve_request import ServeRequest
from tests.integration.cluster.quiet import quiet


async def test_life_cycles_tiers_and_reasons_are_told_apart(tmp_path: Path):
    config = ClusterConfig.model_validate(
        {
            "model": "hash",
            "engine": {"max_seq_len": 256, "max_num_tokens": 64},
            "kv_cache_config": {
                "tokens_per_block": 16,
                "max_tokens": 256,
                "host_cache_size": 8 << 10,
                "disk_cache_size": 1 << 20,
                "disk_cache_path": str(tmp_path),
            },
            "cache_transceiver_config": {"backend": "inproc", "kv_backflow": "eager"},
        }
    )
    async with local_cluster(config) as o:
        for seed in (1, 2, 3, 1):
            tokens = np.random.default_rng(seed).integers(0, 256, 150).astype(np.int32)
            request = ServeRequest(f"m{seed}-{o.in_flight}", tokens, SamplingParams(max_tokens=8, ignore_eos=True))
            async for _ in await o.serve(request):
                pass
            await o.turn_record(request.request_id, 5)
        await quiet(o, 10)
        text = (await metrics_text(o, model_name="hash")).decode()
        samples = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        (stats,) = [s.cache for s in await o.stats() if s.info.worker_id == "context-0"]
    who = {"role": "context", "worker": "context-0"}

    def value(name: str, **labels: str) -> float:
        return samples[(f"kvferry_{name}", *sorted({**who, **labels}.items()))]

    (cycle,) = stats.life_cycles
    kind = f"{cycle.group}:{cycle.kind}"
    for outcome in ("reused_full", "reused_partial", "missed", "answers"):
        assert value("kv_cache_blocks_total", life_cycle=kind, outcome=outcome) == getattr(cycle, outcome)
    assert cycle.missed > 0
    capacity = value("kv_cache_evicted_pages_total", life_cycle=kind, reason="capacity")
    assert capacity == cycle.evictions["capacity"] > 0
    host, disk = stats.tiers
    assert value("kv_cache_tier_moved_blocks_total", tier="host", event="stored") == host.stored_blocks > 0
    assert value("kv_cache_tier_moved_blocks_total", tier="disk", event="stored") == disk.stored_blocks
    assert value("kv_cache_tier_blocks", tier="host") == stats.host_blocks
