"""A backend that answers from a script and reuses prefixes of what it has seen, salt by salt, like a cache would."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace

import httpx
from fastapi import FastAPI

from cluster.engine import HashTokenizer, Tokenizer
from cluster.frontend import FrontendSettings, create_app
from cluster.request import FinishReason
from cluster.serve_request import RequestUsage, ServeRequest, TurnRecord

MODEL = "fake-model"
MAX_SEQ_LEN = 512

Step = tuple[int, ...] | Exception | asyncio.Event
Script = Callable[[ServeRequest], Sequence[Step]]


class FakeStream:
    """Plays one script."""

    def __init__(
        self, backend: FakeBackend, request: ServeRequest, steps: Sequence[Step], reason: FinishReason
    ) -> None:
        self.backend = backend
        self.request = request
        self.steps = steps
        self.reason = reason
        self.finish_reason: FinishReason | None = None
        self.usage = RequestUsage(prompt_tokens=len(request.prompt_ids))
        self.token_ids: list[int] = []
        self.stopped_with: int | None = None
        self.cancels = 0

    def __aiter__(self) -> AsyncIterator[tuple[int, ...]]:
        return self._iterate()

    async def _iterate(self) -> AsyncIterator[tuple[int, ...]]:
        for step in self.steps:
            if isinstance(step, Exception):
                raise step
            if isinstance(step, asyncio.Event):
                await step.wait()
                continue
            self.token_ids.extend(step)
            yield step
        self._end(self.reason)

    async def stop(self, keep_tokens: int) -> None:
        self.stopped_with = keep_tokens
        self._end(FinishReason.STOP)

    async def cancel(self) -> None:
        self.cancels += 1

    def _end(self, reason: FinishReason) -> None:
        self.finish_reason = reason
        prompt = self.request.prompt_ids.tolist()
        seen = self.backend.seen.setdefault(self.request.cache_salt, [])
        cached = max((shared_prefix(prompt, old) for old in seen), default=0)
        seen.append(prompt + self.token_ids)
        self.usage = replace(
            self.usage,
            completion_tokens=len(self.token_ids),
            ctx_cached_tokens=cached - min(3, cached),
            ctx_pulled_tokens=min(3, cached),
            recomputed_tokens=len(prompt) - cached,
            transport="inproc",
            ttft_s=0.25,
        )


class FakeBackend:
    """Fulfils `Backend`, and nothing more."""

    def __init__(self, script: Script, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.script = script
        self.reason = reason
        self.ready = True
        self.error: Exception | None = None
        self.streams: list[FakeStream] = []
        self.seen: dict[str | None, list[list[int]]] = {}
        self.ended: list[str] = []
        self.records: dict[str, TurnRecord] = {}
        self.waited: list[float] = []

    @property
    def requests(self) -> list[ServeRequest]:
        return [stream.request for stream in self.streams]

    async def serve(self, request: ServeRequest) -> FakeStream:
        if self.error is not None:
            raise self.error
        stream = FakeStream(self, request, self.script(request), self.reason)
        self.streams.append(stream)
        return stream

    async def end_conversation(self, conversation_id: str) -> None:
        self.ended.append(conversation_id)

    async def turn_record(self, request_id: str, wait_s: float) -> TurnRecord | None:
        self.waited.append(wait_s)
        return self.records.get(request_id)


class ResettableBackend(FakeBackend):
    """A backend that can drop its cache."""

    resets = 0

    async def reset_prefix_cache(self) -> None:
        self.resets += 1


class OpenServer:
    """Server configuration without API keys."""

    api_keys_file: str | None = None


def says(*texts: str) -> Script:
    """A script that gives each text as one batch of the hash model's tokens."""
    return lambda request: [tuple(HashTokenizer().encode(text)) for text in texts]


def build_app(
    backend: FakeBackend,
    *,
    tokenizer: Tokenizer | None = None,
    settings: FrontendSettings | None = None,
    server: OpenServer | None = None,
    max_seq_len: int = MAX_SEQ_LEN,
) -> FastAPI:
    async def cluster_metrics() -> bytes:
        return b"kvferry_fake 1\n"

    ids = iter(range(10**6))
    return create_app(
        backend,
        tokenizer or HashTokenizer(),
        model_name=MODEL,
        server_config=server or OpenServer(),
        max_seq_len=max_seq_len,
        metrics_text=cluster_metrics,
        settings=settings,
        wall_clock=lambda: 1_700_000_000.0,
        new_id=lambda: f"{next(ids):032x}",
        new_seed=lambda: 99,
    )


@contextlib.asynccontextmanager
async def client_of(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


def shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    shared = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        shared += 1
    return shared
