"""The pool and its agents as real processes on this host: run, signal, shield, lose, clean up."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cluster.launch.errors import LinkError
from cluster.launch.node_link import open_link
from cluster.launch.node_pool import NodePool, make_token_file
from cluster.launch.process_tree import descendants


def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def agents() -> set[int]:
    """Node agents that this test run has started."""
    return {pid for pid in descendants(os.getpid()) if b"node_agent" in Path(f"/proc/{pid}/cmdline").read_bytes()}


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[NodePool]:
    before = agents()
    token = make_token_file(tmp_path / "token")
    pool = NodePool(["a", "b"], token)
    pool.start()
    for name in pool.names:
        pool.spawn_local(name, tmp_path / "token", tmp_path / f"agent-{name}.log")
    assert pool.wait_joined(20.0) == []
    yield pool
    pool.stop(0.5)
    assert not agents() - before


def test_the_token_is_for_the_owner_only(tmp_path: Path) -> None:
    make_token_file(tmp_path / "token")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600


def test_runs_with_environment_and_reports_the_exit_code(pool: NodePool, tmp_path: Path) -> None:
    argv = ["bash", "-c", "echo $COLOUR ${HOME-none}; exit 7"]
    process = pool.run("a", argv, log=tmp_path / "log", env={"COLOUR": "blue"}, unset=["HOME"])
    assert process.wait(10)
    assert (process.code, process.tail()) == (7, "blue none")


def test_a_program_that_does_not_exist_is_an_exit_with_its_reason(pool: NodePool, tmp_path: Path) -> None:
    process = pool.run("a", ["/no/such/program"], log=tmp_path / "log")
    assert process.wait(10)
    assert process.code == 127
    assert "No such file" in process.why


def test_a_signal_reaches_the_whole_group(pool: NodePool, tmp_path: Path) -> None:
    process = pool.run("b", ["bash", "-c", "sleep 1000 & wait"], log=tmp_path / "log")
    process.signal(signal.SIGTERM)
    assert process.wait(10)
    assert process.code == -signal.SIGTERM


def test_a_shielded_process_does_not_get_sigterm(pool: NodePool, tmp_path: Path) -> None:
    script = "import signal; print(sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), flush=True); signal.pause()"
    process = pool.run("a", [sys.executable, "-c", script], log=tmp_path / "log", shielded=True)
    assert eventually(lambda: "SIGTERM" in process.tail())
    process.signal(signal.SIGTERM)
    assert not process.wait(0.3)
    process.signal(signal.SIGKILL)
    assert process.wait(10)


def test_stop_kills_daemons_too(tmp_path: Path) -> None:
    token = make_token_file(tmp_path / "token")
    pool = NodePool(["a"], token)
    pool.start()
    pool.spawn_local("a", tmp_path / "token", tmp_path / "agent.log")
    assert pool.wait_joined(20.0) == []
    argv = ["bash", "-c", "trap '' TERM; setsid sleep 1234 & echo $!; exit 0"]
    process = pool.run("a", argv, log=tmp_path / "log")
    assert process.wait(10)
    daemon = int(process.tail())
    assert Path(f"/proc/{daemon}").exists()
    assert pool.stop(0.5) == []
    assert eventually(lambda: not Path(f"/proc/{daemon}").exists())


def test_a_killed_agent_is_a_lost_node_and_its_processes_end(pool: NodePool, tmp_path: Path) -> None:
    process = pool.run("a", ["bash", "-c", "echo $$; exec sleep 60"], log=tmp_path / "log")
    assert eventually(lambda: process.tail().isdigit())
    agent = next(child for child in pool._local if "a" in child.args)  # type: ignore[operator]
    agent.kill()
    loss = pool.losses.get(timeout=10)
    assert loss.node == "a"
    assert process.wait(10)
    assert process.code is None
    assert "a is lost" in process.why
    assert pool.lost("b") is None
    os.kill(int(process.tail()), signal.SIGKILL)  # in a job, Slurm does this


def test_a_missing_node_is_named(tmp_path: Path) -> None:
    token = make_token_file(tmp_path / "token")
    pool = NodePool(["here", "gone"], token)
    pool.start()
    pool.spawn_local("here", tmp_path / "token", tmp_path / "agent.log")
    assert pool.wait_joined(3.0) == ["gone"]
    pool.stop(0.1)


def test_a_stranger_is_refused(tmp_path: Path) -> None:
    pool = NodePool(["a"], b"secret")
    pool.start()
    with pytest.raises(LinkError, match=r"token|closed"):
        open_link("127.0.0.1", pool.port, b"wrong", 5.0)
    with socket.create_connection(("127.0.0.1", pool.port)) as silent:  # holds nobody up
        silent.sendall(b"GET / HTTP/1.1\r\n\r\n")
        link = open_link("127.0.0.1", pool.port, b"secret", 5.0)
        link.close()
    pool.stop(0.1)


def test_python_is_the_agents_own(pool: NodePool, tmp_path: Path) -> None:
    process = pool.run("a", ["python", "-c", "import sys; print(sys.prefix)"], log=tmp_path / "log")
    assert process.wait(10)
    assert process.tail() == sys.prefix
