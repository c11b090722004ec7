"""Finds the conversation that a request belongs to.

Order: body `conversation_params.conversation_id`, the session headers of common clients, body `prompt_cache_key`. The
id is a hint for retention and routing and never a permission; without one a request is its own conversation.
"""

from __future__ import annotations

from collections.abc import Mapping

from cluster.errors import InvalidRequestError
from cluster.frontend.protocol import MAX_ID_CHARS, GenerationRequest

__all__ = ["CONVERSATION_HEADERS", "conversation_id_of"]

CONVERSATION_HEADERS = (
    "x-claude-code-session-id",
    "x-claude-session-id",
    "x-session-id",
    "x-correlation-id",
    "x-session-affinity",
    "x-multi-turn-session-id",
)


def conversation_id_of(request: GenerationRequest, headers: Mapping[str, str]) -> str | None:
    """The conversation id, or None. `headers` looks names up without regard to case.

    Raises InvalidRequestError when the header that decides holds an id that is too long.
    """
    if request.conversation_params is not None and request.conversation_params.conversation_id is not None:
        return request.conversation_params.conversation_id
    for name in CONVERSATION_HEADERS:
        value = headers.get(name, "").strip()
        if not value:
            continue
        if len(value) > MAX_ID_CHARS:
            raise InvalidRequestError(
                f"header {name}: the id has {len(value)} characters; send at most {MAX_ID_CHARS}", param=name
            )
        return value
    return request.prompt_cache_key
