"""What the routes share: the cluster behind, the tokenizer's users, names and limits. Built once by create_app."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from cluster.engine import Tokenizer
from cluster.frontend.backend import Backend
from cluster.frontend.call import CallBuilder
from cluster.frontend.metrics import FrontendMetrics
from cluster.frontend.prompts import PromptEncoder
from cluster.frontend.settings import FrontendSettings

__all__ = ["FrontendContext"]


@dataclass(frozen=True, slots=True, eq=False)
class FrontendContext:
    """Everything a route needs. `wall_clock` gives seconds since the epoch, for `created` fields."""

    backend: Backend
    tokenizer: Tokenizer
    prompts: PromptEncoder
    calls: CallBuilder
    metrics: FrontendMetrics
    settings: FrontendSettings
    model_name: str
    max_seq_len: int
    version: str
    started_at: int
    wall_clock: Callable[[], float]
    cluster_metrics: Callable[[], Awaitable[bytes]]
