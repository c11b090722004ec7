"""What srun starts, once on each node of a job: the node's agent, and on the first node the runner beside it.

`python -m cluster.launch.slurm_task --folder F`. The batch script tells the nodes in KVFERRY_JOB_NODES and the run's
number in SLURM_RESTART_COUNT; nothing else is taken from the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from cluster.config import load_config
from cluster.launch import node_agent
from cluster.launch.allocation import allocate
from cluster.launch.head_loss import report_head_loss
from cluster.launch.job_addresses import job_addresses
from cluster.launch.job_folder import Failure, JobFolder, RunFolder, replace_json
from cluster.launch.job_runner import EXIT_LAUNCH_FAILED, JobNodes, JobRunner
from cluster.launch.node_pool import NodePool

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run this node's part of the job; returns the exit code of the task."""
    parser = argparse.ArgumentParser(prog="kvferry slurm task")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--control-port", type=int, required=True)
    options = parser.parse_args(argv)
    names = os.environ["KVFERRY_JOB_NODES"].split()
    here = os.environ.get("SLURMD_NODENAME", names[0])
    config = load_config(options.folder / "config.yaml")
    assert config.slurm is not None
    attempt = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    run = JobFolder(options.folder).run(attempt)
    if here != names[0]:
        return node_agent.main(
            [
                *("--name", here, "--head", f"{job_addresses(names)[names[0]]}:{options.control_port}"),
                *("--token-file", str(options.folder / "token")),
                *("--join-timeout", str(config.slurm.join_timeout_s)),
                *("--signal-grace", str(config.slurm.drain_s + 15.0)),
            ],
            on_head_lost=partial(report_head_loss, run, names[0], here),
        )
    # Slurm's signals reach the agent on this node too, which reports them; the runner must outlive them to clean up.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    allocation, _ = allocate(config, config.slurm)
    addresses = _addresses(names)
    replace_json(run.job.allocation, allocation.to_dict(tuple(names)))
    token = bytes.fromhex((options.folder / "token").read_text().strip())
    pool = NodePool(names, token, host="", port=options.control_port)
    try:
        pool.start()
    except OSError as error:
        return _fail_early(run, here, f"control port {options.control_port} is taken on {here}: {error.strerror}")
    print(json.dumps({"nodes": addresses, "attempt": attempt}), flush=True)
    pool.spawn_local(here, options.folder / "token", run.log("nodes", here))
    return JobRunner(config, config.slurm, allocation, JobNodes(addresses), pool, run).run()


def _addresses(names: Sequence[str]) -> dict[str, str]:
    """IP of each node. This host's own name often means loopback here, so its address is asked of a route."""
    found = {name: socket.gethostbyname(address) for name, address in job_addresses(names).items()}
    head = names[0]
    if found[head].startswith("127."):
        towards = found[names[1]] if len(names) > 1 else "192.0.2.1"  # an address of no host: nothing is sent
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
            probe.connect((towards, 9))
            found[head] = str(probe.getsockname()[0])
    return found


def _fail_early(run: RunFolder, node: str, cause: str) -> int:
    run.job.add_failure(Failure(run.job.now(), run.attempt, node, "nodes", cause, EXIT_LAUNCH_FAILED))
    run.exit_code.write_text(f"{EXIT_LAUNCH_FAILED}\n")
    print(cause, file=sys.stderr, flush=True)
    return EXIT_LAUNCH_FAILED


if __name__ == "__main__":
    sys.exit(main())
