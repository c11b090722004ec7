"""The cluster's metrics in Prometheus' text format, gathered from the workers when somebody asks.

Counters of the workers restart with them, as Prometheus expects. Labels are role, worker and model; never a request
or a conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric

from cluster.orchestrator import Orchestrator
from cluster.worker import WorkerStats
from cluster.worker_handle import WorkerState
from transceiver import TransceiverStats

__all__ = ["metrics_text"]


@dataclass(frozen=True, slots=True)
class _WorkerMetric:
    """A number that every worker reports."""

    name: str
    help: str
    value: Callable[[WorkerStats], float]
    is_counter: bool = True


def _moved(value: Callable[[TransceiverStats], float]) -> Callable[[WorkerStats], float]:
    return lambda stats: value(stats.transceiver) if stats.transceiver is not None else 0.0


_WORKER_METRICS = (
    _WorkerMetric("num_requests_running", "Sequences in the batch", lambda s: s.scheduler.running, False),
    _WorkerMetric("num_requests_waiting", "Sequences waiting for a place", lambda s: s.scheduler.waiting, False),
    _WorkerMetric("open_grants", "Grants whose blocks peers may still read", lambda s: s.open_grants, False),
    _WorkerMetric("retained_turns", "Turns in the conversations' ledgers", lambda s: s.cache.retained_turns, False),
    _WorkerMetric("conversations", "Conversations tracked", lambda s: s.cache.tracked_conversations, False),
    _WorkerMetric("peer_pins", "Pins that peers hold", lambda s: s.cache.peer_pins, False),
    _WorkerMetric("pinned_pages", "Pages that peers' pins hold", lambda s: s.cache.pinned_pages, False),
    _WorkerMetric(
        "quarantined_pulls",
        "Ended pulls whose pages an operation may still touch",
        _moved(lambda t: t.quarantined_pulls),
        False,
    ),
    _WorkerMetric("engine_steps", "Forward passes", lambda s: s.scheduler.steps),
    _WorkerMetric("engine_busy_seconds", "Time in forward passes", lambda s: s.busy_s),
    _WorkerMetric("computed_tokens", "Tokens whose KV was computed", lambda s: s.scheduler.computed_tokens),
    _WorkerMetric("generation_tokens", "Tokens sampled", lambda s: s.scheduler.sampled_tokens),
    _WorkerMetric("suspensions", "Preempted sequences kept in host memory", lambda s: s.scheduler.suspensions),
    _WorkerMetric("preemptions", "Sequences put back for want of pages", lambda s: s.scheduler.preemptions),
    _WorkerMetric("kv_cache_reused_blocks", "Blocks found in the cache, whole", lambda s: s.cache.reused_full_blocks),
    _WorkerMetric("kv_cache_partial_blocks", "Blocks found in part", lambda s: s.cache.reused_partial_blocks),
    _WorkerMetric("kv_cache_missed_blocks", "Blocks asked for and not found", lambda s: s.cache.missed_blocks),
    _WorkerMetric("kv_cache_evicted_blocks", "Cached blocks given up", lambda s: s.cache.evicted_blocks),
    _WorkerMetric("repaired_blocks", "Blocks that arrived damaged and were computed", lambda s: s.repaired_blocks),
    _WorkerMetric("received_bytes", "KV bytes pulled from peers", _moved(lambda t: t.bytes_received)),
    _WorkerMetric("received_blocks", "KV blocks pulled from peers", _moved(lambda t: t.blocks_received)),
    _WorkerMetric("received_segments", "Reads that pulled them", _moved(lambda t: t.segments_received)),
    _WorkerMetric("digest_mismatches", "Blocks with a wrong digest", _moved(lambda t: t.digest_mismatches)),
    _WorkerMetric("stale_generations", "Blocks whose page was given out anew", _moved(lambda t: t.stale_generations)),
    _WorkerMetric("malformed_messages", "Peer messages refused", _moved(lambda t: t.malformed_messages)),
    _WorkerMetric("refused_links", "Handshakes refused", _moved(lambda t: t.refused_links)),
    _WorkerMetric("lost_links", "Links that broke", _moved(lambda t: t.lost_links)),
)


async def metrics_text(orchestrator: Orchestrator, *, model_name: str) -> bytes:
    """All metrics now. Asks every ready worker once."""
    registry = CollectorRegistry()
    registry.register(_Collector(orchestrator, await orchestrator.stats(), model_name))
    return generate_latest(orchestrator.metrics.registry) + generate_latest(registry)


class _Collector:
    """One scrape of the workers."""

    def __init__(self, orchestrator: Orchestrator, workers: list[WorkerStats], model_name: str) -> None:
        self._orchestrator = orchestrator
        self._workers = workers
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Every family of one scrape."""
        yield InfoMetricFamily("kvferry_model", "What is served", value={"model_name": self._model_name})
        in_flight = GaugeMetricFamily("kvferry_requests_in_flight", "Requests being served")
        in_flight.add_metric([], self._orchestrator.in_flight)
        yield in_flight
        yield from self._fleet()
        yield from self._pools()
        yield from self._life_cycles()
        yield from self._tiers()
        yield from self._links()
        for metric in _WORKER_METRICS:
            kind = CounterMetricFamily if metric.is_counter else GaugeMetricFamily
            family = kind(f"kvferry_{metric.name}", metric.help, labels=["role", "worker"])
            for stats in self._workers:
                family.add_metric([stats.info.role, stats.info.worker_id], metric.value(stats))
            yield family

    def _fleet(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("kvferry_worker_up", "1 while it can take requests", labels=["role", "worker"])
        restarts = CounterMetricFamily("kvferry_worker_restarts", "Times it came back", labels=["role", "worker"])
        for handle in self._orchestrator.fleet.handles:
            up.add_metric([handle.role, handle.worker_id], float(handle.state is WorkerState.READY))
            restarts.add_metric([handle.role, handle.worker_id], handle.restarts)
        yield up
        yield restarts

    def _pools(self) -> Iterator[Metric]:
        pages = GaugeMetricFamily(
            "kvferry_kv_cache_pages", "Pages of a pool by state", labels=["role", "worker", "life_cycle", "state"]
        )
        page_bytes = GaugeMetricFamily(
            "kvferry_kv_cache_page_bytes", "Bytes of a page", labels=["role", "worker", "life_cycle"]
        )
        for stats in self._workers:
            for pool in stats.cache.pools:
                who = [stats.info.role, stats.info.worker_id, f"{pool.group}:{pool.kind}"]
                for state in ("total", "free", "held", "cached"):
                    pages.add_metric([*who, state], getattr(pool, state))
                page_bytes.add_metric(who, pool.page_bytes)
        yield pages
        yield page_bytes

    def _life_cycles(self) -> Iterator[Metric]:
        labels = ["role", "worker", "life_cycle"]
        blocks = CounterMetricFamily(
            "kvferry_kv_cache_blocks", "Blocks of requests by what became of them", labels=[*labels, "outcome"]
        )
        evicted = CounterMetricFamily(
            "kvferry_kv_cache_evicted_pages", "Pages given up, by reason", labels=[*labels, "reason"]
        )
        for stats in self._workers:
            for cycle in stats.cache.life_cycles:
                who = [stats.info.role, stats.info.worker_id, f"{cycle.group}:{cycle.kind}"]
                for outcome in ("reused_full", "reused_partial", "missed", "answers"):
                    blocks.add_metric([*who, outcome], getattr(cycle, outcome))
                for reason, count in cycle.evictions.items():
                    evicted.add_metric([*who, reason], count)
        yield blocks
        yield evicted

    def _tiers(self) -> Iterator[Metric]:
        labels = ["role", "worker", "tier"]
        held = GaugeMetricFamily("kvferry_kv_cache_tier_blocks", "Blocks in a lower tier", labels=labels)
        moved = CounterMetricFamily(
            "kvferry_kv_cache_tier_moved_blocks", "Blocks by what happened to them in a tier", labels=[*labels, "event"]
        )
        for stats in self._workers:
            for now in stats.cache.lower_tiers:
                held.add_metric([stats.info.role, stats.info.worker_id, now.tier], now.blocks)
            for tier in stats.cache.tiers:
                for event in ("stored", "onboarded", "lifted", "dropped", "corrupt"):
                    moved.add_metric(
                        [stats.info.role, stats.info.worker_id, tier.tier, event], getattr(tier, f"{event}_blocks")
                    )
        yield held
        yield moved

    def _links(self) -> Iterator[Metric]:
        labels = ["role", "worker", "peer", "transport", "detail"]
        families = [
            CounterMetricFamily(f"kvferry_link_{name}", text, labels=labels)
            for name, text in (
                ("bytes", "KV bytes pulled over a link, by what moved them"),
                ("transfers", "Pulls over a link"),
                ("retries", "Pulls that began again on a new link"),
                ("seconds", "Time in which bytes moved"),
            )
        ]
        sums: dict[tuple[str, ...], list[float]] = {}  # a worker that came back has another address, the same labels
        for stats in self._workers:
            for link in stats.transceiver.links.values() if stats.transceiver is not None else ():
                who: tuple[str, ...] = (
                    stats.info.role, stats.info.worker_id, link.peer, link.transport, link.detail,
                )  # fmt: skip
                values = sums.setdefault(who, [0.0] * len(families))
                for index, value in enumerate((link.bytes, link.transfers, link.retries, link.transfer_s)):
                    values[index] += value
        for labels_of, values in sums.items():
            for family, value in zip(families, values, strict=True):
                family.add_metric(list(labels_of), value)
        yield from families
