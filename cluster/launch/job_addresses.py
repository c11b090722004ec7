"""Addresses of a Slurm job's nodes as its batch script told them, for programs that run inside the job."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

__all__ = ["job_addresses"]


def job_addresses(names: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, str]:
    """Slurm's address of each node (a name or an IP); a node that the script left out is taken by its name."""
    variables = os.environ if env is None else env
    told = dict(pair.partition("=")[::2] for pair in variables.get("KVFERRY_JOB_ADDRESSES", "").split())
    return {name: told.get(name, name) for name in names}
