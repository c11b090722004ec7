"""The life of a Slurm job, top to bottom, on the job's first node: join, Ray, server, clients, drain, tear down.

Started by `slurm_task`. It owns the order of things and what a failure means; the pool, the Ray launcher and the folder
do the work. Every failure becomes one line of failures.jsonl with its cause, and the exit code is the driver's.
"""

from __future__ import annotations

import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cluster.config import ClusterConfig
from cluster.config.slurm_config import SlurmConfig
from cluster.launch.allocation import Allocation
from cluster.launch.errors import NodeLostError
from cluster.launch.job_folder import Failure, JobPhase, JobState, RunFolder
from cluster.launch.node_pool import NodePool
from cluster.launch.ray_launcher import RayLauncher, RayStartError, ray_access
from cluster.launch.remote_process import RemoteProcess

__all__ = ["EXIT_LAUNCH_FAILED", "EXIT_NODE_LOST", "JobNodes", "JobRunner"]

EXIT_LAUNCH_FAILED = 70
EXIT_NODE_LOST = 75
_POLL_S = 0.3


class _DrainRequestedError(Exception):
    """Somebody wants the job to end: a signal, the time limit, `kvferry slurm cancel`."""


class _StepFailedError(Exception):
    def __init__(self, step: str, node: str, cause: str, code: int, log: Path | None = None, tail: str = "") -> None:
        super().__init__(cause)
        self.failure = Failure(0.0, 0, node, step, cause, code, str(log or ""), tail)
        self.code = code


@dataclass(frozen=True, slots=True)
class JobNodes:
    """Names and addresses of the job's nodes, the head first."""

    addresses: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.addresses)

    @property
    def head(self) -> str:
        return self.names[0]


