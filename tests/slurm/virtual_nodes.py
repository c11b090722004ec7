"""The machines of the virtual Slurm cluster: where a daemon or a user's command runs.

`NamespaceMachines` (root only) gives every node its own network, host name, IPC, process and mount namespaces, so
that a node has an address, a process list and a /dev/shm of its own and can crash like a machine. `PortMachines` is
the fallback: all nodes are this host and differ by the port of their slurmd. Owned by `VirtualSlurm`; every process
started here is a foreground child that the kernel kills when the test process dies. Namespaces have no names in the
file system, so nothing can be left behind.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

__all__ = ["CONTROLLER", "Machines", "NamespaceMachines", "PortMachines", "choose_machines"]

CONTROLLER = "ctl"
_SUBNET = "10.77.0"
_DIE_WITH_PARENT = ["setpriv", "--pdeathsig", "KILL"]


class Machines(ABC):
    """A controller machine and `count` nodes called node1 .. nodeN."""

    separate_addresses: bool

    def __init__(self, root: Path, count: int) -> None:
        self.root = root
        self.names = [f"node{index + 1}" for index in range(count)]

    @abstractmethod
    def start(self) -> None:
        """Make the machines (not their daemons). Raises RuntimeError when the host does not allow it."""

    @abstractmethod
    def stop(self) -> None:
        """Remove what `start` made. Idempotent."""

    @abstractmethod
    def controller_line(self) -> str:
        """Value of SlurmctldHost."""

    @abstractmethod
    def node_lines(self, cpus: int, memory_mb: int, gpus: int) -> str:
        """NodeName lines of slurm.conf."""

    @abstractmethod
    def on_controller(self, argv: Sequence[str], cwd: Path) -> list[str]:
        """`argv` wrapped so that it runs on the controller machine."""

    @abstractmethod
    def on_node(self, name: str, argv: Sequence[str], cwd: Path) -> list[str]:
        """`argv` wrapped so that it runs beside a live node's slurmd (same address, same processes)."""

    @abstractmethod
    def boot(self, name: str, log: Path, env: dict[str, str]) -> None:
        """Start the node's slurmd."""

    @abstractmethod
    def crash(self, name: str) -> None:
        """Kill everything that runs on the node, at once. It can be booted again."""

    @abstractmethod
    def address(self, name: str) -> str:
        """IP address of a node."""


def spawn(argv: Sequence[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """Start a foreground child in its own session; output goes to `log`; it dies with this process."""
    with log.open("ab") as out:
        return subprocess.Popen(
            [*_DIE_WITH_PARENT, *argv],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes], grace_s: float = 0.0) -> None:
    """Stop a child made by `spawn` and everything in its session's process group."""
    if process.poll() is None and grace_s > 0:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


class NamespaceMachines(Machines):
    """One set of namespaces a node, joined by a bridge in a namespace of its own."""

    separate_addresses = True

    def __init__(self, root: Path, count: int) -> None:
        super().__init__(root, count)
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._made_ray_folder = False

    def start(self) -> None:
        hosts = ["127.0.0.1 localhost", f"{_SUBNET}.10 {CONTROLLER}"]
        hosts += [f"{self.address(name)} {name}" for name in self.names]
        (self.root / "hosts").write_text("\n".join(hosts) + "\n")
        ray_folder = Path("/tmp/ray")
        if not ray_folder.exists():
            ray_folder.mkdir()
            self._made_ray_folder = True
        self._hold("switch", "ip link set lo up; ip link add br0 type bridge; ip link set br0 up")
        hosts_file = shlex.quote(str(self.root / "hosts"))
        self._hold(CONTROLLER, f"hostname {CONTROLLER}; mount --bind {hosts_file} /etc/hosts; ip link set lo up")
        for name in self.names:
            self._hold(name, "ip link set lo up")
        for index, name in enumerate([CONTROLLER, *self.names]):
            address = f"{_SUBNET}.{10 + index}/24"
            pid = self._holders[name].pid
            self._in_net("switch", f"ip link add p{index} type veth peer name e0 netns {pid}")
            self._in_net("switch", f"ip link set p{index} master br0 up")
            self._in_net(
                name, f"ip addr add {address} dev e0; ip link set e0 up; ip route add default via {_SUBNET}.10"
            )

    def stop(self) -> None:
        for process in self._nodes.values():
            end(process)
        for process in self._holders.values():
            end(process)
        self._nodes.clear()
        self._holders.clear()
        if self._made_ray_folder:
            self._made_ray_folder = False
            with contextlib.suppress(OSError):  # somebody else put files there meanwhile: theirs now
                Path("/tmp/ray").rmdir()

    def controller_line(self) -> str:
        return f"{CONTROLLER}({_SUBNET}.10)"

    def node_lines(self, cpus: int, memory_mb: int, gpus: int) -> str:
        gres = f" Gres=gpu:{gpus}" if gpus else ""
        return "\n".join(
            f"NodeName={name} NodeAddr={self.address(name)} CPUs={cpus} RealMemory={memory_mb}{gres} State=UNKNOWN"
            for name in self.names
        )

    def on_controller(self, argv: Sequence[str], cwd: Path) -> list[str]:
        pid = str(self._holders[CONTROLLER].pid)
        return ["nsenter", "-t", pid, "-n", "-u", "-m", "env", "-C", str(cwd), *argv]

    def on_node(self, name: str, argv: Sequence[str], cwd: Path) -> list[str]:
        inner = _only_child(self._nodes[name].pid)
        return ["nsenter", "-t", str(inner), "-n", "-u", "-m", "-i", "-p", "env", "-C", str(cwd), *argv]

    def boot(self, name: str, log: Path, env: dict[str, str]) -> None:
        if name in self._nodes and self._nodes[name].poll() is None:
            raise RuntimeError(f"{name} is up already")
        hosts_file = shlex.quote(str(self.root / "hosts"))
        script = (
            f"hostname {name}; mount --bind {hosts_file} /etc/hosts; mount -t tmpfs -o size=1g tmpfs /dev/shm; "
            "mount -t tmpfs -o size=1g tmpfs /tmp/ray; "
            # UCX looks for network devices in /sys: it must show this node's. slurmd wants a cgroup folder there.
            "mount -t sysfs sysfs /sys; mount -t tmpfs tmpfs /sys/fs/cgroup; "
            f"slurmd -D -N {name} & slurmd=$!; trap 'kill $slurmd' TERM; wait $slurmd; wait"
        )
        namespaces = ["--kill-child", "--uts", "--ipc", "--pid", "--fork", "--mount-proc", "--mount"]
        net = f"--net=/proc/{self._holders[name].pid}/ns/net"
        self._nodes[name] = spawn(
            ["nsenter", net, "unshare", *namespaces, "--propagation", "private", "bash", "-c", script], log, env
        )

    def crash(self, name: str) -> None:
        process = self._nodes.pop(name)
        process.kill()
        process.wait(10)

    def address(self, name: str) -> str:
        return f"{_SUBNET}.{11 + self.names.index(name)}"

    def _hold(self, name: str, setup: str) -> None:
        """A sleeping process keeps the machine's network (and, for the controller, its host name and mounts)."""
        script = f"set -e; {setup}; echo ready; exec sleep infinity"
        log = self.root / "log" / f"machine-{name}.log"
        namespaces = ["--net", "--uts", "--mount", "--propagation", "private"]
        self._holders[name] = spawn(["unshare", *namespaces, "bash", "-c", script], log, dict(os.environ))
        holder = self._holders[name]
        for _ in range(500):
            if log.exists() and log.read_text().endswith("ready\n"):
                return
            try:
                holder.wait(0.01)
            except subprocess.TimeoutExpired:
                continue
            break
        raise RuntimeError(f"cannot make the namespaces of {name}: {log.read_text().strip()}")

    def _in_net(self, name: str, script: str) -> None:
        command = ["nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net", "bash", "-ec", script]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"network of {name}: {script}: {done.stderr.strip()}")


