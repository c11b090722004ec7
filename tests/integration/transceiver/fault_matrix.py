"""The fault matrix over `inproc`: every fault at every protocol step, both directions, before/during/after.

``python -m tests.integration.transceiver.fault_matrix`` prints it (which kinds of reported faults a cell or test covers
is in `public_reports`). A cell is green when both sides reach a terminal
state within its deadline, what arrived is right byte for byte (or the error is explicit), both pools are back at rest
and the next transfer works.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests.integration.transceiver.cached_side import CachedSide, prompt_of
from tests.unit.transceiver.rig import eventually
from transceiver import CacheTransceiverConfig, TransceiverBackend, TransferStatus
from transceiver.inproc import InprocTransport
from transceiver.testing import Fault, FaultKind

STEPS = ("Hello", "Challenge", "Proof", "Welcome", "PullRequest", "Grant", "Digests", "get", "Ack")
FROM_HOLDER = {"Challenge", "Welcome", "Grant", "Digests"}
KINDS = (
    "drop", "delay", "duplicate", "reorder", "corrupt", "cut", "kill sender", "kill receiver", "stall", "full queue",
)  # fmt: skip
WHENS = ("before", "during", "after")
DIRECTIONS = ("ctx->gen", "gen->ctx")
TIMEOUT_S = 0.8
_TRIES = 3
DEADLINE_S = 15.0  # generous: a cell may share two cores with a dozen others
CONFIG = CacheTransceiverConfig(
    backend=TransceiverBackend.INPROC, connect_timeout_ms=700, drain_timeout_ms=150, early_request_ttl_ms=300
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One combination."""

    kind: str
    step: str
    when: str
    direction: str


@dataclass(frozen=True, slots=True)
class CellResult:
    """How it went. `problem` is empty when the cell is green."""

    cell: Cell
    outcome: str
    fired: int
    seconds: float
    problem: str = ""


def all_cells() -> list[Cell]:
    """The whole matrix."""
    return [Cell(*parts) for parts in itertools.product(KINDS, STEPS, WHENS, DIRECTIONS)]


def run_cell(cell: Cell, number: int) -> CellResult:
    """One cell; set up anew, a few times, as long as a busy machine ends the transfer before the fault's step."""
    for _ in range(_TRIES):
        result = _run_once(cell, number)
        if result.fired or result.problem or cell.kind == "kill receiver":
            break
    return result


def _run_once(cell: Cell, number: int) -> CellResult:
    """Set up two sides, let the fault happen, and look at everything."""
    ctx, gen = (CachedSide(f"{side}-{number}-{time.monotonic_ns()}", CONFIG) for side in ("ctx", "gen"))
    holder, receiver = (ctx, gen) if cell.direction == "ctx->gen" else (gen, ctx)
    started = time.monotonic()
    try:
        outcome, fired = _play(cell, holder, receiver)
        return CellResult(cell, outcome, fired, time.monotonic() - started)
    except (AssertionError, TimeoutError, Exception) as error:
        return CellResult(cell, "?", 0, time.monotonic() - started, f"{type(error).__name__}: {error}")
    finally:
        for side in (ctx, gen):
            side.close()


def _play(cell: Cell, holder: CachedSide, receiver: CachedSide) -> tuple[str, int]:
    sender, other = (holder, receiver) if cell.step in FROM_HOLDER else (receiver, holder)
    if cell.step == "get":
        sender, other = receiver, holder
    numbers = itertools.count()
    statuses: list[str] = []
    if cell.step == "Digests":  # otherwise they are ready in time and travel with the grant
        holder.transceiver._ctx.digests.find = lambda *_: None  # type: ignore[method-assign]
    if cell.when != "before":
        statuses.append(_warm(holder, receiver, next(numbers)))  # a warm link, and something that is over
    if cell.when != "before" and cell.step in ("Hello", "Challenge", "Proof", "Welcome"):
        _cut_all(receiver)  # the handshake comes again only after a loss
    killed = _arm(cell, sender, other)
    if cell.when == "during":
        statuses.append(_transfer(holder, receiver, next(numbers), parallel=next(numbers)))
    else:
        statuses.append(_transfer(holder, receiver, next(numbers)))
    fired = sender.faults.fired
    for side in (holder, receiver):
        side.faults.clear()
        transport = side.transceiver._transport
        assert isinstance(transport, InprocTransport)
        transport.resume()
    if killed is not None and (fired or cell.kind == "kill receiver"):
        killed.replace()
    assert eventually(lambda: holder.at_rest() and receiver.at_rest(), DEADLINE_S), "a pool is not at rest"
    if cell.when == "after":  # what was over before the fault is still there, and right
        again = receiver.manager.probe_reuse(prompt_of(0))
        assert again == len(prompt_of(0)) - 1, f"an earlier transfer lost blocks: {again}"
    deadline = time.monotonic() + DEADLINE_S
    while (last := _transfer(holder, receiver, next(numbers), timeout_s=5.0)) != "done/done":
        assert time.monotonic() < deadline, f"the next transfer does not work: {last}"
    assert eventually(lambda: holder.at_rest() and receiver.at_rest(), DEADLINE_S), (
        "not at rest after the next transfer"
    )
    return statuses[-1], fired


