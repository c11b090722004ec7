"""The HTTP surface: OpenAI's interface over the orchestrator. The only place that knows FastAPI."""

from __future__ import annotations

from cluster.frontend.app import create_app
from cluster.frontend.backend import AnswerStream, Backend, CacheReset
from cluster.frontend.prompts import PromptEncoder
from cluster.frontend.settings import FrontendSettings, ServerSettings
from cluster.frontend.splicing import SplicingStore

__all__ = [
    "AnswerStream",
    "Backend",
    "CacheReset",
    "FrontendSettings",
    "PromptEncoder",
    "ServerSettings",
    "SplicingStore",
    "create_app",
]
