"""`run_transceiver_test`: every sweep on fresh processes, the report, the verdict.

Called by `kvferry transceiver-test`, on one machine or, with the nodes of a Slurm job, over two of them.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.config.errors import ConfigError, ConfigProblem
from cluster.launch import job_addresses
from cluster.launch.node_pool import make_token_file
from cluster.transceiver_test.cells import CellResult, CellStatus, cells_of_sweep
from cluster.transceiver_test.config import HostTransferConfig, SweepConfig, TransceiverTestConfig
from cluster.transceiver_test.forced import Forced, unknown_cells
from cluster.transceiver_test.geometry import ranks_of
from cluster.transceiver_test.rank_pool import RankCallError, RankHungError, RankPool
from cluster.transceiver_test.report import failed_cells, print_results, write_results
from cluster.transceiver_test.sweep_runner import SweepRunner

__all__ = ["TestOptions", "nodes_of_job", "run_transceiver_test"]


@dataclass(frozen=True, slots=True)
class TestOptions:
    """How to run a test.

    nodes    hosts of a Slurm job; context ranks go to the first, generation ranks to the last; empty = this machine
    allowed  names of cells that may fail
    """

    output: Path
    nodes: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    host_transfer: bool = False
    forced: Forced = field(default_factory=Forced)


def run_transceiver_test(config: TransceiverTestConfig, options: TestOptions, console: Console) -> int:
    """Run all sweeps, write and print the results; 0 when every cell passed (or was allowed to fail), else 1.

    Results that are there are written whatever ends the run. Raises ConfigError, before anything runs, when a name in
    `options` means no cell or the output folder cannot be written.
    """
    if problems := unknown_cells(config, options.forced, options.allowed):
        raise ConfigError(problems)
    token_file = options.output / "token"
    token = _prepare(options.output, token_file)
    variables = sorted({"UCX_TLS", *(key for sweep in config.ucx_env_sweep for key in sweep.env)})
    results: list[CellResult] = []
    raw: list[dict[str, Any]] = []

    def report(result: CellResult) -> None:
        results.append(result)
        speed = "" if result.per_rank is None else f"  {result.per_rank:.3f} GB/s a rank over {result.transport}"
        detail = f"  {result.detail}" if result.detail else ""
        console.print(f"{result.status:15} {result.cell.name}{speed}{detail}", markup=False, highlight=False)

    try:
        for sweep in config.ucx_env_sweep:
            environment = " ".join(f"{key}={value}" for key, value in sweep.env.items()) or "no variables"
            console.print(f"sweep {sweep.name}: {environment}", highlight=False)
            _run_sweep(config, sweep, options, token, token_file, variables, report, raw)
    finally:
        token_file.unlink()
        written = write_results(options.output, results, raw)
    print_results(console, results, raw)
    for path in written:
        console.print(f"written: {path}", highlight=False)
    failed = failed_cells(results, options.allowed)
    passed = sum(result.status is CellStatus.PASS for result in results)
    console.print(f"{passed} of {len(results)} cells passed, {len(failed)} failed", highlight=False)
    return 1 if failed or not results else 0


def _prepare(output: Path, token_file: Path) -> bytes:
    """Make the folder of the results and the ranks' token in it. Raises ConfigError when that cannot be."""
    try:
        (output / "logs").mkdir(parents=True, exist_ok=True)
        return make_token_file(token_file)
    except OSError as error:
        why = f"cannot write into {output}: {error.strerror or error}"
        raise ConfigError([ConfigProblem("--output", why, "name a folder that this user can write")]) from error


def _run_sweep(
    config: TransceiverTestConfig, sweep: SweepConfig, options: TestOptions, token: bytes, token_file: Path,
    variables: Sequence[str], report: Callable[[CellResult], None], raw: list[dict[str, Any]],
) -> None:  # fmt: skip
    logs = options.output / "logs" / sweep.name
    logs.mkdir(parents=True, exist_ok=True)
    advertise = _own_address(options.nodes)
    pool = RankPool(
        token, token_file, logs, bind="" if options.nodes else "127.0.0.1", advertise=advertise,
        watchdog_s=min(config.run.timeout_per_cell_s + 30.0, max(30.0, config.run.max_sweep_s - 15.0)),
    )  # fmt: skip
    ranks = [
        (f"{role}-{rank}", (options.nodes[0] if role == "ctx" else options.nodes[-1]) if options.nodes else None)
        for role, rank in ranks_of(config)
    ]
    try:
        pool.start(ranks, sweep.env, variables, config.run.start_timeout_s)
    except RankHungError as error:
        for case in cells_of_sweep(config, sweep.name):
            for cell in case:
                report(CellResult(cell, CellStatus.TRANSFER_ERROR, f"no processes: {error}"))
        pool.kill()
        return
    runner = SweepRunner(config, sweep, pool, options.forced, report)
    healthy = False
    try:
        healthy = runner.run()
        if healthy and options.host_transfer and len(ranks) > 1:
            row, healthy = _raw_fabric(pool, sweep.name, config.host_transfer)
            raw.append(row)
    finally:
        if healthy:
            pool.quit()
        else:
            pool.kill()


def _raw_fabric(pool: RankPool, sweep: str, config: HostTransferConfig) -> tuple[dict[str, Any], bool]:
    """A plain TCP connection between the first ranks of both sides, every byte compared; and whether both answered."""
    row: dict[str, Any] = {"sweep": sweep, "mode": "tcp_socket", "bytes": config.bytes_per_transfer}
    try:
        host, port = pool.call("ctx-0", "raw_listen", 30.0, nbytes=config.bytes_per_transfer)
        count = config.warmup + config.samples
        seconds = pool.call(
            "gen-0", "raw_receive", 120.0, host=host, port=port, nbytes=config.bytes_per_transfer, count=count
        )
    except (RankCallError, RankHungError) as error:
        answered = isinstance(error, RankCallError)
        return {**row, "median_GBps": 0.0, "samples": [], "error": str(error)}, answered
    speeds = [config.bytes_per_transfer / value / 1e9 for value in seconds[config.warmup :]]
    return {**row, "median_GBps": statistics.median(speeds), "samples": speeds, "byte_correct": True}, True


def _own_address(nodes: Sequence[str]) -> str:
    """Address of this host for ranks on `nodes`."""
    if not nodes:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((job_addresses(nodes)[nodes[-1]], 9))
        return str(probe.getsockname()[0])


def nodes_of_job() -> tuple[str, ...]:
    """Nodes of the Slurm job that this process runs in, as the batch script told them; empty outside of one."""
    return tuple(os.environ.get("KVFERRY_JOB_NODES", "").split())