class JobRunner:
    """Runs one start of a job. `run` once."""

    def __init__(
        self,
        config: ClusterConfig,
        slurm: SlurmConfig,
        allocation: Allocation,
        nodes: JobNodes,
        pool: NodePool,
        run: RunFolder,
    ) -> None:
        self._config = config
        self._slurm = slurm
        self._allocation = allocation
        self._nodes = nodes
        self._pool = pool
        self._run = run
        self._job = run.job
        self._ray: RayLauncher | None = None
        self._draining = False
        self._state = JobState(JobPhase.JOINING, self._job.now(), run.attempt, nodes.names)

    def run(self) -> int:
        """Run the job; returns the driver's exit code, or what stands for why there is none."""
        code = EXIT_LAUNCH_FAILED
        try:
            self._join()
            address = self._start_ray() if self._slurm.ray.enabled else ""
            if self._slurm.command:
                code = self._run_command(address)
            else:
                code = self._serve(address)
        except _DrainRequestedError as request:
            self._say(f"told to end before the driver ran ({request})")
            code = 128 + signal.SIGTERM
        except _StepFailedError as error:
            self._fail(error.failure)
            code = error.code
        except RayStartError as error:
            tail = _tail(error.log)
            self._fail(Failure(0, 0, error.node, "ray", error.cause, EXIT_LAUNCH_FAILED, str(error.log), tail))
        except NodeLostError as error:
            self._fail(Failure(0, 0, error.node, str(self._state.phase), str(error), EXIT_NODE_LOST))
            code = EXIT_NODE_LOST
        finally:
            self._tear_down()
            self._run.exit_code.write_text(f"{code}\n")
            self._enter(JobPhase.ENDED, exit_code=code)
        return code

    def _join(self) -> None:
        self._enter(JobPhase.JOINING)
        missing = self._pool.wait_joined(self._slurm.join_timeout_s)
        if missing:
            names = ", ".join(missing)
            cause = f"no report from {names} within {self._slurm.join_timeout_s:g} s: see the log of the step"
            raise _StepFailedError("nodes", missing[0], cause, EXIT_LAUNCH_FAILED, self._run.log("nodes"))
        self._say("all nodes are here: " + ", ".join(f"{name} ({ip})" for name, ip in self._nodes.addresses.items()))
        ports = {"slurm.ray.port": self._slurm.ray.port} if self._slurm.ray.enabled else {}
        if not self._slurm.command:
            ports["server.port"] = self._config.server.port
        for key, port in ports.items():
            if why := _port_taken(port):
                cause = f"port {port} ({key}) is taken on {self._nodes.head}: {why}"
                raise _StepFailedError("ports", self._nodes.head, cause, EXIT_LAUNCH_FAILED)

    def _start_ray(self) -> str:
        self._enter(JobPhase.STARTING_RAY)
        self._ray = RayLauncher(
            self._pool,
            self._slurm.ray,
            self._run,
            python=sys.executable,
            env=self._slurm.env,
            gpus_per_node=self._slurm.gpus_per_node,
            say=self._say,
            check=self._check,
        )
        resources = {name: self._allocation.resources(index) for index, name in enumerate(self._nodes.names)}
        address = self._ray.start(self._nodes.addresses, resources)
        self._enter(JobPhase.STARTING_SERVER, ray_address=address)
        return address

    def _run_command(self, ray_address: str) -> int:
        self._enter(JobPhase.RUNNING)
        process = self._start("command", self._slurm.command, ray_address)
        return self._finish(process, "command")

    def _serve(self, ray_address: str) -> int:
        argv = [sys.executable, "-m", "cluster", "serve", "-c", str(self._job.config), "--address", ray_address]
        server = self._start("serve", argv, ray_address, self._slurm.server_env)
        url = self._wait_ready(server)
        self._enter(JobPhase.READY, url=self._public_url())
        self._say(f"ready: {self._public_url()}/v1")
        if not self._slurm.clients:
            return self._finish(server, "serve")
        try:
            for number, client in enumerate(self._slurm.clients, 1):
                process = self._start(f"client-{number}", client, ray_address, {"KVFERRY_URL": url})
                code = self._finish(process, f"client-{number}", beside=server)
                if code != 0 or self._draining:
                    return code
            return 0
        finally:
            if server.running:
                self._end(server, "serve")

    def _start(
        self, step: str, argv: Sequence[str], ray_address: str, env: Mapping[str, str] | None = None
    ) -> RemoteProcess:
        self._say(f"{step}: {' '.join(argv)}")
        told = {"PYTHONUNBUFFERED": "1", "KVFERRY_JOB_FOLDER": str(self._job.path), **self._slurm.env, **(env or {})}
        if ray_address:
            told |= {"RAY_ADDRESS": ray_address, **ray_access(self._job)}
        if argv[0] == "python":
            argv = [sys.executable, *argv[1:]]
        return self._pool.run(self._nodes.head, argv, log=self._run.log(step), env=told)

    def _wait_ready(self, server: RemoteProcess) -> str:
        """Poll /health until the server can serve; returns its address for programs on this node."""
        self._enter(JobPhase.STARTING_SERVER)
        url = f"http://{_reachable(self._config.server.host)}:{self._config.server.port}"
        deadline = time.monotonic() + self._slurm.ready_timeout_s
        while True:
            self._check()
            if server.wait(_POLL_S):
                cause = server.why or f"the server ended with exit code {server.code} before it was ready"
                code = _shell_code(server.code or 1)
                raise _StepFailedError("serve", server.node, cause, code, server.log, server.tail())
            if _healthy(url):
                return url
            if time.monotonic() > deadline:
                cause = f"the server was not ready within {self._slurm.ready_timeout_s:g} s (slurm.ready_timeout_s)"
                self._end(server, "serve")
                raise _StepFailedError("serve", server.node, cause, EXIT_LAUNCH_FAILED, server.log, server.tail())

    def _finish(self, process: RemoteProcess, step: str, beside: RemoteProcess | None = None) -> int:
        """Wait for a driver's end; a request to drain ends it gracefully. Returns its exit code."""
        try:
            while not process.wait(_POLL_S):
                self._check()
                if beside is not None and not beside.running:
                    self._end(process, step)
                    cause = beside.why or f"the server ended with exit code {beside.code} while {step} ran"
                    code = _shell_code(beside.code or 1)
                    raise _StepFailedError("serve", beside.node, cause, code, beside.log, beside.tail())
        except _DrainRequestedError as request:
            self._say(f"draining: {request}")
            self._enter(JobPhase.DRAINING)
            return self._end(process, step)
        if process.code is None:
            raise NodeLostError(process.node, self._pool.lost(process.node) or process.why)
        if process.code != 0:
            cause = process.why or f"exit code {process.code}"
            raise _StepFailedError(step, process.node, cause, _shell_code(process.code), process.log, process.tail())
        return 0

    def _end(self, process: RemoteProcess, step: str) -> int:
        """SIGTERM, wait `drain_s`, kill. Returns the exit code."""
        process.signal(signal.SIGTERM)
        if not process.wait(self._slurm.drain_s):
            process.kill_tree()
            process.wait(5.0)
            cause = f"{step} did not end within {self._slurm.drain_s:g} s of SIGTERM (slurm.drain_s) and was killed"
            self._fail(Failure(0, 0, process.node, step, cause, None, str(process.log), process.tail()))
        return _shell_code(process.code if process.code is not None else -int(signal.SIGKILL))

    def _check(self) -> None:
        """Raise what changes the course: the loss of a node, or a request to end (once)."""
        if not self._pool.losses.empty():
            raise self._pool.losses.get()
        if self._ray is not None:
            for name, process in self._ray.processes.items():
                if not process.running and self._pool.lost(name) is None:
                    cause = process.why or f"Ray ended on {name} with exit code {process.code}"
                    raise _StepFailedError("ray", name, cause, EXIT_NODE_LOST, process.log, process.tail())
        if self._draining:
            return
        why = ""
        if not self._pool.signals.empty():
            node, number = self._pool.signals.get()
            why = f"{signal.Signals(number).name} on {node}"
        elif self._run.drain_request.exists():
            why = self._run.drain_request.read_text().strip() or "asked to drain"
        if why:
            self._draining = True
            raise _DrainRequestedError(why)

    def _tear_down(self) -> None:
        self._enter(JobPhase.STOPPING)
        if self._ray is not None:
            self._ray.close()
        silent = self._pool.stop(grace_s=3.0)
        if silent:
            cause = "did not confirm that its processes ended: " + ", ".join(silent)
            self._fail(Failure(0, 0, silent[0], "teardown", cause))
        self._say("torn down")

    def _public_url(self) -> str:
        host = self._config.server.host
        if host in ("0.0.0.0", "::"):
            host = self._nodes.addresses[self._nodes.head]
        return f"http://{host}:{self._config.server.port}"

    def _enter(self, phase: JobPhase, **changes: object) -> None:
        self._state = replace(self._state, phase=phase, since=self._job.now(), **changes)  # type: ignore[arg-type]
        self._job.write_state(self._state)

    def _fail(self, failure: Failure) -> None:
        failure = replace(failure, time=self._job.now(), attempt=self._run.attempt)
        self._job.add_failure(failure)
        self._say(f"FAILED: {failure.step} on {failure.node}: {failure.cause}")

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def _tail(log: Path, lines: int = 15) -> str:
    try:
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
    except OSError as error:
        return f"(no log: {error})"


def _shell_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::", "localhost") else host


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _port_taken(port: int) -> str:
    """Why this host cannot listen on `port`, or ""."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.strerror or str(error)
    return ""
