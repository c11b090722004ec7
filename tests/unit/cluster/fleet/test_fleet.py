"""Starting all workers alike, waiting for one of a role, bringing lost ones back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from cluster.errors import NotReadyError, StartupError, WorkerLostError
from cluster.fleet import Fleet
from cluster.worker import WorkerRole
from cluster.worker_handle import WorkerHandle, WorkerState
from tests.unit.cluster.fleet.test_worker_handle import INFO, ScriptedChannel


def handles(*channels: ScriptedChannel) -> list[WorkerHandle]:
    roles = (WorkerRole.CONTEXT, WorkerRole.GENERATION)
    return [WorkerHandle(f"w{i}", roles[i % 2], channel) for i, channel in enumerate(channels)]


async def test_every_cause_of_a_failed_start_is_named():
    fleet = Fleet(handles(*(ScriptedChannel(start=StartupError(f"cause {i}")) for i in range(2)), ScriptedChannel()))
    with pytest.raises(StartupError, match=r"2 of 3 workers did not start: cause 0; cause 1"):
        await fleet.start()
    assert not fleet.serving
    await fleet.close()


async def test_workers_with_unlike_layouts_are_refused():
    other = replace(INFO, layout_fingerprint="another")
    fleet = Fleet(handles(ScriptedChannel(), ScriptedChannel(start=other)))
    with pytest.raises(StartupError, match="layouts differ"):
        await fleet.start()
    await fleet.close()


async def test_a_role_without_a_worker_is_refused_after_the_time_given():
    fleet = Fleet(handles(ScriptedChannel(), ScriptedChannel()))
    await fleet.start()
    fleet.handles[0].channel.answers["start"] = WorkerLostError("dead")  # type: ignore[attr-defined]
    fleet.handles[0].mark_lost("a test")
    assert not fleet.serving
    with pytest.raises(NotReadyError, match="no context worker is up"):
        await fleet.wait_ready(WorkerRole.CONTEXT, 0.05)
    assert await fleet.wait_ready(WorkerRole.GENERATION, 0.05) == [fleet.handles[1]]
    with pytest.raises(NotReadyError):  # a role that does not exist is not waited for
        await fleet.wait_ready(WorkerRole.AGGREGATED, 60)
    await fleet.close()


@pytest.mark.parametrize("needs_kill", [False, True])
async def test_a_lost_worker_comes_back_for_those_who_wait(needs_kill: bool):
    channel = ScriptedChannel()
    fleet = Fleet(handles(channel, ScriptedChannel()))
    await fleet.start()
    channel.answers["start"] = WorkerLostError("its process is being started")
    handle = fleet.handles[0]
    handle.needs_kill = needs_kill
    handle.mark_lost("a test")
    waiting = asyncio.create_task(fleet.wait_ready(WorkerRole.CONTEXT, 10))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    channel.answers["start"] = INFO
    assert await waiting == [handle]
    assert (handle.restarts, handle.state, channel.kills) == (1, WorkerState.READY, int(needs_kill))
    await fleet.close()


async def test_closing_ends_every_worker_though_one_is_gone():
    channels = [ScriptedChannel(close=WorkerLostError("gone")), ScriptedChannel()]
    fleet = Fleet(handles(*channels))
    await fleet.start()
    await fleet.close()
    assert [channel.ends for channel in channels] == [1, 1]
    assert all(handle.state is WorkerState.LOST for handle in fleet.handles)
