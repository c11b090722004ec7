"""Calls to a worker that runs as a Ray actor."""

from __future__ import annotations

import logging
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from cluster.errors import ClusterError, EngineFailedError, WorkerLostError

__all__ = ["RayChannel"]

log = logging.getLogger(__name__)


class RayChannel:
    """A `WorkerChannel` over an actor handle.

    A death that Ray reports becomes WorkerLostError at once; an error of the worker's own tree arrives as itself.
    """

    def __init__(self, actor: ActorHandle[Any]) -> None:
        self._actor = actor

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*args)
        except RayTaskError as error:
            if isinstance(error.cause, ClusterError):
                raise error.cause from None
            raise EngineFailedError(f"{method} failed: {type(error.cause).__name__}: {error.cause}") from error
        except RayError as error:
            log.debug("%s: %s", method, error)
            raise WorkerLostError(_what_happened(error)) from error

    async def kill(self) -> None:
        ray.kill(self._actor, no_restart=False)

    async def end(self) -> None:
        ray.kill(self._actor, no_restart=True)


def _what_happened(error: RayError) -> str:
    """One line: why an actor could not be created, or that its process is gone."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if lines and "creation" in lines[0].lower():
        return f"its actor could not be created: {lines[-1]}"
    return "its process died or cannot be reached"
