"""The transfer benchmark: every case interleaved round by round with its yardsticks, medians compared."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cluster.bench.transfer.holder_process import SECRET, HolderProcess
from cluster.bench.transfer.pools import PAGE_LAYOUTS, Shape, block_table, copy_pages, filled_storage
from cluster.bench.transfer.rows import BenchRow
from cluster.bench.transfer.yardsticks import perftest_bandwidth, ray_store, socket_bandwidth
from transceiver import CacheTransceiver, CacheTransceiverConfig, TransferOutcome
from transceiver.parallel_layout import Interval, RankShare

__all__ = ["run_transfer_bench"]

MIB = 1 << 20
_names = itertools.count()
Report = Callable[[str], None]


@dataclass(slots=True)
class _Measured:
    """Rounds of one case: seconds of the transfer (request to last byte, and to the end) and of the copy."""

    nbytes: int
    transport: str = ""
    data: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.nbytes / statistics.median(self.data)

    @property
    def r(self) -> float:
        return statistics.median(self.copy) / statistics.median(self.data)


class _Link:
    """A holder process and this process's receiver, with pools of one kind."""

    def __init__(
        self, layout: str, pages: int, settings: dict[str, Any], *, here: str | None = None,
        shares: tuple[RankShare, RankShare] | None = None,
    ) -> None:  # fmt: skip
        self._stack = contextlib.ExitStack()
        self.pages = pages
        self.holder = self._stack.enter_context(HolderProcess(layout, pages, settings, shares and shares[0]))
        self.storage = filled_storage(PAGE_LAYOUTS[here or layout], pages, 0)
        self.source = filled_storage(PAGE_LAYOUTS[here or layout], pages, 7)
        self._stack.callback(self.source.close)
        self._stack.callback(self.storage.close)
        self.transceiver = self._stack.enter_context(
            CacheTransceiver(
                worker_id="bench-receiver",
                storage=self.storage,
                config=CacheTransceiverConfig(**settings),
                secret=SECRET,
                shares=(shares[1],) if shares else None,
            )
        )
        self.rng = np.random.default_rng(1)

    def __enter__(self) -> _Link:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def pull(self, shape: Shape) -> tuple[TransferOutcome, Any, Any]:
        """One transfer; (outcome, pages here, pages there)."""
        theirs, mine = shape.pages(self.pages, self.rng), shape.pages(self.pages, self.rng)
        ticket = self.holder.offer(f"bench-{next(_names)}", theirs)
        pull = self.transceiver.pull(ticket, (block_table(mine),), conversation_id=None, scope=b"", timeout_s=60)
        outcome = pull.future.result(60)
        pull.settled.result(10)
        status = self.holder.outcome()
        if outcome.status.value != "done" or status != "done":
            raise RuntimeError(f"a benchmark transfer failed: {outcome.reason}")
        return outcome, mine, theirs

    def measure(self, shape: Shape, rounds: int, beside: Callable[[], None] = lambda: None) -> _Measured:
        """`rounds` interleaved rounds after one that only warms up."""
        result = _Measured(shape.count * self.storage.region().page_bytes)
        for index in range(rounds + 1):
            outcome, mine, theirs = self.pull(shape)
            started = time.perf_counter()
            copy_pages(self.storage, self.source, mine, theirs, shape.run)
            copied = time.perf_counter() - started
            beside()
            if index:
                result.transport, result.nbytes = outcome.transport, outcome.bytes
                result.data.append(outcome.seconds["prepare"] + outcome.seconds["transfer"])
                result.total.append(outcome.seconds["total"])
                result.copy.append(copied)
        return result


def run_transfer_bench(rounds: int = 5, *, with_ray: bool = True, report: Report = lambda text: None) -> list[BenchRow]:
    """All cases on this machine; takes a minute or two. `report` is told what is being measured."""
    rows: list[BenchRow] = []
    perftest: list[float] = []
    ray_rates: list[float] = []

    def measure_perftest() -> None:
        rate = perftest_bandwidth(64 * MIB)
        if rate is not None:
            perftest.append(rate)

    report("contiguous, scattered and runs, digests off")
    with contextlib.ExitStack() as stack:
        link = stack.enter_context(_Link("64K", 4096, {"verify": False}))
        store = stack.enter_context(ray_store()) if with_ray else None

        def beside() -> None:
            measure_perftest()
            if store is not None:
                ray_rates.append(store(64 * MIB))

        contiguous = link.measure(Shape(1024, 1024), rounds, beside)
        rows.append(_row("contiguous 64 MiB", contiguous, 0.95, perftest, ray_rates))
        for name, run, goal in (("1,024 scattered 64 KiB pages", 1, 0.7), ("runs of 1 MiB", 16, 1.0)):
            rows.append(_row(name, link.measure(Shape(1024, run), rounds), goal, perftest, ray_rates))
        rows.append(_overhead(link.measure(Shape(8, 8), max(rounds, 20)), "hand-off of 8 blocks, digests off"))
    report("digests on")
    with _Link("1M", 256, {"verify": False}) as plain, _Link("1M", 256, {"verify": True}) as checked:
        without = plain.measure(Shape(64, 1), rounds)
        with_digests = checked.measure(Shape(64, 1), rounds)
        ratio = statistics.median(with_digests.total) / statistics.median(without.total)
        rows.append(_row("64 blocks of 1 MiB, digests on", with_digests, None))
        rows.append(
            BenchRow(
                "time with digests over without",
                with_digests.transport,
                r=ratio,
                rounds=rounds,
                goal="<= 1.5",
                met=ratio <= 1.5,
            )
        )
        rows.append(_overhead(checked.measure(Shape(8, 1), max(rounds, 20)), "hand-off of 8 blocks, digests on"))
        report("unlike layouts")
        rows += _unlike(without, rounds)
    report("TCP")
    sockets = [socket_bandwidth(64 * MIB) for _ in range(rounds)]
    with _Link("64K", 4096, {"verify": False, "ucx_tls": "tcp"}) as link:
        tcp = link.measure(Shape(1024, 1024), rounds)
    ratio = tcp.rate / statistics.median(sockets)
    rows.append(_row("contiguous 64 MiB over TCP", tcp, None))
    rows.append(
        BenchRow("TCP over a raw socket", tcp.transport, r=ratio, rounds=rounds, goal=">= 0.9", met=ratio >= 0.9)
    )
    report("death of a peer")
    rows.append(_death(rounds))
    return rows


