"""kvferry behind Ray Serve: `serve run --working-dir . examples.ray_serve.app:app` from the repository's root.

One Serve replica holds the frontend and the orchestrator; the workers are actors of the same Ray cluster, as with
`kvferry serve`. KVFERRY_CONFIG in the runtime environment names the cluster's YAML file. Serve's own proxy listens.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from ray import serve

__all__ = ["app", "application", "start", "stop"]

_running: dict[str, Any] = {}


async def start() -> None:
    """Start the workers and make the FastAPI application over them."""
    from cluster.config import load_config
    from cluster.controller import Controller
    from cluster.engine import describe_model, load_tokenizer
    from cluster.frontend import create_app
    from cluster.local_cluster import make_orchestrator
    from cluster.metrics import metrics_text

    config = load_config(os.environ.get("KVFERRY_CONFIG"), (), os.environ)
    tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
    model = await asyncio.to_thread(
        describe_model, config.model, tokens_per_block=config.kv_cache_config.tokens_per_block
    )
    controller = Controller(config, address="auto")
    await asyncio.to_thread(controller.connect)
    orchestrator = make_orchestrator(config, await asyncio.to_thread(controller.create_fleet))
    await orchestrator.fleet.start()
    _running["orchestrator"], _running["controller"] = orchestrator, controller
    _running["app"] = create_app(
        orchestrator,
        tokenizer,
        model_name=config.model,
        server_config=config.server,
        max_seq_len=min(config.engine.max_seq_len, model.max_position),
        metrics_text=lambda: metrics_text(orchestrator, model_name=config.model),
    )


def application() -> Any:
    """The ASGI application; Serve asks for it once the replica has started."""
    return _running["app"]


async def stop() -> None:
    """End the workers."""
    if "orchestrator" in _running:
        await _running.pop("orchestrator").close()
        await asyncio.to_thread(_running.pop("controller").close)


@serve.deployment(num_replicas=1, max_ongoing_requests=256, ray_actor_options={"num_cpus": 0})
@serve.ingress(application)
class KvFerry:
    """The replica: it is ready when the cluster is, and takes the workers with it when it goes."""

    async def __init__(self) -> None:
        await start()

    async def __del__(self) -> None:
        await stop()


app = KvFerry.bind()  # type: ignore[attr-defined]
