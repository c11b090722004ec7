"""The `server` section: the HTTP front of the cluster.

Read by `cluster.frontend` and `cluster.serve`. It must not hold anything that a worker needs.
"""

from __future__ import annotations

from pydantic import Field

from cluster.config.base import StrictModel

__all__ = ["ServerConfig"]


class ServerConfig(StrictModel):
    """Where the server listens and what it admits."""

    host: str = Field(default="127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port, 1 to 65535; 0 takes any free one.")
    api_keys_file: str | None = Field(
        default=None,
        min_length=1,
        description="File with one API key a line; requests without one of them are refused. `null` admits everybody.",
    )
    max_queued_requests: int = Field(
        default=256, ge=1, description="Requests waiting or running; one more is refused with 429."
    )
    drain_s: float = Field(
        default=5.0,
        ge=0.0,
        le=86400.0,
        description="Seconds that requests in progress may take to finish when the server is told to stop (SIGINT, "
        "SIGTERM); a second signal ends them at once. In a Slurm job `slurm.drain_s` decides.",
    )
