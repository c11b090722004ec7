"""Builds the HTTP application: OpenAI's interface over an orchestrator.

Called by `kvferry serve` and by tests. Starts nothing and opens no port; the orchestrator's life is its owner's.
"""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Awaitable, Callable
from importlib import metadata

from fastapi import FastAPI

from cluster.engine import Tokenizer
from cluster.frontend.api_keys import ApiKeyMiddleware, read_api_keys
from cluster.frontend.backend import Backend
from cluster.frontend.call import CallBuilder
from cluster.frontend.context import FrontendContext
from cluster.frontend.errors import install_error_handlers
from cluster.frontend.metrics import FrontendMetrics
from cluster.frontend.prompts import PromptEncoder
from cluster.frontend.routes_admin import AdminRoutes
from cluster.frontend.routes_generate import GenerateRoutes
from cluster.frontend.settings import FrontendSettings, ServerSettings
from cluster.frontend.splicing import SplicingStore

__all__ = ["create_app"]


def create_app(
    orchestrator: Backend,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    server_config: ServerSettings,
    max_seq_len: int,
    metrics_text: Callable[[], Awaitable[bytes]],
    settings: FrontendSettings | None = None,
    wall_clock: Callable[[], float] = time.time,
    new_id: Callable[[], str] = lambda: uuid.uuid4().hex,
    new_seed: Callable[[], int] = lambda: secrets.randbits(63),
) -> FastAPI:
    """The application. `metrics_text` gives the cluster's metrics in Prometheus' text format for /metrics.

    Raises StartupError when `server_config.api_keys_file` cannot be used.
    """
    settings = settings or FrontendSettings()
    prompts = PromptEncoder(tokenizer, SplicingStore(settings.splicing_max_ids), max_seq_len=max_seq_len)
    context = FrontendContext(
        backend=orchestrator,
        tokenizer=tokenizer,
        prompts=prompts,
        calls=CallBuilder(
            prompts, settings, model_name=model_name, max_seq_len=max_seq_len, new_id=new_id, new_seed=new_seed
        ),
        metrics=FrontendMetrics(),
        settings=settings,
        model_name=model_name,
        max_seq_len=max_seq_len,
        version=_version(),
        started_at=int(wall_clock()),
        wall_clock=wall_clock,
        cluster_metrics=metrics_text,
    )
    app = FastAPI(title="kvferry", version=context.version, docs_url=None, redoc_url=None)
    install_error_handlers(app)
    GenerateRoutes(context).install(app)
    AdminRoutes(context).install(app)
    if server_config.api_keys_file is not None:
        app.add_middleware(ApiKeyMiddleware, digests=read_api_keys(server_config.api_keys_file))
    return app


def _version() -> str:
    try:
        return metadata.version("kvferry")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+unknown"
