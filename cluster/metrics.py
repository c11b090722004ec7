"""The cluster's metrics in Prometheus' text format, gathered from the workers when somebody asks.

Counters of the workers restart with them, as Prometheus expects. Labels are role, worker and model; never a request
or a conversation.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from cluster.orchestrator import Orchestrator
from cluster.worker import WorkerStats
from cluster.worker_handle import WorkerState

__all__ = ["metrics_text"]


async def metrics_text(orchestrator: Orchestrator, *, model_name: str) -> bytes:
    """All metrics now. Asks every ready worker once."""
    registry = CollectorRegistry()
    registry.register(_Collector(orchestrator, await orchestrator.stats(), model_name))  # type: ignore[arg-type]
    return generate_latest(registry)


class _Collector:
    """One scrape."""

    def __init__(self, orchestrator: Orchestrator, workers: list[WorkerStats], model_name: str) -> None:
        self._orchestrator = orchestrator
        self._workers = workers
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        yield from self._requests()
        yield from self._per_worker()

    def _requests(self) -> Iterator[Metric]:
        counters = self._orchestrator.counters
        model = [self._model_name]
        finished = CounterMetricFamily(
            "kvferry_requests", "Requests that ended, by reason", labels=["model_name", "finish_reason"]
        )
        for reason, count in sorted(counters.finished.items()):
            finished.add_metric([*model, reason], count)
        yield finished
        running = GaugeMetricFamily("kvferry_requests_in_flight", "Requests being served", labels=["model_name"])
        running.add_metric(model, self._orchestrator.in_flight)
        yield running
        for name, help_text, value in (
            ("kvferry_request_retries", "Attempts after a death or a failed transfer", counters.retries),
            ("kvferry_disaggregated_prefills", "Prompts computed by a context worker", counters.disaggregated),
            ("kvferry_local_prefills", "Prompts computed where they were decoded", counters.local_prefills),
        ):
            family = CounterMetricFamily(name, help_text, labels=["model_name"])
            family.add_metric(model, value)
            yield family
        up = GaugeMetricFamily("kvferry_worker_up", "1 while the worker can take requests", labels=["role", "worker"])
        restarts = CounterMetricFamily("kvferry_worker_restarts", "Times the worker came back", labels=["role", "worker"])
        for handle in self._orchestrator.fleet.handles:
            up.add_metric([handle.role, handle.worker_id], float(handle.state is WorkerState.READY))
            restarts.add_metric([handle.role, handle.worker_id], handle.restarts)
        yield up
        yield restarts

    def _per_worker(self) -> Iterator[Metric]:
        for name, help_text, values in (
            ("kvferry_sequences_running", "Sequences in the batch", [s.scheduler.running for s in self._workers]),
            ("kvferry_sequences_waiting", "Sequences waiting", [s.scheduler.waiting for s in self._workers]),
            ("kvferry_open_grants", "Grants that peers may still use", [s.open_grants for s in self._workers]),
        ):
            gauge = GaugeMetricFamily(name, help_text, labels=["role", "worker"])
            self._add(gauge, values)
            yield gauge
        for name, help_text, totals in (
            ("kvferry_engine_steps", "Forward passes", [s.scheduler.steps for s in self._workers]),
            ("kvferry_computed_tokens", "Tokens whose KV was computed", [s.scheduler.computed_tokens for s in self._workers]),
            ("kvferry_generation_tokens", "Tokens sampled", [s.scheduler.sampled_tokens for s in self._workers]),
            ("kvferry_preemptions", "Sequences put back for want of pages", [s.scheduler.preemptions for s in self._workers]),
            ("kvferry_repaired_blocks", "Blocks that failed their check", [s.repaired_blocks for s in self._workers]),
            ("kvferry_engine_busy_seconds", "Time in forward passes", [s.busy_s for s in self._workers]),
        ):
            counter = CounterMetricFamily(name, help_text, labels=["role", "worker"])
            self._add(counter, totals)
            yield counter

    def _add(self, family: Metric, values: list[float] | list[int]) -> None:
        for stats, value in zip(self._workers, values, strict=True):
            family.add_metric([stats.info.role, stats.info.worker_id], value)  # type: ignore[attr-defined]