def _row(
    case: str,
    measured: _Measured,
    goal: float | None,
    perftest: list[float] | None = None,
    ray: list[float] | None = None,
) -> BenchRow:
    return BenchRow(
        case, measured.transport, r=measured.r,
        vs_ucx_perftest=measured.rate / statistics.median(perftest) if perftest else None,
        vs_ray=measured.rate / statistics.median(ray) if ray else None,
        gbytes_per_s=measured.rate / 1e9, rounds=len(measured.data),
        milliseconds=statistics.median(measured.data) * 1e3,
        goal=f"r >= {goal}" if goal else "", met=measured.r >= goal if goal else None,
    )  # fmt: skip


def _overhead(measured: _Measured, case: str) -> BenchRow:
    fixed = (statistics.median(measured.total) - statistics.median(measured.copy)) * 1e3
    return BenchRow(
        case,
        measured.transport,
        rounds=len(measured.data),
        milliseconds=fixed,
        goal="< 1 ms over the copy",
        met=fixed < 1,
    )


def _unlike(equal: _Measured, rounds: int) -> list[BenchRow]:
    """Half of the heads into whole pages, and a quarter into halves: rate over that of equal layouts."""
    rows = []
    cases = (
        ("heads of tp 2 into tp 1", "1M/2", "1M", RankShare(8, Interval(0, 4)), RankShare(8, Interval(0, 8))),
        ("heads of tp 4 into tp 2", "1M/4", "1M/2", RankShare(8, Interval(2, 4)), RankShare(8, Interval(0, 4))),
    )
    for case, there, here, holds, wants in cases:
        with _Link(there, 256, {"verify": False}, here=here, shares=(holds, wants)) as link:
            measured = link.measure(Shape(128, 1), rounds)
        seconds = statistics.median(measured.total)
        ratio = measured.nbytes / seconds / (equal.nbytes / statistics.median(equal.total))
        rows.append(
            BenchRow(
                case,
                measured.transport,
                r=ratio,
                gbytes_per_s=measured.nbytes / seconds / 1e9,
                rounds=rounds,
                goal=">= 0.5 of equal layouts",
                met=ratio >= 0.5,
            )
        )
    return rows


def _death(rounds: int) -> BenchRow:
    """Time from SIGKILL of the holder to the failed outcome of a pull that was waiting for it."""
    times, transport = [], ""
    for _ in range(min(rounds, 3)):
        with _Link("64K", 64, {"verify": False}) as link:
            transport = link.pull(Shape(4, 4))[0].transport
            ticket = link.holder.offer(f"bench-{next(_names)}", np.arange(4, dtype=np.int32))
            process = link.holder.process
            assert process.pid is not None
            _freeze(process.pid)
            pull = link.transceiver.pull(
                ticket, (block_table(np.arange(4, dtype=np.int32)),), conversation_id=None, scope=b"", timeout_s=20
            )
            time.sleep(0.05)  # the request is on its way and stays unanswered
            started = time.perf_counter()
            process.kill()
            outcome = pull.future.result(20)
            times.append((time.perf_counter() - started) * 1e3)
            if outcome.status.value != "failed":
                raise RuntimeError(f"the death of a peer ended as {outcome.status}")
    median = statistics.median(times)
    return BenchRow(
        "death of the holder to the error", transport, rounds=len(times), milliseconds=median, goal="< 50 ms",
        met=median < 50,
    )  # fmt: skip


def _freeze(pid: int) -> None:
    """SIGSTOP a process and wait until every thread of it stands still."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    states: list[str] = []
    while states != ["T"] * len(states) or not states:
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} does not stop")
        states = [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
        time.sleep(0.001)
