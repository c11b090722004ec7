"""A real Slurm cluster (munged, slurmctld, several slurmd) on this one host.

For tests and for trying the recipes of docs/slurm.md. Everything lives under one temporary folder and every daemon is
a foreground child: `stop`, or the death of this process, removes it all. Used by tests/slurm/conftest.py; as a
program it runs one command on the virtual login node:

    python tests/slurm/virtual_slurm.py --nodes 3 -- sinfo
"""

from __future__ import annotations

import argparse
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.slurm.virtual_nodes import Machines, PortMachines, choose_machines, end, free_ports, spawn

__all__ = ["JobInfo", "VirtualSlurm", "missing_programs", "wait_for"]

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "setpriv")
KILL_WAIT_S = 8


def missing_programs() -> list[str]:
    """Programs of the Debian packages slurmctld, slurmd, slurm-client and munge that are not installed."""
    path = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    return [name for name in _PROGRAMS if shutil.which(name, path=path) is None]


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float, poll_s: float = 0.1) -> None:
    """Poll until `condition` holds. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(poll_s)


class JobInfo(dict[str, str]):
    """The key=value pairs that `scontrol show job` prints."""

    @property
    def state(self) -> str:
        return self.get("JobState", "UNKNOWN")

    @property
    def exit_code(self) -> int:
        return int(self.get("ExitCode", "0:0").split(":")[0])


class VirtualSlurm:
    """`nodes` virtual nodes and a controller. `start` it, `run` commands on its login node, `stop` it."""

    def __init__(
        self, root: Path, nodes: int = 4, cpus: int = 2, gpus: int = 0, machines: Machines | None = None
    ) -> None:
        self.root = root
        self._cpus = cpus
        self._gpus = gpus
        for folder in ("log", "run", "state", "spool"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        self.machines = machines if machines is not None else choose_machines(root, nodes)
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def names(self) -> list[str]:
        return self.machines.names

    @property
    def environment(self) -> dict[str, str]:
        """Environment of every daemon and command."""
        env = dict(os.environ)
        for key in [key for key in env if key.startswith(("SLURM", "SBATCH", "PYTEST_"))]:
            del env[key]
        env["SLURM_CONF"] = str(self.root / "slurm.conf")
        env["PATH"] = env.get("PATH", "/usr/bin:/bin") + ":/usr/sbin:/sbin"
        return env

    def start(self, timeout_s: float = 60.0) -> None:
        """Bring the cluster up and wait until every node is idle. Raises on failure, with nothing left running."""
        try:
            self.machines.start()
            self._write_configuration()
            self._start_munge(timeout_s)
            argv = self.machines.on_controller(["slurmctld", "-D", "-c"], self.root)
            self._daemons.append(spawn(argv, self.root / "log" / "slurmctld.out", self.environment))
            for name in self.names:
                self.boot(name)
            self.wait_idle(timeout_s)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop every daemon and remove the machines. Idempotent."""
        for daemon in reversed(self._daemons):
            end(daemon, grace_s=5.0)
        self._daemons.clear()
        self.machines.stop()

    def boot(self, name: str) -> None:
        """Start a node's slurmd (again)."""
        (self.root / "spool" / name).mkdir(exist_ok=True)
        self.machines.boot(name, self.root / "log" / f"{name}.out", self.environment)

    def crash_and_boot(self, name: str, timeout_s: float = 60.0) -> None:
        """Crash a node, wait until the controller calls it down, then boot it again."""
        self.machines.crash(name)

        def down() -> bool:
            return "down" in self.run(["sinfo", "-h", "-n", name, "-o", "%t"]).stdout

        wait_for(down, f"{name} is down", timeout_s, 0.5)
        self.boot(name)

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = 60.0,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        on_node: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, or on a live node. Never raises for its exit code."""
        folder = cwd if cwd is not None else self.root
        wrapped = (
            self.machines.on_controller(argv, folder)
            if on_node is None
            else self.machines.on_node(on_node, argv, folder)
        )
        return subprocess.run(
            wrapped,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**self.environment, **(env or {})},
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def job(self, job_id: int) -> JobInfo:
        """What the controller knows of a job."""
        done = self.run(["scontrol", "show", "job", "-o", str(job_id)])
        if done.returncode != 0:
            raise RuntimeError(f"scontrol show job {job_id}: {done.stderr.strip()}")
        return JobInfo(pair.split("=", 1) for pair in done.stdout.split() if "=" in pair)

    def wait_job(self, job_id: int, states: Sequence[str], timeout_s: float) -> JobInfo:
        """Wait until the job's state is one of `states`."""
        wait_for(lambda: self.job(job_id).state in states, f"job {job_id} in {'/'.join(states)}", timeout_s, 0.3)
        return self.job(job_id)

    def wait_idle(self, timeout_s: float = 30.0) -> None:
        """Wait until every node is idle."""

        def idle() -> bool:
            done = self.run(["sinfo", "-h", "-t", "idle", "-o", "%D"])
            counts = [int(word) for word in done.stdout.split() if word.isdigit()]
            return done.returncode == 0 and sum(counts) == len(self.names)

        try:
            wait_for(idle, f"{len(self.names)} idle nodes", timeout_s, 0.2)
        except TimeoutError as error:
            logs = [path for path in (self.root / "log").iterdir() if path.suffix in (".out", ".log")]
            tails = "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(logs))
            raise TimeoutError(f"{error}\n{tails}") from error

    def _start_munge(self, timeout_s: float) -> None:
        run = self.root / "run"
        key = self.root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        argv = [
            "munged",
            "-F",
            f"--key-file={key}",
            f"--socket={run / 'munge.sock'}",
            f"--pid-file={run / 'munged.pid'}",
        ]
        argv += [f"--log-file={run / 'munged.log'}", f"--seed-file={run / 'munged.seed'}", "--force"]
        if os.geteuid() == 0:
            owner = pwd.getpwnam("munge")
            for path in (run, key):
                os.chown(path, owner.pw_uid, owner.pw_gid)
            argv = ["setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", *argv]
        run.chmod(0o755)
        self._daemons.append(spawn(argv, self.root / "log" / "munged.out", self.environment))
        wait_for((run / "munge.sock").exists, f"munge's socket (see {self.root}/log/munged.out)", timeout_s)

    def _write_configuration(self) -> None:
        root, user = self.root, pwd.getpwuid(os.geteuid()).pw_name
        ports = isinstance(self.machines, PortMachines)
        lines = [
            "ClusterName=virtual",
            f"SlurmctldHost={self.machines.controller_line()}",
            f"SlurmUser={user}",
            f"SlurmdUser={user}",
            "AuthType=auth/munge",
            "CredType=cred/munge",
            # cred_expire is also how long a requeued job must wait
            f"AuthInfo=socket={root}/run/munge.sock,cred_expire=12",
            f"StateSaveLocation={root}/state",
            f"SlurmdSpoolDir={root}/spool/%n",
            f"SlurmctldPidFile={root}/run-slurmctld.pid",
            f"SlurmdPidFile={root}/run-slurmd-%n.pid",
            f"SlurmctldLogFile={root}/log/slurmctld.log",
            f"SlurmdLogFile={root}/log/slurmd-%n.log",
            f"JobCompType=jobcomp/filetxt\nJobCompLoc={root}/log/jobcomp.log",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres\nSelectTypeParameters=CR_Core",
            "SlurmdParameters=config_overrides",
            "MpiDefault=none\nSwitchType=switch/none\nJobAcctGatherType=jobacct_gather/none",
            "MailProg=/bin/true",
            f"ReturnToService=2\nInactiveLimit=0\nMinJobAge=600\nKillWait={KILL_WAIT_S}\nOverTimeLimit=0",
            "SlurmctldTimeout=30\nSlurmdTimeout=6",
            "SchedulerParameters=sched_interval=1,bf_interval=2,batch_sched_delay=0",
        ]
        if ports:
            lines.append(f"SlurmctldPort={free_ports(1)[0]}")
        if self._gpus:
            lines.append("GresTypes=gpu")
            (root / "gpu").mkdir(exist_ok=True)
            devices = [root / "gpu" / f"gpu{index}" for index in range(self._gpus)]
            for device in devices:
                device.touch()  # slurmd counts device files and looks no further
            (root / "gres.conf").write_text("".join(f"Name=gpu File={device}\n" for device in devices))
        lines.append(self.machines.node_lines(self._cpus, 6000, self._gpus))
        lines.append(
            "PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE DefaultTime=10 State=UP OverSubscribe=NO"
        )
        (root / "slurm.conf").write_text("\n".join(lines) + "\n")
        # without this slurmd looks for a cgroup hierarchy that a container may not show
        (root / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command on the login node of a fresh virtual cluster; returns its exit code."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--gpus", type=int, default=0, help="GPUs that every node claims (count only)")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    missing = missing_programs()
    if missing:
        print(
            f"missing programs: {', '.join(missing)} (apt-get install slurmctld slurmd slurm-client munge)",
            file=sys.stderr,
        )
        return 1
    with tempfile.TemporaryDirectory(prefix="virtual-slurm-") as folder:
        root = Path(folder)
        root.chmod(0o755)
        cluster = VirtualSlurm(root, options.nodes, gpus=options.gpus)
        cluster.start()
        try:
            command = cluster.machines.on_controller(options.command, Path.cwd())
            return subprocess.run(command, env=cluster.environment, check=False).returncode
        finally:
            cluster.stop()


if __name__ == "__main__":
    sys.exit(main())