class PortMachines(Machines):
    """Every node is this host; a node is a slurmd on a port of its own."""

    separate_addresses = False

    def __init__(self, root: Path, count: int) -> None:
        super().__init__(root, count)
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._ports: dict[str, int] = {}

    def start(self) -> None:
        ports = free_ports(len(self.names))
        self._ports = dict(zip(self.names, ports, strict=True))

    def stop(self) -> None:
        for process in self._nodes.values():
            end(process)
        self._nodes.clear()
        for pid in self.left_over():  # steps of jobs that ran until now: nobody else would end them
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left_over(self) -> list[int]:
        """Processes of this cluster: those that have its slurm.conf in their environment."""
        marker = b"SLURM_CONF=" + os.fsencode(self.root / "slurm.conf") + b"\0"
        found = []
        for name in os.listdir("/proc"):
            if name.isdigit() and int(name) != os.getpid():
                with contextlib.suppress(OSError):
                    if marker in Path(f"/proc/{name}/environ").read_bytes() + b"\0":
                        found.append(int(name))
        return found

    def controller_line(self) -> str:
        return "localhost(127.0.0.1)"

    def node_lines(self, cpus: int, memory_mb: int, gpus: int) -> str:
        gres = f" Gres=gpu:{gpus}" if gpus else ""
        return "\n".join(
            f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={port} CPUs={cpus} RealMemory={memory_mb}"
            f"{gres} State=UNKNOWN"
            for name, port in self._ports.items()
        )

    def on_controller(self, argv: Sequence[str], cwd: Path) -> list[str]:
        return ["env", "-C", str(cwd), *argv]

    def on_node(self, name: str, argv: Sequence[str], cwd: Path) -> list[str]:
        return ["env", "-C", str(cwd), *argv]

    def boot(self, name: str, log: Path, env: dict[str, str]) -> None:
        self._nodes[name] = spawn(["slurmd", "-D", "-N", name], log, env)

    def crash(self, name: str) -> None:
        end(self._nodes.pop(name))

    def address(self, name: str) -> str:
        return "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """TCP ports of this host that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _only_child(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    if not children:
        raise RuntimeError(f"process {pid} has no child: the node is down")
    return int(children[0])


def choose_machines(root: Path, count: int) -> Machines:
    """Namespaces where this process may make them, else ports (also with KVFERRY_SLURM_MACHINES=ports)."""
    if os.environ.get("KVFERRY_SLURM_MACHINES") == "ports":
        return PortMachines(root, count)
    probe = "ip link set lo up && ip link add kvf0 type bridge && mount -t tmpfs tmpfs /mnt"
    command = ["unshare", "--net", "--uts", "--ipc", "--pid", "--fork", "--mount", "bash", "-ec", probe]
    if os.geteuid() == 0:
        try:
            done = subprocess.run(command, capture_output=True, timeout=20, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return PortMachines(root, count)
        if done.returncode == 0:
            return NamespaceMachines(root, count)
    return PortMachines(root, count)
