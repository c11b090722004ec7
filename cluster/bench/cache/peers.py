"""Runs a peer's cache manager on the same prompts, in a Python that has the peer installed.

A peer that cannot be imported there is reported as such; no figure is ever made up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

__all__ = ["PEERS", "STUBBED", "PeerProcess", "PeerUnavailable", "measure_peer"]

PEERS = ("vllm", "sglang")
_DEADLINE_S = 1800.0
# imported by the peers, not used by their cache managers: empty modules take their place where they are not installed
STUBBED = (
    "compressed_tensors",
    "gguf",
    "lmformatenforcer",
    "llguidance",
    "outlines",
    "outlines_core",
    "sgl_kernel",
    "torchao",
    "torchcodec",
    "torchvision",
    "triton",
    "xgrammar",
)


class PeerUnavailable(Exception):
    """The peer could not be imported or driven; the message holds its own words."""


class PeerProcess:
    """One peer's driver, which runs a round when it is told to: rounds of several managers can take turns.

    A context manager. Raises PeerUnavailable for an unknown name and for a Python that cannot be started.
    """

    def __init__(
        self,
        name: str,
        prompts: Sequence[NDArray[np.int32]],
        block: int,
        capacity_tokens: int,
        python: Path | None = None,
    ) -> None:
        if name not in PEERS:
            raise PeerUnavailable(f"unknown peer {name!r}: use one of {', '.join(PEERS)}")
        self.name = name
        self._python = str(python or sys.executable)
        self._folder = tempfile.TemporaryDirectory(prefix="kvferry-bench-")
        data = Path(self._folder.name) / "prompts.npz"
        self._errors = (Path(self._folder.name) / "stderr").open("w+", encoding="utf-8")
        lengths = np.array([len(prompt) for prompt in prompts], dtype=np.int64)
        np.savez(data, tokens=np.concatenate(list(prompts)), lengths=lengths)
        script = Path(__file__).with_name(f"drive_{name}.py")
        command = [self._python, str(script), str(data), str(block), str(capacity_tokens), ",".join(STUBBED)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
            )
        except OSError as error:
            self._errors.close()
            self._folder.cleanup()
            raise PeerUnavailable(f"{name}: {error}") from error

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def one_round(self) -> dict[str, float]:
        """`hit_rate`, `cpu_us_per_block`, `cpu_ms_per_request` of a run from an empty cache. Blocks, for half an hour
        at most. Raises PeerUnavailable.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        watchdog = threading.Timer(_DEADLINE_S, self._process.kill)
        watchdog.start()
        try:
            self._process.stdin.write("round\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith("{"):
                    return {key: float(value) for key, value in json.loads(line).items()}
        except BrokenPipeError:
            pass
        finally:
            watchdog.cancel()
        self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().strip().splitlines()[-1:] or ["no output"]
        raise PeerUnavailable(f"{self.name} cannot be driven by {self._python}: {last[0]}")

    def close(self) -> None:
        """End the process. Idempotent."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()
        self._folder.cleanup()


def measure_peer(
    name: str,
    prompts: Sequence[NDArray[np.int32]],
    block: int,
    capacity_tokens: int,
    python: Path | None = None,
) -> dict[str, float]:
    """One round of one peer. Blocks for minutes. Raises PeerUnavailable."""
    with PeerProcess(name, prompts, block, capacity_tokens, python) as peer:
        return peer.one_round()
