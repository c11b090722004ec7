"""One worker seen from the orchestrator: what ends its streams, whose death counts, last words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from cluster.errors import EngineBrokenError, EngineFailedError, WorkerLostError
from cluster.request import FinishReason
from cluster.worker import OutputDelta, WorkerInfo, WorkerRole
from cluster.worker_handle import WorkerHandle, WorkerState

INFO = WorkerInfo("generation-0", WorkerRole.GENERATION, "first", 1, "host", "", "layout", 16, 100, 1000, 2048)


class ScriptedChannel:
    """Answers by method; an answer may be an exception, a future, or a function of the arguments."""

    def __init__(self, **answers: Any) -> None:
        self.answers: dict[str, Any] = {"start": INFO, "attach": 1, "ping": "first", **answers}
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.kills = self.ends = 0

    async def call(self, method: str, *args: Any) -> Any:
        self.calls.append((method, args))
        answer = self.answers.get(method)
        if method in ("watch", "drain_outputs") and answer is None:
            await asyncio.Event().wait()
        if isinstance(answer, BaseException):
            raise answer
        if isinstance(answer, asyncio.Future):
            return await asyncio.shield(answer)
        return answer(*args) if isinstance(answer, Callable) else answer  # type: ignore[arg-type]

    async def kill(self) -> None:
        self.kills += 1

    async def end(self) -> None:
        self.ends += 1


async def started(channel: ScriptedChannel, role: WorkerRole = WorkerRole.GENERATION) -> WorkerHandle:
    handle = WorkerHandle("generation-0", role, channel)
    await handle.start()
    return handle


async def lost(handle: WorkerHandle) -> None:
    async with asyncio.timeout(5):
        await handle.lost.wait()


async def test_outputs_reach_their_stream_and_end_with_it():
    deltas = [OutputDelta("a", (1, 2)), OutputDelta("unknown", (9,)), OutputDelta("a", (3,), FinishReason.STOP)]
    first: asyncio.Future[list[OutputDelta]] = asyncio.get_running_loop().create_future()
    channel = ScriptedChannel(drain_outputs=first)
    handle = await started(channel)
    handle.open_stream("a")
    while ("drain_outputs", (1, 5.0)) not in channel.calls:
        await asyncio.sleep(0)
    first.set_result(deltas)
    channel.answers["drain_outputs"] = None
    assert [delta.token_ids async for delta in handle.outputs("a")] == [(1, 2), (3,)]
    await handle.close()
    assert channel.ends == 1


@pytest.mark.parametrize(
    ("failure", "kill"),
    [
        (WorkerLostError("gone"), False),
        (EngineBrokenError("broken"), True),
        (RuntimeError("nonsense"), True),
    ],
)
@pytest.mark.parametrize("task", ["watch", "drain_outputs"])
async def test_whatever_ends_a_watching_task_ends_the_streams(task: str, failure: Exception, kill: bool):
    channel = ScriptedChannel()
    happens: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    channel.answers[task] = happens
    handle = await started(channel)
    handle.open_stream("a")
    happens.set_exception(failure)
    with pytest.raises(WorkerLostError, match="generation-0 was lost"):
        async for _ in handle.outputs("a"):
            pass
    assert handle.state is WorkerState.LOST
    assert handle.needs_kill is kill
    await handle.close()


async def test_a_call_that_fails_alone_leaves_a_sound_worker_in_use():
    channel = ScriptedChannel(prefill=EngineFailedError("the model failed"))
    handle = await started(channel)
    with pytest.raises(EngineFailedError, match="the model failed"):
        await handle._call("prefill", None, None, 0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert ("ping", ()) in channel.calls
    assert handle.state is WorkerState.READY
    await handle.close()


async def test_a_call_that_fails_on_a_broken_worker_has_it_replaced():
    channel = ScriptedChannel(prefill=EngineFailedError("the model failed"), ping=EngineBrokenError("books"))
    handle = await started(channel)
    with pytest.raises(EngineFailedError):
        await handle._call("prefill", None, None, 0)
    await lost(handle)
    assert handle.needs_kill
    await handle.close()


async def test_the_death_of_an_older_incarnation_does_not_mark_the_new_one():
    late: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    channel = ScriptedChannel(release=late)
    handle = await started(channel)
    call = asyncio.create_task(handle.release("a"))
    await asyncio.sleep(0)
    handle.mark_lost("a test")
    await handle.start()
    late.set_exception(WorkerLostError("its process died"))
    with pytest.raises(WorkerLostError, match="lost during release"):
        await call
    assert handle.state is WorkerState.READY
    await handle.close()


@pytest.mark.parametrize("method", ["give_up", "let_go"])
async def test_the_last_word_reaches_the_worker_though_its_task_is_cancelled(method: str):
    called = {"give_up": "abort", "let_go": "release"}[method]
    channel = ScriptedChannel()
    handle = await started(channel)

    async def serve() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await getattr(handle, method)("a")

    task = asyncio.create_task(serve())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (called, ("a",)) in channel.calls
    channel.answers[called] = WorkerLostError("gone")
    await getattr(handle, method)("a")  # nobody is there to hear it: no error
    await handle.close()


async def test_a_process_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("cluster.worker_handle._START_S", 0.05)
    channel = ScriptedChannel(identity=asyncio.get_running_loop().create_future())
    handle = WorkerHandle("generation-0", WorkerRole.GENERATION, channel)
    with pytest.raises(WorkerLostError, match="did not answer"):
        await handle.make_reachable()
    assert channel.kills == 1


async def test_a_context_worker_is_never_asked_for_outputs():
    channel = ScriptedChannel()
    handle = await started(channel, WorkerRole.CONTEXT)
    await asyncio.sleep(0)
    assert [method for method, _ in channel.calls] == ["start", "attach", "watch"]
    await handle.close()
