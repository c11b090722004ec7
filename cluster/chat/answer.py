"""What a client learns from one response: the text, the token ids and where the prompt's KV came from.

Made by `KvferryClient`; read by the terminal chat and the demo. Plain frozen values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

__all__ = ["Answer", "KvUsage"]


@dataclass(frozen=True, slots=True)
class KvUsage:
    """The `kvferry` object of a response; absent fields are zero or empty."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    ctx_cached_tokens: int = 0
    ctx_pulled_tokens: int = 0
    recomputed_tokens: int = 0
    gen_cached_tokens: int = 0
    transferred_tokens: int = 0
    ctx_to_gen_blocks: int = 0
    ctx_to_gen_bytes: int = 0
    gen_to_ctx_blocks: int = 0
    gen_to_ctx_bytes: int = 0
    ctx_worker: str = ""
    gen_worker: str = ""
    transport: str = ""
    retries: int = 0
    ttft_ms: float = 0.0

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> KvUsage:
        """Of a decoded JSON object; unknown keys are left out, null counts as absent."""
        names = {field.name for field in fields(KvUsage)}
        return KvUsage(**{key: value for key, value in data.items() if key in names and value is not None})


@dataclass(frozen=True, slots=True)
class Answer:
    """One finished response.

    prompt_token_ids and token_ids are empty unless the request asked for token ids; ttft_s is measured by the client.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    ttft_s: float
    usage: KvUsage
