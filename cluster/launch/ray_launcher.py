"""Brings a Ray cluster up on the nodes of a job: head first, then one node after the other, each with bounded retries.

Called by `JobRunner`. A start counts only when the head's control store lists the node as alive: an open port proves
nothing. A failed attempt is killed with all its daemons before the next one. Ray's processes are shielded from Slurm's
SIGTERM so that the server can drain; they end when the node's agent does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from cluster.config.slurm_config import SlurmRayConfig
from cluster.launch.errors import LaunchError
from cluster.launch.job_folder import JobFolder, RunFolder
from cluster.launch.node_pool import NodePool
from cluster.launch.ray_membership import RayMembership
from cluster.launch.remote_process import RemoteProcess

__all__ = ["RayLauncher", "RayStartError", "ray_access"]

_ENV = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "PYTHONUNBUFFERED": "1",
}


def ray_access(job: JobFolder) -> dict[str, str]:
    """Environment that lets a process into the job's Ray cluster: it has a token of its own, not the user's."""
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(job.ray_token)}


class RayStartError(LaunchError):
    """Ray did not come up on a node; `node` and `log` say where to look."""

    def __init__(self, node: str, cause: str, log: Path) -> None:
        super().__init__(f"Ray did not start on {node}: {cause}")
        self.node = node
        self.cause = cause
        self.log = log


class RayLauncher:
    """Ray on the nodes of one pool. `start` once, then read `membership` and `processes`."""

    def __init__(
        self,
        pool: NodePool,
        config: SlurmRayConfig,
        run: RunFolder,
        *,
        python: str,
        env: Mapping[str, str],
        gpus_per_node: int,
        say: Callable[[str], None],
        check: Callable[[], None],
    ) -> None:
        """`check` is called while waiting; what it raises (a drain, a lost node) ends the wait."""
        self._pool = pool
        self._config = config
        self._run = run
        self._python = python
        self._env = {**_ENV, **ray_access(run.job), **env}
        self._gpus = gpus_per_node
        self._say = say
        self._check = check
        self.processes: dict[str, RemoteProcess] = {}
        self.membership: RayMembership | None = None

    def start(self, addresses: Mapping[str, str], resources: Mapping[str, Mapping[str, int]]) -> str:
        """Start Ray on every node of `addresses` (name -> IP, head first); returns the cluster's address.

        Blocks until all nodes are alive. Raises RayStartError after the last attempt on a node.
        """
        head, *others = addresses
        address = f"{addresses[head]}:{self._config.port}"
        self.membership = RayMembership(address, self._run.log("ray-members"), self._env)
        self.membership.start()
        role = ["--head", f"--port={self._config.port}", f"--include-dashboard={str(self._config.dashboard).lower()}"]
        if self._config.dashboard:
            role += ["--dashboard-host=0.0.0.0", f"--dashboard-port={self._config.dashboard_port}"]
        self._start_node(head, addresses[head], role, resources.get(head, {}))
        for name in others:
            self._start_node(name, addresses[name], [f"--address={address}"], resources.get(name, {}))
        return address

    def close(self) -> None:
        """Stop watching and kill Ray on every node."""
        if self.membership is not None:
            self.membership.close()
        for process in reversed(self.processes.values()):
            process.kill_tree()

    def _start_node(self, name: str, ip: str, role: list[str], resources: Mapping[str, int]) -> None:
        assert self.membership is not None
        argv = [self._python, "-m", "ray.scripts.scripts", "start", *role, f"--node-ip-address={ip}"]
        argv += [f"--resources={json.dumps(dict(resources))}", "--disable-usage-stats", "--block"]
        argv.append(f"--dashboard-agent-listen-port={self._config.agent_port}")
        if self._config.cpus_per_node is not None:
            argv.append(f"--num-cpus={self._config.cpus_per_node}")
        if self._gpus:
            argv.append(f"--num-gpus={self._gpus}")
        if self._config.object_store_mb is not None:
            argv.append(f"--object-store-memory={self._config.object_store_mb * 2**20}")
        log = self._run.log("ray", name)
        cause = ""
        for attempt in range(1, self._config.start_attempts + 1):
            self._say(f"ray on {name}: attempt {attempt} of {self._config.start_attempts}")
            began = time.monotonic()
            before = self.membership.alive
            process = self._pool.run(name, argv, log=log, env=self._env, shielded=True)
            cause = self._wait_alive(process, ip, before)
            if not cause:
                self._say(f"ray on {name} ({ip}): alive after {time.monotonic() - began:.1f} s")
                self.processes[name] = process
                return
            self._say(f"ray on {name}: attempt {attempt} failed: {cause}")
            process.kill_tree()
            process.wait(10)
            process.kill_tree()  # daemons that its end left to the agent
            if not self.membership.wait_for(lambda alive: ip not in alive, 1.0):
                self._say(f"ray on {name}: the head still lists the failed attempt as alive")
        raise RayStartError(name, f"{cause} ({self._config.start_attempts} attempts)", log)

    def _wait_alive(self, process: RemoteProcess, ip: str, before: frozenset[str]) -> str:
        """ "" when the node is alive, else why not."""
        assert self.membership is not None
        deadline = time.monotonic() + self._config.start_timeout_s

        def joined(alive: frozenset[str]) -> bool:  # Ray puts the host's own address in place of a loopback one
            return ip in alive or (ip.startswith("127.") and bool(alive - before))

        while time.monotonic() < deadline:
            if self.membership.wait_for(joined, 0.3):
                return ""
            self._check()
            if not process.running:
                return process.why or f"`ray start` ended with exit code {process.code}"
        waiting = self.membership.waiting
        return f"not alive within {self._config.start_timeout_s:g} s" + (f" ({waiting})" if waiting else "")
