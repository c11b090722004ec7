"""Runs a peer's cache manager on the same prompts, in a Python that has the peer installed.

A peer that cannot be imported there is reported as such; no figure is ever made up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["PEERS", "PeerUnavailable", "measure_peer"]

PEERS = ("vllm", "sglang")
_DEADLINE_S = 1800.0
_STUBBED = ("triton", "torchvision", "xgrammar", "torchcodec", "sgl_kernel", "torchao", "outlines")


class PeerUnavailable(Exception):
    """The peer could not be imported or driven; the message holds its own words."""


def measure_peer(
    name: str,
    prompts: Sequence[NDArray[np.int32]],
    block: int,
    capacity_tokens: int,
    python: Path | None = None,
) -> dict[str, float]:
    """`hit_rate`, `cpu_us_per_block`, `cpu_ms_per_request` of the peer. Blocks for minutes. Raises PeerUnavailable."""
    if name not in PEERS:
        raise PeerUnavailable(f"unknown peer {name!r}: use one of {', '.join(PEERS)}")
    script = Path(__file__).with_name(f"drive_{name}.py")
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        data = Path(folder) / "prompts.npz"
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        np.savez(data, tokens=np.concatenate(list(prompts)), lengths=lengths)
        interpreter = str(python or sys.executable)
        command = [interpreter, str(script), str(data), str(block), str(capacity_tokens), ",".join(_STUBBED)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise PeerUnavailable(f"{name}: {error}") from error
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        raise PeerUnavailable(f"{name} cannot be driven by {command[0]}: {last[0]}")
    figures = json.loads(done.stdout.strip().splitlines()[-1])
    return {key: float(value) for key, value in figures.items()}
