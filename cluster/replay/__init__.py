"""Replay of public request traces through the real cache manager: what a policy is worth before it meets a cluster."""

from __future__ import annotations

from cluster.replay.belady import belady_hits
from cluster.replay.lanes import scheduled
from cluster.replay.runner import ReplayOptions, ReplayResult, replay
from cluster.replay.trace import Trace, TraceError, TraceRequest, load_trace

__all__ = [
    "ReplayOptions",
    "ReplayResult",
    "Trace",
    "TraceError",
    "TraceRequest",
    "belady_hits",
    "load_trace",
    "replay",
    "scheduled",
]
