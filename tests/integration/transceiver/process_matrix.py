"""The fault matrix between real processes over a real fabric, each fault exactly at a step of the protocol.

``python -m tests.integration.transceiver.process_matrix`` prints it, one table a fabric. Holder and receiver are two
processes with a real `KvCacheManager` each. The fault happens in the loop of the process that it concerns, before the
message of a step leaves, while it is on its way, or when its receiver has acted on it (`step_hook`). In the direction
"gen->ctx" the two have handed a prompt over before, and the answer's blocks go back.

A cell is green when the fault happened, both sides reach a terminal state within its deadline (a reported death: a
second), every byte of a whole transfer is right or the failure has a reason, the pools of whoever lives are at rest and
pass `check_integrity()`, and the next transfer works: with a new process where one was killed.
"""

from __future__ import annotations

import argparse
import itertools
import queue
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

from tests.integration.transceiver.fabrics import NIXL, UCX_CMA, UCX_SHM, UCX_TCP, Fabric, is_installed
from tests.integration.transceiver.fault_matrix import DIRECTIONS, WHENS, Cell, CellResult, render
from tests.integration.transceiver.fault_peer import NEVER, start_fork_server, stop_fork_server
from tests.integration.transceiver.process_arena import Arena
from tests.integration.transceiver.process_cell import KINDS, STEPS, ProcessCell
from tests.integration.transceiver.two_hosts import namespace_pair

MANY = 100_000  # more than there are cells: every attempt has prompts of its own


def run_cell(arena: Arena, cell: Cell, number: int) -> CellResult:
    """Play one cell and look at everything. Once more when a busy machine let the time run out before the step came."""
    started = time.monotonic()
    for attempt in range(3):
        try:
            return CellResult(
                cell, ProcessCell(arena, cell, number + attempt * MANY).run(), 1, time.monotonic() - started
            )
        except AssertionError as error:
            result = CellResult(cell, "?", 0, time.monotonic() - started, str(error))
            arena.renew()
        if NEVER not in result.problem:
            break
    return result


def run_matrix(fabric: Fabric, cells: Iterable[Cell], jobs: int = 4, *, hosts: int = 1) -> list[CellResult]:
    """Run the cells, a few at a time, each pair of processes by a thread. `hosts` 2: in network namespaces (root)."""
    cells = list(cells)
    waiting: queue.SimpleQueue[tuple[int, Cell]] = queue.SimpleQueue()
    for item in enumerate(cells):
        waiting.put(item)
    results: dict[int, CellResult] = {}

    def work(job: int) -> None:
        with ExitStack() as stack:
            namespaces = stack.enter_context(namespace_pair(f"m{job}")) if hosts == 2 else ("", "")
            arena = Arena(fabric, job, namespaces)
            stack.callback(arena.close)
            while True:
                try:
                    number, cell = waiting.get_nowait()
                except queue.Empty:
                    return
                results[number] = run_cell(arena, cell, number)

    with fork_server(), ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(work, job) for job in range(min(jobs, len(cells)))]:
            future.result()
    return [results[number] for number in range(len(cells))]


@contextmanager
def fork_server() -> Iterator[None]:
    """The processes' common parent; it ends with the matrix."""
    start_fork_server()
    try:
        yield
    finally:
        stop_fork_server()


def all_cells() -> list[Cell]:
    """The whole matrix of a fabric. `cut` in a namespace is the cable, elsewhere the connection."""
    return [Cell(*parts) for parts in itertools.product(KINDS, STEPS, WHENS, DIRECTIONS)]


def cut_cells() -> list[Cell]:
    """The part of it that two network namespaces are for."""
    return [cell for cell in all_cells() if cell.kind == "cut"]


def table(results: list[CellResult]) -> str:
    """As the matrix over inproc is printed."""
    return render(results, KINDS, STEPS)


def main(arguments: list[str]) -> int:
    """Print the tables; 1 when a cell is not green."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = {fabric.transport: fabric for fabric in (UCX_SHM, UCX_CMA, UCX_TCP, NIXL) if is_installed(fabric)}
    parser.add_argument("--fabric", action="append", choices=sorted(known), help="default: all that are installed")
    parser.add_argument("--hosts", type=int, choices=(1, 2), action="append", help="2: cut between two namespaces")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--step", action="append", choices=STEPS)
    parser.add_argument("--when", action="append", choices=WHENS)
    parser.add_argument("--direction", action="append", choices=DIRECTIONS)
    parser.add_argument("--jobs", type=int, default=4)
    chosen = parser.parse_args(arguments)
    red = total = 0
    for name, hosts in itertools.product(chosen.fabric or known, chosen.hosts or (1, 2)):
        if hosts == 2 and name in (UCX_CMA.transport, UCX_SHM.transport):
            continue  # what is copied inside a host needs no network
        cells = [
            cell
            for cell in (all_cells() if hosts == 1 else cut_cells())
            if all(
                not wanted or getattr(cell, field) in wanted
                for field, wanted in vars(chosen).items()
                if field in ("kind", "step", "when", "direction")
            )
        ]
        began = time.monotonic()
        results = run_matrix(known[name], cells, chosen.jobs, hosts=hosts)
        print(f"== {name}, {hosts} host{'s' * (hosts > 1)}, {time.monotonic() - began:.0f} s", table(results), sep="\n")
        red, total = red + sum(bool(result.problem) for result in results), total + len(results)
    print(f"{total - red} of {total} cells green on all fabrics")
    return int(red > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
