from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from cluster.errors import InvalidRequestError
from cluster.frontend.protocol import CompletionRequest
from cluster.frontend.sessions import CONVERSATION_HEADERS, conversation_id_of


def request(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "p", **fields})


def test_body_wins_over_headers_and_headers_over_the_cache_key() -> None:
    headers = Headers({"X-Session-Id": "header"})
    params = {"conversation_id": "body"}
    assert conversation_id_of(request(conversation_params=params, prompt_cache_key="key"), headers) == "body"
    assert conversation_id_of(request(prompt_cache_key="key"), headers) == "header"
    assert conversation_id_of(request(prompt_cache_key="key"), Headers()) == "key"
    assert conversation_id_of(request(conversation_params={}), Headers()) is None


@pytest.mark.parametrize("first", range(len(CONVERSATION_HEADERS)))
def test_headers_count_in_their_order(first: int) -> None:
    headers = {name: name for name in reversed(CONVERSATION_HEADERS[first:])}
    assert conversation_id_of(request(), Headers(headers)) == CONVERSATION_HEADERS[first]


def test_load_generators_pair_of_headers_gives_one_conversation_for_all_turns() -> None:
    turns = [
        Headers({"x-correlation-id": "talk", "x-session-affinity": "talk", "x-request-id": str(n)}) for n in range(3)
    ]
    assert {conversation_id_of(request(), headers) for headers in turns} == {"talk"}


def test_blank_header_does_not_decide() -> None:
    assert conversation_id_of(request(), Headers({"x-session-id": "  ", "x-correlation-id": "c"})) == "c"


def test_header_that_is_too_long_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="x-session-affinity"):
        conversation_id_of(request(), Headers({"x-session-affinity": "a" * 257}))
