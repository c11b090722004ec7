"""Workers: the two halves of a request over an engine, a cache manager and a transceiver."""

from cluster.worker.context_worker import ContextWorker
from cluster.worker.generation_worker import GenerationWorker
from cluster.worker.messages import (
    Admission,
    AdmissionStatus,
    BackflowResult,
    CacheShortfall,
    OutputDelta,
    PrefillResult,
    PrefixLoan,
    TurnHandoff,
    WorkerInfo,
    WorkerRole,
    WorkerStats,
)
from cluster.worker.spec import WorkerSpec

__all__ = [
    "Admission",
    "AdmissionStatus",
    "BackflowResult",
    "CacheShortfall",
    "ContextWorker",
    "GenerationWorker",
    "OutputDelta",
    "PrefillResult",
    "PrefixLoan",
    "TurnHandoff",
    "WorkerInfo",
    "WorkerRole",
    "WorkerSpec",
    "WorkerStats",
]
