"""Runs the cells of one sweep on one set of rank processes, and never waits for ever.

A cell that ends without proof that nothing touches memory any more ends the sweep: its ranks are killed, freeing
nothing, and the cells that are left get the same status. The next sweep has processes of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.transceiver_test.cells import Cell, CellResult, CellStatus, TransferCell, TurnCell, cells_of_sweep
from cluster.transceiver_test.config import (
    Direction,
    ParallelConfig,
    SweepConfig,
    TransceiverTestConfig,
)
from cluster.transceiver_test.forced import Forced
from cluster.transceiver_test.geometry import RankGeometry, holders_of, rank_geometry, side_ranks, wanted_ordinals
from cluster.transceiver_test.rank_pool import RankCallError, RankHungError, RankPool
from cluster.transceiver_test.turn_driver import drive_turns

__all__ = ["SweepRunner"]

_DRAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class _End:
    """One rank's end of a case."""

    rank: str
    end: str
    geometry: RankGeometry
    holders: tuple[int, ...] = ()


class SweepRunner:
    """`run` once."""

    def __init__(
        self,
        config: TransceiverTestConfig,
        sweep: SweepConfig,
        pool: RankPool,
        forced: Forced,
        report: Callable[[CellResult], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._sweep = sweep
        self._pool = pool
        self._forced = forced
        self._report = report
        self._clock = clock
        self._deadline = clock() + config.run.max_sweep_s
        self._cell_deadline = self._deadline

    def run(self) -> bool:
        """Run every cell, reporting each; False when the sweep had to be given up (the pool must be killed)."""
        cases = list(cells_of_sweep(self._config, self._sweep.name))
        for index, case in enumerate(cases):
            done = 0
            try:
                for result in self._run_case(case):
                    self._report(result)
                    done += 1
            except RankHungError as error:
                late = self._clock() > self._deadline
                why = f"{error}" + (" (max_sweep_s is over)" if late else "")
                left = [*case[done:], *(cell for later in cases[index + 1 :] for cell in later)]
                self._give_up(left, why)
                return False
        return True

    def _give_up(self, cells: Sequence[Cell], why: str) -> None:
        for number, cell in enumerate(cells):
            detail = why if number == 0 else f"not run: {cells[0].name} ended its sweep ({why})"
            self._report(CellResult(cell, CellStatus.TIMEOUT, detail))

    def _run_case(self, case: list[Cell]) -> Any:
        """Results of the cells of one case, one after the other."""
        first = case[0]
        self._arm()
        if isinstance(first, TurnCell):
            yield self._run_turns(first)
            return
        transfers = [cell for cell in case if isinstance(cell, TransferCell)]
        try:
            holders, receivers = self._open(transfers[0])
        except RankCallError as error:
            for cell in transfers:
                yield CellResult(cell, CellStatus.TRANSFER_ERROR, f"set-up: {error}")
            return
        for cell in transfers[:-1]:
            self._arm()
            yield self._run_transfers(cell, holders, receivers)
        self._arm()
        last = self._run_transfers(transfers[-1], holders, receivers)
        try:
            self._close((*holders.values(), *receivers))
        except RankHungError:
            if last.status is not CellStatus.PASS:
                yield last  # what it found itself says more
            raise
        yield last

    # --- transfer cells -----------------------------------------------------------------------------------------

    def _open(self, cell: TransferCell) -> tuple[dict[int, _End], list[_End]]:
        """Ends of the holding ranks by rank, and of the receiving ranks."""
        spec = cell.layout
        forward = cell.direction is Direction.CTX_TO_GEN
        holding, receiving = (spec.context, spec.generation) if forward else (spec.generation, spec.context)
        hold_role, receive_role = ("ctx", "gen") if forward else ("gen", "ctx")
        receivers = []
        for rank in side_ranks(receiving):
            name = self._rank_name(cell, receive_role, rank)
            sources = tuple(holders_of(spec, holding, receiving, rank))
            receivers.append(_End(name, f"r{rank}", rank_geometry(spec, receiving, rank), sources))
        needed = sorted({source for end in receivers for source in end.holders})
        holders = {
            rank: _End(self._rank_name(cell, hold_role, rank), f"h{rank}", rank_geometry(spec, holding, rank))
            for rank in needed
        }
        lengths, size = self._config.request_lengths, spec.tokens_per_block
        for end in (*holders.values(), *receivers):
            geometry = end.geometry
            groups = geometry.layout.groups
            pages = [max(len(wanted_ordinals(group, size, length)) for length in lengths) for group in groups]
            shares = geometry.shares
            self._pool.call(
                end.rank, "open", 60.0, end=end.end, layout=geometry.layout.to_dict(),
                shares=None if shares is None else [[s.num_heads, s.heads.start, s.heads.stop] for s in shares],
                first_heads=list(geometry.first_heads), pages=pages, config=self._transceiver_config(cell.backend),
            )  # fmt: skip
        return holders, receivers

    def _close(self, ends: Sequence[_End]) -> None:
        """Raises RankHungError when an end cannot be closed: nothing proves then that its memory is untouched."""
        for end in ends:
            try:
                self._pool.call(end.rank, "close", 30.0, end=end.end)
            except RankCallError as error:
                raise RankHungError(str(error)) from error

    def _run_transfers(self, cell: TransferCell, holders: dict[int, _End], receivers: list[_End]) -> CellResult:
        result = CellResult(cell, receivers=len(receivers))
        began = self._clock()
        forced_here = self._is_forced(self._forced.hang, cell)
        try:
            for number in range(self._config.warmup_requests + self._config.requests_per_length):
                if forced_here:
                    self._pool.call(receivers[0].rank, "hang", self._left())
                timed = number >= self._config.warmup_requests
                if not self._one_request(cell, cell.request_id(number), holders, receivers, result, timed):
                    break
            else:
                result.status = CellStatus.PASS if result.samples else CellStatus.NO_DATA
        except RankCallError as error:
            if error.timed_out:  # no proof of completion: memory may still be touched
                raise RankHungError(str(error)) from error
            result.status, result.detail = CellStatus.TRANSFER_ERROR, str(error)
        result.seconds = self._clock() - began
        return self._check_transport(result)

    def _one_request(
        self, cell: TransferCell, request: int, holders: dict[int, _End], receivers: list[_End], result: CellResult,
        timed: bool,
    ) -> bool:  # fmt: skip
        size = cell.layout.tokens_per_block
        wanted = {
            end.end: [wanted_ordinals(group, size, cell.length) for group in end.geometry.layout.groups]
            for end in (*holders.values(), *receivers)
        }
        timeout_s = max(1.0, min(self._config.run.timeout_per_cell_s - 5.0, self._left() - 5.0))
        tickets: dict[tuple[int, str], dict[str, Any]] = {}
        for end in holders.values():
            self._pool.call(end.rank, "fill", self._left(), end=end.end, request=request, wanted=wanted[end.end])
        problems: list[str] = []
        wrong: list[str] = []
        for receiver in receivers:
            self._pool.call(receiver.rank, "erase", self._left(), end=receiver.end)
            for source in receiver.holders:
                holder = holders[source]
                transfer = f"{request}-{receiver.end}-{source}"
                tickets[source, receiver.end] = self._pool.call(
                    holder.rank, "publish", self._left(), end=holder.end, transfer=transfer,
                    wanted=wanted[holder.end], lease_s=timeout_s,
                )  # fmt: skip
            answer = self._pool.call(
                receiver.rank, "pull", self._left(), end=receiver.end,
                tickets=[tickets[source, receiver.end] for source in receiver.holders],
                wanted=wanted[receiver.end], timeout_s=timeout_s,
            )  # fmt: skip
            moved = sum(outcome["bytes"] for outcome in answer["outcomes"])
            problems += [f"{o['status']}: {o['reason']}" for o in answer["outcomes"] if o["status"] != "done"]
            if not problems and self._is_forced(self._forced.mismatch, cell):
                self._pool.call(receiver.rank, "damage", self._left(), end=receiver.end, wanted=wanted[receiver.end])
            if not problems:
                wrong += self._pool.call(
                    receiver.rank, "verify", self._left(), end=receiver.end, request=request,
                    wanted=wanted[receiver.end],
                )  # fmt: skip
            result.transport = answer["outcomes"][0]["transport"] or result.transport
            result.bytes_moved += moved
            result.blocks_moved += sum(outcome["blocks"] for outcome in answer["outcomes"])
            if timed and answer["seconds"] > 0:
                result.samples.append(moved / answer["seconds"] / 1e9)
                result.timed_bytes += moved
            for source in receiver.holders:
                holder = holders[source]
                end = self._pool.call(holder.rank, "published", self._left(), end=holder.end, timeout_s=_DRAIN_S)
                if end["status"] != "done" and not problems:
                    problems.append(f"holder: {end['status']}: {end['reason']}")
        if problems:
            result.status, result.detail = CellStatus.TRANSFER_ERROR, "; ".join(problems[:3])
        elif wrong:
            result.status, result.detail = CellStatus.MISMATCH, "; ".join(wrong[:3])
        return not problems and not wrong

    # --- turn cells ---------------------------------------------------------------------------------------------

    def _run_turns(self, cell: TurnCell) -> CellResult:
        if self._is_forced(self._forced.hang, cell):
            self._pool.call(self._rank_name(cell, "gen", 0), "hang", self._left())
        context, generation = (self._rank_name(cell, role, 0) for role in ("ctx", "gen"))
        layout = rank_geometry(cell.layout, ParallelConfig(), 0).layout
        result = CellResult(cell, receivers=1)
        began = self._clock()
        try:
            drive_turns(
                self._pool, cell, self._config.turn_cells, layout, context, generation,
                self._transceiver_config(cell.backend), result, self._left,
                damage=self._is_forced(self._forced.mismatch, cell),
            )  # fmt: skip
        except RankCallError as error:
            if error.timed_out:
                raise RankHungError(str(error)) from error
            result.status, result.detail = CellStatus.TRANSFER_ERROR, str(error)
        result.seconds = self._clock() - began
        return self._check_transport(result)

    # --- small things -------------------------------------------------------------------------------------------

    def _arm(self) -> None:
        """A new cell begins: its deadline runs."""
        self._cell_deadline = min(self._deadline, self._clock() + self._config.run.timeout_per_cell_s)

    def _left(self) -> float:
        """Seconds until the cell's deadline. Raises RankHungError when it is over."""
        left = self._cell_deadline - self._clock()
        if left <= 0:
            raise RankHungError("the cell's deadline is over")
        return left

    def _rank_name(self, cell: Cell, role: str, rank: int) -> str:
        return "ctx-0" if cell.backend == "inproc" else f"{role}-{rank}"

    def _transceiver_config(self, backend: str) -> dict[str, Any]:
        env = self._sweep.env
        options = {key.removeprefix("UCX_"): value for key, value in env.items() if key.startswith("UCX_")}
        tls = options.pop("TLS", None)
        config: dict[str, Any] = {"backend": backend, "verify": self._config.verify_digests}
        if tls is not None:
            config["ucx_tls"] = tls
        if options:
            config["ucx_options"] = options
        return config

    def _is_forced(self, wish: str | None, cell: Cell) -> bool:
        if wish is None:
            return False
        if wish:
            return wish in cell.name
        first = next(cells_of_sweep(self._config, self._sweep.name))[0]
        return cell.name == first.name

    def _check_transport(self, result: CellResult) -> CellResult:
        expected = self._sweep.expect_transport
        if expected is None or result.status is not CellStatus.PASS or result.cell.backend != "ucx":
            return result
        if result.transport != expected:
            result.status = CellStatus.TRANSFER_ERROR
            result.detail = f"{result.transport or 'no transport'} was used, not {expected}"
        return result
