"""The transfer benchmark: every case interleaved round by round with its yardsticks, ratios taken inside a round."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cluster.bench.transfer.between_hosts import measure_between_hosts
from cluster.bench.transfer.link import BenchLink, Measured, Pages, Peer
from cluster.bench.transfer.namespaces import NamespacesUnavailable
from cluster.bench.transfer.nixl_peer import NixlUnavailable, open_nixl
from cluster.bench.transfer.pools import Shape, block_table
from cluster.bench.transfer.rows import BenchRow
from cluster.bench.transfer.yardsticks import perftest_bandwidth, ray_store
from transceiver.parallel_layout import Interval, RankShare

__all__ = ["run_transfer_bench"]

MIB = 1 << 20
_HANDOFF_ROUNDS = 20
_ITERATIONS, _WARM_UP = 20, 3
_WINDOW = 4  # transfers of 64 MiB under way; ucx_perftest allows itself 32
Report = Callable[[str], None]


def run_transfer_bench(
    rounds: int = 5, *, with_ray: bool = True, peer_python: Path | None = None, report: Report = lambda text: None
) -> list[BenchRow]:
    """All cases on this machine; takes a minute or two.

    `report` is told what is being measured and which peers are not there. `peer_python`: a Python that has NIXL.
    """
    rows = _same_host(rounds, with_ray, peer_python, report)
    report("digests on")
    rows += _digests(rounds)
    report("unlike layouts")
    rows += _unlike(rounds)
    report("TCP between two network namespaces")
    try:
        rows.append(_between_hosts(rounds))
    except NamespacesUnavailable as error:
        report(f"TCP between two namespaces is unavailable: {error}")
        rows.append(BenchRow("TCP between two namespaces", "ucx/tcp", goal="unavailable"))
    report("death of a peer")
    rows.append(_death(rounds))
    return rows


def _same_host(rounds: int, with_ray: bool, peer_python: Path | None, report: Report) -> list[BenchRow]:
    """Digests off: a copy and NIXL beside every case, then ucx_perftest and Ray's store beside the first.

    The last two start processes, which empties caches and keeps the machine busy: they come after everything else.
    """
    report("contiguous, scattered and runs, digests off")
    rows = []
    with contextlib.ExitStack() as stack:
        page_peers: dict[str, Peer] = {}
        try:
            page_peers["nixl"] = stack.enter_context(open_nixl(64 << 10, 4096, peer_python)).read
        except NixlUnavailable as error:
            report(f"unavailable: {error}")
        settings: dict[str, dict[str, object]] = {
            "": {}, ", one thread": {"copy_threads": 1}, ", private pools": {"shared_pools": False},
        }  # fmt: skip
        links = {
            kind: stack.enter_context(BenchLink("64K", 4096, {"verify": False, **changes}))
            for kind, changes in settings.items()
        }
        for name, run, goal in (
            ("contiguous 64 MiB", 1024, 0.95), ("1,024 scattered 64 KiB pages", 1, 0.7), ("runs of 1 MiB", 16, 1.0),
        ):  # fmt: skip
            for kind, link in links.items():
                measured = link.measure(Shape(1024, run), rounds, {} if kind else page_peers)
                rows.append(_row(f"{name}{kind}", measured, None if kind else goal))
        many = max(rounds, _HANDOFF_ROUNDS)
        rows.append(_overhead(links[""].measure(Shape(8, 8), many), "hand-off of 8 blocks, digests off"))
    report("ucx_perftest and Ray's object store")
    with BenchLink("64K", 4096, {"verify": False}) as link:
        perftest = _beside(link, rounds, lambda: perftest_bandwidth(64 * MIB, _ITERATIONS, _WARM_UP))
        if perftest is not None:
            rows.append(
                BenchRow(
                    "contiguous 64 MiB over ucx_perftest tag_bw", rows[0].transport, vs_ucx_perftest=perftest,
                    rounds=rounds, load=os.getloadavg()[0], goal=">= 2 times ucx_perftest", met=perftest >= 2,
                )
            )  # fmt: skip
        with ray_store() if with_ray else contextlib.nullcontext() as store:  # its processes are never quite idle
            ray = _beside(link, rounds, lambda: store(64 * MIB)) if store else None
    for name, ratio in (("ucx_perftest", perftest), ("Ray's object store", ray)):
        if ratio is None:
            report(f"unavailable: {name}")
    rows[0] = dataclasses.replace(rows[0], vs_ucx_perftest=perftest, vs_ray=ray)
    return rows


def _beside(link: BenchLink, rounds: int, peer: Callable[[], float | None]) -> float | None:
    """Rate of contiguous transfers of 64 MiB over a peer's, in turns. None when the peer is not there.

    Both as `ucx_perftest` measures a bandwidth: after a warm-up, with several messages under way.
    """
    ratios = []
    for _ in range(rounds):
        theirs = peer()
        if theirs is None:
            return None
        ratios.append(link.stream(_ITERATIONS, _WARM_UP, _WINDOW) / theirs)
    return statistics.median(ratios)


def _digests(rounds: int) -> list[BenchRow]:
    with BenchLink("1M", 256, {"verify": False}) as plain, BenchLink("1M", 256, {"verify": True}) as checked:
        without: list[float] = []

        def unchecked(mine: Pages, theirs: Pages) -> float:
            without.append(plain.pull(mine, theirs).seconds["total"])
            return without[-1]

        measured = checked.measure(Shape(64, 1), rounds, {"unchecked": unchecked})
        ratio = statistics.median(a / b for a, b in zip(measured.total, without[-rounds:], strict=True))
        handoff = checked.measure(Shape(8, 1), max(rounds, _HANDOFF_ROUNDS))
    return [
        _row("64 blocks of 1 MiB, digests on", measured, None),
        BenchRow(
            "time with digests over without", measured.transport, r=ratio, rounds=rounds, load=os.getloadavg()[0],
            goal="<= 1.5", met=ratio <= 1.5,
        ),
        _overhead(handoff, "hand-off of 8 blocks, digests on"),
    ]  # fmt: skip


def _between_hosts(rounds: int) -> BenchRow:
    measured = measure_between_hosts(rounds)
    ratio = measured.over("socket")
    assert ratio is not None
    return BenchRow(
        "TCP between two namespaces", measured.transport, r=ratio, gbytes_per_s=measured.rate / 1e9, rounds=rounds,
        milliseconds=statistics.median(measured.data) * 1e3, load=os.getloadavg()[0], goal=">= 0.9 of a raw socket",
        met=ratio >= 0.9,
    )  # fmt: skip


def _row(case: str, measured: Measured, goal: float | None) -> BenchRow:
    return BenchRow(
        case, measured.transport, r=measured.r, vs_nixl=measured.over("nixl"),
        gbytes_per_s=measured.rate / 1e9, rounds=len(measured.data),
        milliseconds=statistics.median(measured.data) * 1e3, load=os.getloadavg()[0],
        goal=f"r >= {goal}" if goal else "", met=measured.r >= goal if goal else None,
    )  # fmt: skip


def _overhead(measured: Measured, case: str) -> BenchRow:
    fixed = measured.fixed_ms
    return BenchRow(
        case, measured.transport, rounds=len(measured.data), milliseconds=fixed, load=os.getloadavg()[0],
        goal="< 1 ms over the copy", met=fixed < 1,
    )  # fmt: skip


def _unlike(rounds: int) -> list[BenchRow]:
    """Half of the heads into whole pages, and a quarter into halves: rate over that of equal layouts, in turns."""
    rows = []
    cases = (
        ("heads of tp 2 into tp 1", "1M/2", "1M", RankShare(8, Interval(0, 4)), RankShare(8, Interval(0, 8))),
        ("heads of tp 4 into tp 2", "1M/4", "1M/2", RankShare(8, Interval(2, 4)), RankShare(8, Interval(0, 4))),
    )
    for case, there, here, holds, wants in cases:
        with (
            BenchLink("1M", 256, {"verify": False}) as equal,
            BenchLink(there, 256, {"verify": False}, here=here, shares=(holds, wants)) as link,
        ):
            whole: list[float] = []

            def alike(mine: Pages, theirs: Pages, equal: BenchLink = equal, whole: list[float] = whole) -> None:
                outcome = equal.pull(mine[:64], theirs[:64])
                whole.append(outcome.bytes / outcome.seconds["total"])

            measured = link.measure(Shape(128, 1), rounds, {"alike": alike})
        rates = [measured.nbytes / seconds for seconds in measured.total]
        ratio = statistics.median(a / b for a, b in zip(rates, whole[-rounds:], strict=True))
        rows.append(
            BenchRow(
                case, measured.transport, r=ratio, gbytes_per_s=statistics.median(rates) / 1e9, rounds=rounds,
                load=os.getloadavg()[0], goal=">= 0.5 of equal layouts", met=ratio >= 0.5,
            )
        )  # fmt: skip
    return rows


def _death(rounds: int) -> BenchRow:
    """Time from SIGKILL of the holder to the failed outcome of a pull that was waiting for it."""
    times, transport = [], ""
    for _ in range(min(rounds, 3)):
        with BenchLink("64K", 64, {"verify": False}) as link:
            transport = link.pull(*link.pick(Shape(4, 4))).transport
            ticket = link.offer(np.arange(4, dtype=np.int32))
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
        "death of the holder to the error", transport, rounds=len(times), milliseconds=median,
        load=os.getloadavg()[0], goal="< 50 ms", met=median < 50,
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
