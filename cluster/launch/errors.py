"""What can go wrong while a job is prepared or run, as named errors.

The command line prints them without a traceback: `LaunchConfigError` ends with exit code 2, the others with 1.
"""

from __future__ import annotations

from cluster.config.errors import ConfigError

__all__ = ["JobNotFoundError", "LaunchConfigError", "LaunchError", "LinkError", "NodeLostError", "SlurmCommandError"]


class LaunchConfigError(ConfigError):
    """The job cannot be submitted as configured; `problems` lists everything that is wrong."""


class LaunchError(Exception):
    """Base of errors met while a job runs."""


class SlurmCommandError(LaunchError):
    """A Slurm command failed or did not answer; the message holds what it printed."""


class JobNotFoundError(LaunchError):
    """Neither Slurm nor the log folder knows the job."""


class LinkError(LaunchError):
    """The connection between the job's first node and another one is closed, silent or not ours."""


class NodeLostError(LaunchError):
    """A node of the job is gone; `node` names it."""

    def __init__(self, node: str, why: str) -> None:
        super().__init__(f"{node} is lost: {why}")
        self.node = node
        self.why = why
