"""What happens to a turn after its answer: the context side takes the answer's blocks, and a record is kept.

The client's stream has ended by then. A later request whose prompt continues such a turn waits for it here, so that
it finds the blocks it came for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cluster.errors import ClusterError
from cluster.serve_metrics import ServeMetrics
from cluster.serve_request import TurnRecord
from cluster.worker import TurnHandoff
from cluster.worker_handle import WorkerHandle
from transceiver import TransferStatus

__all__ = ["Turns"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class _Closing:
    """A turn that is being closed."""

    turn: TurnHandoff
    task: asyncio.Task[None]


class Turns:
    """Turns being closed, and records of the last `max_records` requests.

    on_kept  told what a context worker holds of a turn once it is closed: its id, the tokens with KV, their salt
    """

    def __init__(
        self,
        metrics: ServeMetrics,
        *,
        on_kept: Callable[[str, NDArray[np.int32], str | None], None] = lambda worker_id, token_ids, cache_salt: None,
        max_records: int = 4096,
    ) -> None:
        self._metrics = metrics
        self._on_kept = on_kept
        self._closing: list[_Closing] = []
        self._records: OrderedDict[str, TurnRecord] = OrderedDict()
        self._settled: dict[str, asyncio.Event] = {}
        self._max_records = max_records

    def keep(self, record: TurnRecord) -> None:
        """Remember how a request went; the oldest record is forgotten."""
        self._records[record.request_id] = record
        self._records.move_to_end(record.request_id)
        while len(self._records) > self._max_records:
            self._records.popitem(last=False)

    async def record(self, request_id: str, wait_s: float) -> TurnRecord | None:
        """The record of a request, waiting up to `wait_s` for its back-flow to settle. None = unknown or forgotten."""
        settled = self._settled.get(request_id)
        if settled is not None and wait_s > 0:
            try:
                async with asyncio.timeout(wait_s):
                    await settled.wait()
            except TimeoutError:
                log.debug("the back-flow of %s is still pending", request_id)
        return self._records.get(request_id)

    def close(
        self, context: WorkerHandle, generation: WorkerHandle | None, turn: TurnHandoff, record: TurnRecord
    ) -> None:
        """Have the context worker end the turn in the background. Keeps the record at once, updates it at the end.

        `generation` granted the turn's ticket, if there is one; it is told to let go when the context side cannot.
        """
        self.keep(replace(record, backflow="pending" if turn.ticket is not None else "off"))
        self._settled[record.request_id] = asyncio.Event()
        task = asyncio.create_task(self._close(context, generation, turn, record))
        self._closing.append(_Closing(turn, task))

    async def wait_for_prefix(self, prompt_ids: NDArray[np.int32], cache_salt: str | None, timeout_s: float) -> None:
        """Wait until no turn that this prompt continues is being closed, at most `timeout_s`."""
        tasks = {c.task for c in self._closing if _continues(prompt_ids, cache_salt, c.turn) and not c.task.done()}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def settle(self, timeout_s: float) -> None:
        """Wait for every closing turn, at most `timeout_s`."""
        tasks = {closing.task for closing in self._closing}
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def drain(self, timeout_s: float) -> None:
        """Wait for every closing turn, then cancel what is left."""
        await self.settle(timeout_s)
        late = [closing.task for closing in self._closing]
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _close(
        self, context: WorkerHandle, generation: WorkerHandle | None, turn: TurnHandoff, record: TurnRecord
    ) -> None:
        try:
            result = await context.close_turn(turn)
            moved = result.transfer
            if moved is None or moved.status is not TransferStatus.DONE:
                await _let_go(generation, turn)  # a receiver that ended before it asked never told the holder
            self._on_kept(context.worker_id, turn.token_ids[: result.endpoint_tokens], turn.cache_salt)
            record = replace(record, endpoint_tokens=result.endpoint_tokens)
            if moved is not None:
                record = replace(
                    record,
                    backflow=str(moved.status),
                    backflow_reason=moved.reason,
                    gen_to_ctx_blocks=moved.blocks,
                    gen_to_ctx_bytes=moved.bytes,
                )
        except ClusterError as error:  # the turn is served; only its reuse is lost, and the record says so
            log.warning("the context side could not close turn %s: %s", turn.request_id, error.message)
            record = replace(record, backflow="failed", backflow_reason=error.message)
            await _let_go(generation, turn)
        except Exception as error:
            log.exception("closing turn %s failed", turn.request_id)
            record = replace(record, backflow="failed", backflow_reason=type(error).__name__)
            await _let_go(generation, turn)
        finally:
            self._metrics.turn_closed(record)
            self.keep(record)
            self._closing = [closing for closing in self._closing if closing.turn is not turn]
            settled = self._settled.pop(record.request_id, None)
            if settled is not None:
                settled.set()


async def _let_go(generation: WorkerHandle | None, turn: TurnHandoff) -> None:
    """The turn's grant will not be used."""
    if generation is not None and turn.ticket is not None:
        await generation.let_go(turn.request_id)


def _continues(prompt_ids: NDArray[np.int32], cache_salt: str | None, turn: TurnHandoff) -> bool:
    """Whether a prompt goes on from the turn's answer, or from part of it."""
    if cache_salt != turn.cache_salt or len(prompt_ids) <= turn.prompt_tokens:
        return False
    shared = min(len(prompt_ids), len(turn.token_ids) - 1)
    return bool(np.array_equal(prompt_ids[:shared], turn.token_ids[:shared]))
