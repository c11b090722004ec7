"""Nothing is held: what every cluster test waits for at its end, and what it says when that does not come."""

from __future__ import annotations

import asyncio

from cluster.channel import LocalChannel
from cluster.orchestrator import Orchestrator


async def quiet(orchestrator: Orchestrator, timeout_s: float = 4.0) -> None:
    """Wait until no grant, sequence or pin is open on any worker (well before any lease ends); integrity holds.

    Raises AssertionError that names what is still held.
    """
    try:
        async with asyncio.timeout(timeout_s):
            while any(s.open_grants or s.cache.open_sequences or s.cache.peer_pins for s in await orchestrator.stats()):
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError("still held after all requests have ended:\n" + "\n".join(held(orchestrator))) from None
    for handle in orchestrator.fleet.handles:
        await handle.check_integrity()


def held(orchestrator: Orchestrator) -> list[str]:
    """A line a worker: what it has open and what its event loop is busy with."""
    lines = []
    for handle in orchestrator.fleet.handles:
        assert isinstance(handle.channel, LocalChannel)
        worker = handle.channel.worker
        publications = {key: p.state for key, p in worker._grants._open.items()}
        sequences = [(s.request_id, s.turn_ended, s.num_computed_tokens) for s in worker.manager._sequences.values()]
        tasks = [str(task.get_coro()) for task in worker._tasks]
        lines.append(
            f"{handle.worker_id} ({handle.state}): grants {publications}; live {worker._live.ids()}; "
            f"sequences {sequences}; scheduler {worker.engine.scheduler.snapshot()}; tasks {tasks}"
        )
    return lines
