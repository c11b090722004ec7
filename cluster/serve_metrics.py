"""What the orchestrator itself counts and times, in its own Prometheus registry. One object an orchestrator."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram

from cluster.serve_request import TurnRecord

__all__ = ["ServeMetrics"]

_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class ServeMetrics:
    """Request counts, latencies and where prompt tokens came from. Never labelled by request or conversation."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        self.finished = Counter("kvferry_requests", "Requests that ended", ["finish_reason"], registry=registry)
        self.retries = Counter(
            "kvferry_request_retries", "Attempts made again after a death or a failed transfer", registry=registry
        )
        self.prefills = Counter(
            "kvferry_prefills", "Prompts by where they were computed: context, or local to the decode", ["where"],
            registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Counter(
            "kvferry_prompt_tokens", "Prompt tokens by origin of their KV: cached, pulled or computed", ["origin"],
            registry=registry,
        )  # fmt: skip
        self.completion_tokens = Counter("kvferry_completion_tokens", "Answer tokens", registry=registry)
        self.ttft = Histogram(
            "kvferry_time_to_first_token_seconds", "Arrival to first token", registry=registry, buckets=_LATENCY_S
        )
        self.inter_token = Histogram(
            "kvferry_inter_token_latency_seconds", "Between answer tokens", registry=registry, buckets=_TOKEN_S
        )
        self.e2e = Histogram(
            "kvferry_e2e_request_latency_seconds", "Arrival to last token", registry=registry, buckets=_LATENCY_S
        )
        self.handoff = Histogram(
            "kvferry_handoff_seconds", "First token to decoding on the generation side", registry=registry,
            buckets=_LATENCY_S,
        )  # fmt: skip
        self.transfer_bytes = Counter(
            "kvferry_kv_transfer_bytes", "KV bytes moved for requests", ["direction"], registry=registry
        )
        self.transfer_blocks = Counter(
            "kvferry_kv_transfer_blocks", "KV blocks moved for requests", ["direction"], registry=registry
        )
        self.transfer_failures = Counter(
            "kvferry_kv_transfer_failures", "Transfers that did not end well", ["direction"], registry=registry
        )
        for direction in ("ctx_to_gen", "gen_to_ctx"):
            self.transfer_bytes.labels(direction)
            self.transfer_blocks.labels(direction)
            self.transfer_failures.labels(direction)

    def request_ended(self, record: TurnRecord) -> None:
        """Count a finished request."""
        usage = record.usage
        self.finished.labels(str(record.finish_reason)).inc()
        self.prompt_tokens.labels("cached").inc(usage.ctx_cached_tokens)
        self.prompt_tokens.labels("pulled").inc(usage.ctx_pulled_tokens)
        self.prompt_tokens.labels("computed").inc(usage.recomputed_tokens)
        self.completion_tokens.inc(usage.completion_tokens)
        self.transfer_bytes.labels("ctx_to_gen").inc(usage.ctx_to_gen_bytes)
        self.transfer_blocks.labels("ctx_to_gen").inc(usage.ctx_to_gen_blocks)
        if usage.ttft_s is not None:
            self.ttft.observe(usage.ttft_s)
        if usage.e2e_s is not None:
            self.e2e.observe(usage.e2e_s)

    def turn_closed(self, record: TurnRecord) -> None:
        """Count a turn's back-flow."""
        self.transfer_bytes.labels("gen_to_ctx").inc(record.gen_to_ctx_bytes)
        self.transfer_blocks.labels("gen_to_ctx").inc(record.gen_to_ctx_blocks)
        if record.backflow not in ("done", "off", "cancelled"):
            self.transfer_failures.labels("gen_to_ctx").inc()