def _warm(holder: CachedSide, receiver: CachedSide, number: int) -> str:
    """A transfer before the fault; again where a busy machine takes longer for the handshake than is allowed here."""
    deadline = time.monotonic() + DEADLINE_S
    while (status := _transfer(holder, receiver, number, timeout_s=5.0)) != "done/done":
        assert time.monotonic() < deadline, f"no transfer works before the fault: {status}"
    return status


def _arm(cell: Cell, sender: CachedSide, other: CachedSide) -> CachedSide | None:
    """Install the fault; returns the side that dies, if one does."""
    kinds = {
        "drop": FaultKind.DROP, "delay": FaultKind.DELAY, "duplicate": FaultKind.DUPLICATE,
        "reorder": FaultKind.REORDER, "corrupt": FaultKind.CORRUPT, "cut": FaultKind.CUT, "stall": FaultKind.STALL,
        "full queue": FaultKind.FULL, "kill sender": FaultKind.KILL,
    }  # fmt: skip
    if cell.kind in kinds:
        sender.faults.add(Fault(kinds[cell.kind], cell.step, seconds=0.1))
        return sender if cell.kind == "kill sender" else None
    transport = other.transceiver._transport  # the one that would receive this step dies when it is sent
    assert isinstance(transport, InprocTransport)
    sender.faults.add(Fault(FaultKind.DELAY, cell.step, seconds=0.1))
    victim: Callable[[], None] = transport.kill

    def watch() -> None:
        if sender.faults.fired:
            victim()
        elif time.monotonic() < limit:
            other.transceiver._ctx.after(0.005, watch)

    limit = time.monotonic() + 2 * TIMEOUT_S
    other.transceiver._ctx.post(watch)
    return other


def _cut_all(side: CachedSide) -> None:
    transport = side.transceiver._transport
    assert isinstance(transport, InprocTransport)
    for link in list(transport._links):
        side.transceiver._ctx.post(lambda link=link: transport.cut(link))  # type: ignore[misc]
    assert eventually(lambda: not side.transceiver.links())


def _transfer(
    holder: CachedSide, receiver: CachedSide, number: int, parallel: int | None = None, timeout_s: float = TIMEOUT_S
) -> str:
    """One hand-off (and one beside it); returns "receiver's status/holder's status" of the first."""
    names = [number] if parallel is None else [number, parallel]
    grants = [holder.offer(f"t{name}-{time.monotonic_ns()}", prompt_of(name), 2 * timeout_s) for name in names]
    fetches = [
        receiver.fetch(grant.ticket, prompt_of(name), timeout_s) for grant, name in zip(grants, names, strict=True)
    ]
    mine = [receiver.finish(fetch, DEADLINE_S) for fetch in fetches]
    theirs = [grant.future.result(DEADLINE_S).status for grant in grants]
    for status, held in zip(mine, theirs, strict=True):
        assert not (held is TransferStatus.DONE and status is not TransferStatus.DONE), "released as done, not done"
    return f"{mine[0].value}/{theirs[0].value}"


def run_matrix(cells: Iterable[Cell], workers: int = 12) -> list[CellResult]:
    """Run the cells, several at a time: most of a cell's time is waiting."""
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(run_cell, cells, itertools.count()))


def render(results: list[CellResult], kinds: Sequence[str] = KINDS, steps: Sequence[str] = STEPS) -> str:
    """A table: one line per fault, step and direction, with the receiver's/holder's status before/during/after."""
    by_cell = {result.cell: result for result in results}
    short = {"done": "ok", "failed": "FAIL", "cancelled": "canc", "timed_out": "TIME", "?": "??"}

    def text(result: CellResult | None) -> str:
        if result is None:
            return "-"
        if result.problem:
            return "RED"
        ends = "/".join(short.get(part, part) for part in result.outcome.split("/"))
        return ends if result.fired else f"{ends} (no step)"

    lines = [f"{'fault':14} {'step':12} {'direction':9} " + " ".join(f"{when:18}" for when in WHENS)]
    for kind, step, direction in itertools.product(kinds, steps, DIRECTIONS):
        row = [by_cell.get(Cell(kind, step, when, direction)) for when in WHENS]
        if any(row):
            lines.append(f"{kind:14} {step:12} {direction:9} " + " ".join(f"{text(result):18}" for result in row))
    red = [result for result in results if result.problem]
    lines.append(f"{len(results) - len(red)} of {len(results)} cells green")
    return "\n".join([*(f"RED {result.cell}: {result.problem}" for result in red), *lines])


if __name__ == "__main__":
    print(render(run_matrix(all_cells())))
