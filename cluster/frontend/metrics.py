"""The frontend's own Prometheus counters; the cluster's come from its workers. One registry an application."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, generate_latest

__all__ = ["FrontendMetrics"]


class FrontendMetrics:
    """Counters of what happened at the HTTP surface."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "kvferry_http_requests",
            "Generating requests by route and status",
            ["route", "status"],
            registry=self._registry,
        )
        self.ignored_fields = Counter(
            "kvferry_http_ignored_fields", "Request fields that have no effect here", registry=self._registry
        )
        self.client_disconnects = Counter(
            "kvferry_http_client_disconnects", "Answers that their client did not wait for", registry=self._registry
        )
        self.stream_errors = Counter(
            "kvferry_http_stream_errors", "Streams that ended with an error event", registry=self._registry
        )
        self.spliced_tokens = Counter(
            "kvferry_spliced_prompt_tokens",
            "Prompt tokens taken from generated ids, not encoded",
            registry=self._registry,
        )

    def exposition(self) -> bytes:
        """The counters in Prometheus' text format."""
        return generate_latest(self._registry)
