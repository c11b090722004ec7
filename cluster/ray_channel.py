"""Calls to a worker that runs as a Ray actor."""

from __future__ import annotations

from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from cluster.errors import ClusterError, EngineFailedError, WorkerLostError

__all__ = ["RayChannel"]


class RayChannel:
    """A `WorkerChannel` over an actor handle.

    A death that Ray reports becomes WorkerLostError at once; an error of the worker's own tree arrives as itself.
    """

    def __init__(self, actor: ActorHandle) -> None:
        self._actor = actor

    async def call(self, method: str, *args: Any) -> Any:
        try:
            return await getattr(self._actor, method).remote(*args)
        except RayActorError as error:
            raise WorkerLostError(_first_line(error)) from error
        except RayTaskError as error:
            if isinstance(error.cause, ClusterError):
                raise error.cause from None
            raise EngineFailedError(f"{method} failed: {type(error.cause).__name__}: {error.cause}") from error

    async def kill(self) -> None:
        ray.kill(self._actor, no_restart=False)


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
