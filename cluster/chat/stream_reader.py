"""Reads a streamed completion: server-sent events in, one `Answer` out.

Used by `KvferryClient`. Takes lines, knows nothing of sockets, so that it can be tested with a list.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cluster.chat.answer import Answer, KvUsage
from cluster.chat.errors import ChatError

__all__ = ["StreamReader"]


class StreamReader:
    """Collects the chunks of one stream. `feed` every line; `answer` when `finished`."""

    def __init__(self) -> None:
        self.finished = False
        self.first_token_seen = False
        self._request_id = ""
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._prompt_token_ids: tuple[int, ...] = ()
        self._finish_reason = ""
        self._usage: Mapping[str, Any] = {}
        self._kvferry: Mapping[str, Any] = {}

    def feed(self, line: str) -> str:
        """Take one line of the stream; returns the new text in it, often "". Raises ChatError for an error event."""
        if not line.startswith("data:"):
            return ""
        payload = line[len("data:") :].strip()
        if payload == "[DONE]":
            self.finished = True
            return ""
        try:
            chunk = json.loads(payload)
        except ValueError:
            raise ChatError(f"the server sent something that is not JSON: {payload[:80]!r}") from None
        if "error" in chunk:
            error = chunk["error"]
            raise ChatError(str(error.get("message", error)) if isinstance(error, dict) else str(error))
        return self._take(chunk)

    def _take(self, chunk: Mapping[str, Any]) -> str:
        self._request_id = self._request_id or str(chunk.get("id", ""))
        self._usage = chunk.get("usage") or self._usage
        self._kvferry = chunk.get("kvferry") or self._kvferry
        new_text = ""
        self._take_prompt(chunk)
        for choice in chunk.get("choices", ()):
            self._take_prompt(choice)
            piece = (choice.get("delta") or {}).get("content") or choice.get("text") or ""
            ids = choice.get("token_ids") or ()
            self.first_token_seen = self.first_token_seen or bool(piece) or bool(ids)
            new_text += piece
            self._token_ids.extend(ids)
            self._finish_reason = choice.get("finish_reason") or self._finish_reason
        self._text.append(new_text)
        return new_text

    def _take_prompt(self, part: Mapping[str, Any]) -> None:
        if part.get("prompt_token_ids"):
            self._prompt_token_ids = tuple(part["prompt_token_ids"])

    def answer(self, ttft_s: float) -> Answer:
        """The whole response. Raises ChatError when the stream ended before its end."""
        if not self.finished:
            raise ChatError("the connection ended in the middle of the answer; the server may have stopped")
        details = self._usage.get("prompt_tokens_details") or {}
        return Answer(
            request_id=self._request_id,
            text="".join(self._text),
            token_ids=tuple(self._token_ids),
            prompt_token_ids=self._prompt_token_ids,
            finish_reason=self._finish_reason,
            prompt_tokens=self._usage.get("prompt_tokens", 0),
            completion_tokens=self._usage.get("completion_tokens", 0),
            cached_tokens=details.get("cached_tokens") or 0,
            ttft_s=ttft_s,
            usage=KvUsage.from_json(self._kvferry),
        )
