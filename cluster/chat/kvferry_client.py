"""A small asynchronous client of a kvferry server, for `kvferry chat` and `kvferry demo`.

Streams completions and reads the records kvferry keeps of a request. Every call has a deadline. Programs of other
people use any OpenAI client instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from cluster.chat.answer import Answer, KvUsage
from cluster.chat.errors import ChatError
from cluster.chat.stream_reader import StreamReader

__all__ = ["KvferryClient"]


def _ignore(text: str) -> None:
    del text


class KvferryClient:
    """One server's client; an async context manager. Not for several tasks at once."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        transport: httpx.AsyncBaseTransport | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._clock = clock
        self._http = httpx.AsyncClient(
            base_url=self._base_url,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections; the client is of no use afterwards."""
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names of the models that the server offers."""
        body = await self._get("/v1/models")
        return [entry["id"] for entry in body.get("data", ())]

    async def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        conversation_id: str | None = None,
        on_text: Callable[[str], None] = _ignore,
        **fields: Any,
    ) -> Answer:
        """Stream one chat completion to its end. `fields` are further fields of the body."""
        body: dict[str, Any] = {"messages": [dict(message) for message in messages], **fields}
        if conversation_id is not None:
            body["conversation_params"] = {"conversation_id": conversation_id}
        return await self._stream("/v1/chat/completions", body, on_text)

    async def complete(
        self, prompt_ids: Sequence[int], *, on_text: Callable[[str], None] = _ignore, **fields: Any
    ) -> Answer:
        """Stream the completion of a prompt given as token ids."""
        return await self._stream("/v1/completions", {"prompt": list(prompt_ids), **fields}, on_text)

    async def request_record(self, request_id: str, wait_s: float) -> KvUsage:
        """What a request moved in all, back-flow included; the server waits up to `wait_s` for the back-flow's end."""
        body = await self._get(f"/kvferry/requests/{request_id}", params={"wait_s": str(wait_s)})
        return KvUsage.from_json(body)

    async def _get(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        try:
            response = await self._http.get(path, params=params)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        if response.status_code != httpx.codes.OK:
            raise ChatError(_refusal(response.status_code, response.text))
        body: dict[str, Any] = response.json()
        return body

    async def _stream(self, path: str, body: Mapping[str, Any], on_text: Callable[[str], None]) -> Answer:
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        reader, started, first = StreamReader(), self._clock(), 0.0
        try:
            async with self._http.stream("POST", path, json=request) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise ChatError(_refusal(response.status_code, response.text))
                async for line in response.aiter_lines():
                    text = reader.feed(line)
                    if reader.first_token_seen and not first:
                        first = self._clock() - started
                    if text:
                        on_text(text)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        return reader.answer(first)

    def _unreachable(self, error: httpx.HTTPError) -> ChatError:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            return ChatError(f"no server answers at {self._base_url} ({reason}): start one with `kvferry serve`")
        return ChatError(f"the connection to {self._base_url} failed: {reason}")


def _refusal(status: int, text: str) -> str:
    try:
        error = httpx.Response(status, text=text).json()["error"]
        return f"the server refused with {status}: {error['message']}"
    except (ValueError, KeyError, TypeError):
        return f"the server refused with {status}: {text[:200]}"
