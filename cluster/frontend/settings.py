"""Limits and intervals of the frontend, and the part of the server configuration that it reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

__all__ = ["FrontendSettings", "ServerSettings"]


class ServerSettings(Protocol):
    """What the frontend reads of the configuration's `server` section."""

    @property
    def api_keys_file(self) -> str | Path | None:
        """File with one API key a line, or None: then no key is asked for."""
        ...


@dataclass(frozen=True, slots=True)
class FrontendSettings:
    """Limits and intervals.

    max_body_bytes        larger bodies are refused before they are parsed
    keep_alive_s          a waiting stream gets a comment this often; also how long the first token may take before the
                          status line of a stream is sent, after which an error can only be an event
    splicing_max_ids      ids of earlier turns kept for splicing, 4 bytes each
    cancel_timeout_s      how long the cancelling of one abandoned request may take
    max_record_wait_s     bound of `wait_s` of GET /kvferry/requests/{id}
    default_temperature   used when a request names none, as OpenAI's interface has it
    completion_max_tokens answer length of /v1/completions when a request names none
    """

    max_body_bytes: int = 16 * 1024 * 1024
    keep_alive_s: float = 10.0
    splicing_max_ids: int = 8_000_000
    cancel_timeout_s: float = 5.0
    max_record_wait_s: float = 60.0
    default_temperature: float = 1.0
    completion_max_tokens: int = 16
