"""`kvferry ray`: a cluster as a Ray job, submitted through the job server of a Ray head, with the driver's exit code.

Carries kvferry's own packages along, so the Ray cluster needs the dependencies but not kvferry. The only file of the
launcher that talks to Ray's job server.
"""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.launch.errors import LaunchError

__all__ = ["RayJobClient", "RayJobError", "RayJobReport"]

_PACKAGES = ("cluster", "transceiver", "kvcache")
_POLL_S = 0.5
_AGENT_WAIT_S = 30.0
_EXIT_STOPPED = 128 + signal.SIGTERM


class RayJobError(LaunchError):
    """The job server does not answer, or does not know the job."""


@dataclass(frozen=True, slots=True)
class RayJobReport:
    """What the job server says of a job. `exit_code` is the driver's, None while it runs or when it was stopped."""

    job_id: str
    status: str
    message: str
    exit_code: int | None

    @property
    def ended(self) -> bool:
        """Whether the job has ended."""
        return self.status in ("SUCCEEDED", "FAILED", "STOPPED")

    @property
    def process_exit_code(self) -> int:
        """The exit code that stands for this end: the driver's own wherever there is one."""
        if self.exit_code is not None:
            return self.exit_code if self.exit_code >= 0 else 128 - self.exit_code
        return {"SUCCEEDED": 0, "STOPPED": _EXIT_STOPPED}.get(self.status, 1)


class RayJobClient:
    """Talks to one job server."""

    def __init__(self, address: str) -> None:
        """`address` is the dashboard's, such as http://head:8265. Raises RayJobError when nobody answers."""
        from ray.job_submission import JobSubmissionClient

        try:
            self._client = JobSubmissionClient(address)
        except (ConnectionError, RuntimeError, OSError) as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise RayJobError(
                f"no job server at {address}: {text}; start the head with --dashboard-host=0.0.0.0 and ray[default]"
            ) from error

    def submit(
        self,
        command: str,
        *,
        working_dir: Path,
        packages: bool = True,
        env: Mapping[str, str] | None = None,
        pip: Sequence[str] = (),
        job_id: str | None = None,
    ) -> str:
        """Upload `working_dir` (and kvferry's packages) and start `command` there; returns the job's id."""
        runtime: dict[str, Any] = {
            "working_dir": str(working_dir),
            "env_vars": {"PYTHONUNBUFFERED": "1", **(env or {})},
        }
        if packages:
            runtime["py_modules"] = [str(_package_folder(name)) for name in _PACKAGES]
        if pip:
            runtime["pip"] = list(pip)
        deadline = time.monotonic() + _AGENT_WAIT_S
        pause = threading.Event()
        while True:
            try:
                return str(self._client.submit_job(entrypoint=command, runtime_env=runtime, submission_id=job_id))
            except (RuntimeError, ConnectionError, OSError) as error:
                # a head that just started has no agent yet; a refused job was not started, so asking again is safe
                if "No available agent" in str(error) and time.monotonic() < deadline:
                    pause.wait(2.0)
                    continue
                raise RayJobError(f"the job was not accepted: {error}") from error

    def report(self, job_id: str) -> RayJobReport:
        """The job's state. Raises RayJobError for an unknown job."""
        try:
            info = self._client.get_job_info(job_id)
        except (RuntimeError, ConnectionError, OSError) as error:
            raise RayJobError(f"job {job_id}: {str(error).splitlines()[0]}") from error
        code = info.driver_exit_code
        return RayJobReport(job_id, str(info.status.value), info.message or "", None if code is None else int(code))

    def logs(self, job_id: str) -> str:
        """Everything the driver printed so far."""
        try:
            return str(self._client.get_job_logs(job_id))
        except (RuntimeError, ConnectionError, OSError) as error:
            raise RayJobError(f"job {job_id}: {str(error).splitlines()[0]}") from error

    def stop(self, job_id: str, timeout_s: float = 60.0) -> RayJobReport:
        """SIGTERM to the driver, then wait for the end. Raises RayJobError when it does not come."""
        try:
            self._client.stop_job(job_id)
        except (RuntimeError, ConnectionError, OSError) as error:
            raise RayJobError(f"job {job_id}: {str(error).splitlines()[0]}") from error
        deadline = time.monotonic() + timeout_s
        pause = threading.Event()
        while not (report := self.report(job_id)).ended:
            if time.monotonic() > deadline:
                raise RayJobError(f"job {job_id} did not stop within {timeout_s:g} s: it is {report.status}")
            pause.wait(_POLL_S)
        return report

    def follow(self, job_id: str, write: Callable[[str], object] = sys.stdout.write) -> RayJobReport:
        """Print the driver's output as it comes until the job ends."""
        pause, printed = threading.Event(), 0
        while True:
            report = self.report(job_id)
            text = self.logs(job_id)
            if len(text) > printed:
                write(text[printed:])
                printed = len(text)
            if report.ended:
                return report
            pause.wait(_POLL_S)


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RayJobError(f"the package {name} is not where it should be: reinstall kvferry")
    return Path(spec.origin).parent
