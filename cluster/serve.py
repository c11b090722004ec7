"""From a configuration to a served port: what `kvferry serve` and `kvferry demo` run.

Order: the port is taken first (a port in use costs nothing else), then Ray and the actors, then HTTP answers (503 on
/health) while the models load, then requests are served. Everything started here is stopped here, also on Ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import uvicorn

from cluster.config import ClusterConfig
from cluster.controller import Controller
from cluster.descendants import adopt_orphans, end_descendants
from cluster.engine import EngineError, describe_model, load_tokenizer
from cluster.errors import ClusterError, NotReadyError, StartupError
from cluster.frontend import create_app
from cluster.log import configure_logging
from cluster.metrics import metrics_text
from cluster.orchestrator import Orchestrator
from cluster.worker_plan import make_orchestrator

__all__ = ["RunningCluster", "run_server", "running_cluster"]

log = logging.getLogger(__name__)

Progress = Callable[[str], None]

_CLOSING_S = 5.0  # what closing the workers and Ray takes at the most on a busy machine


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that serves."""

    base_url: str
    orchestrator: Orchestrator


def run_server(config: ClusterConfig, *, aggregated: bool = False, address: str | None = None) -> int:
    """Serve until SIGINT or SIGTERM. Returns the exit code: 0, or 1 with the cause on stderr.

    Takes the process over: its signals, and whatever it started is gone when this returns.
    """
    configure_logging()
    adopt_orphans()
    try:
        return asyncio.run(_serve_until_signalled(config, aggregated=aggregated, address=address))
    except ClusterError as error:
        _say(f"error: {error.message}")
        return 1
    finally:
        end_descendants(grace_s=2.0)


async def _serve_until_signalled(config: ClusterConfig, *, aggregated: bool, address: str | None) -> int:
    stopping, started, hurry = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stopping.is_set() else stopping).set()

    def catch_signals() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)

    async def serve() -> None:
        catch_signals()
        async with running_cluster(
            config,
            aggregated=aggregated,
            address=address,
            progress=_say,
            after_connect=catch_signals,
            worker_log_level="INFO",
        ) as cluster:
            started.set()
            _say(f"ready: {config.model} at {cluster.base_url}/v1  (Ctrl-C stops)")
            await stopping.wait()
            await _drain(cluster.orchestrator, _drain_seconds(config), hurry)
            _say("stopping")

    serving, stopped = asyncio.create_task(serve()), asyncio.create_task(stopping.wait())
    await asyncio.wait({serving, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if stopping.is_set() and not started.is_set():
        _say("stopping before the start was complete")
        end_descendants()  # what blocks in a thread now (Ray's start) would keep an orderly end waiting
        os._exit(0)
    await serving
    return 0


def _drain_seconds(config: ClusterConfig) -> float:
    """How long requests may finish. A Slurm job kills its server `slurm.drain_s` after SIGTERM, closing included."""
    return config.server.drain_s if config.slurm is None else max(0.0, config.slurm.drain_s - _CLOSING_S)


async def _drain(orchestrator: Orchestrator, seconds: float, hurry: asyncio.Event) -> None:
    """Admit no more; let what is in progress finish, for `seconds` at most or until a second signal."""
    if orchestrator.in_flight:
        _say(f"draining: {orchestrator.in_flight} requests may finish within {seconds:g} s (again to stop at once)")
    drained = asyncio.create_task(orchestrator.drain(seconds))
    hurried = asyncio.create_task(hurry.wait())
    await asyncio.wait({drained, hurried}, return_when=asyncio.FIRST_COMPLETED)
    for task in (drained, hurried):
        task.cancel()
    await asyncio.gather(drained, hurried, return_exceptions=True)


@contextlib.asynccontextmanager
async def running_cluster(
    config: ClusterConfig,
    *,
    aggregated: bool = False,
    address: str | None = None,
    progress: Progress = lambda text: None,
    after_connect: Callable[[], None] = lambda: None,
    worker_log_level: str | None = None,
) -> AsyncIterator[RunningCluster]:
    """A cluster that serves while the context is open. Several may be open in one process; they share one Ray.

    `after_connect` runs once Ray is connected, which takes some signal handlers away: the place to set them again.
    Raises StartupError with the cause: a port in use, Ray not reachable, a worker that cannot start.
    """
    listener = _bind(config.server.host, config.server.port)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(listener.close)
        try:
            tokenizer = await asyncio.to_thread(load_tokenizer, config.model)
            description = await asyncio.to_thread(
                describe_model, config.model, tokens_per_block=config.kv_cache_config.tokens_per_block
            )
        except (EngineError, OSError, ValueError) as error:
            raise StartupError(f"model {config.model!r} cannot be loaded: {error}", param="model") from error
        controller = Controller(config, aggregated=aggregated, address=address, worker_log_level=worker_log_level)
        progress("starting Ray" if controller.starts_ray else "connecting to Ray")
        stack.push_async_callback(asyncio.to_thread, controller.close)
        await asyncio.to_thread(controller.connect)
        after_connect()
        fleet = await asyncio.to_thread(controller.create_fleet)
        orchestrator = make_orchestrator(config, fleet)
        stack.push_async_callback(orchestrator.close)
        sections = (config.context_servers, config.generation_servers)[1 if aggregated else 0 :]
        limits = [section.engine.max_seq_len for section in sections]
        app = create_app(
            orchestrator,
            tokenizer,
            model_name=config.model,
            server_config=config.server,
            max_seq_len=min(description.max_position, *limits),
            metrics_text=lambda: metrics_text(orchestrator, model_name=config.model),
        )
        await stack.enter_async_context(_http(app, listener))
        stack.push_async_callback(orchestrator.end_requests, NotReadyError("the server is shutting down"))
        progress(f"starting {len(fleet.handles)} workers: " + ", ".join(h.worker_id for h in fleet.handles))
        await fleet.start()
        host, port = listener.getsockname()[:2]
        yield RunningCluster(f"http://{_url_host(host)}:{port}", orchestrator)
        progress("closing")


@contextlib.asynccontextmanager
async def _http(app: object, listener: socket.socket) -> AsyncIterator[None]:
    """uvicorn on an open socket, without its signal handling; open streams get a few seconds at the end."""
    server = uvicorn.Server(
        uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=3, lifespan="off")  # type: ignore[arg-type]
    )
    server.capture_signals = contextlib.nullcontext  # type: ignore[method-assign,assignment]
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=10)


def _bind(host: str, port: int) -> socket.socket:
    """A bound socket. Raises StartupError that says who has the port and what to do."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError(f"server.host {host!r} is not an address here: {error}", param="server.host") from error
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(where)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; stop what uses the port or set server.port",
            param="server.port",
        ) from error
    return listener


def _url_host(host: str) -> str:
    if host in ("0.0.0.0", "::"):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _say(text: str) -> None:
    print(f"kvferry: {text}", file=sys.stderr, flush=True)
