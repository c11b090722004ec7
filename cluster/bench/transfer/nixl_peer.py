"""NIXL beside the transceiver: its own agents in a Python that has it installed, asked for one transfer a round.

A NIXL that cannot be imported or driven there is reported with its own words; no figure is ever made up.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

__all__ = ["NixlPeer", "NixlUnavailable", "open_nixl"]

_DEADLINE_S = 60.0


class NixlUnavailable(Exception):
    """NIXL could not be imported or driven."""


class NixlPeer:
    """Two processes with a pool of `pages` pages each. Made by `open_nixl`."""

    def __init__(self, process: subprocess.Popen[str], log: Path, python: str) -> None:
        self._process = process
        self._python = python
        self._log = log
        self._answer()
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """NIXL's threads spin while they wait: outside its own rounds both processes stand still."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Let both processes go on, to their end."""
        self._signal(signal.SIGCONT)

    def read(self, local: NDArray[np.int32], remote: NDArray[np.int32]) -> float:
        """Seconds of one transfer of pages; checks that they arrived. Blocks. Raises NixlUnavailable."""
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps({"local": local.tolist(), "remote": remote.tolist()}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise NixlUnavailable(f"nixl: {error}") from error
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        if answer.get("state") != "DONE" or not answer.get("right"):
            raise NixlUnavailable(f"nixl did not deliver the pages: {answer}")
        return float(str(answer["seconds"]))

    def _answer(self) -> dict[str, object]:
        stream = self._process.stdout
        assert stream is not None
        while True:
            if not select.select([stream], [], [], _DEADLINE_S)[0]:
                raise NixlUnavailable(f"nixl does not answer within {_DEADLINE_S:g} s")
            line = stream.readline()
            if not line:
                words = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["no output"]
                raise NixlUnavailable(f"nixl cannot be driven by {self._python}: {words[0]}")
            if line.startswith("{"):  # NIXL logs to stdout too
                answer: dict[str, object] = json.loads(line)
                return answer


@contextlib.contextmanager
def open_nixl(page_bytes: int, pages: int, python: Path | None = None) -> Iterator[NixlPeer]:
    """Start both processes, connect, prepare. Raises NixlUnavailable."""
    script = str(Path(__file__).with_name("drive_nixl.py"))
    command = [str(python or sys.executable), script, "initiator", str(page_bytes), str(pages)]
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        log = Path(folder) / "stderr"
        with log.open("w") as errors:
            try:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise NixlUnavailable(f"nixl: {error}") from error
        peer = None
        try:
            peer = NixlPeer(process, log, command[0])
            yield peer
        finally:
            if peer is not None:
                peer.close()
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
