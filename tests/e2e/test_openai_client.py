"""The `openai` client against a real cluster on the real model, and the golden tokens three other engines agree on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

pytestmark = [pytest.mark.ray, pytest.mark.ucx]

MODEL = "smollm2-135m"
GOLDEN = {
    case["name"]: case
    for case in json.loads((Path(__file__).parents[1] / "data" / "golden_tokens.json").read_text())["cases"]
}
QUESTIONS = ["What is the capital of Italy?", "And what river runs through it?", "Name one famous building there."]


@pytest.fixture
def client(real_server: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{real_server.base_url}/v1", api_key="unused", timeout=120, max_retries=0)


def extra(conversation: str | None = None) -> dict[str, Any]:
    more: dict[str, Any] = {"return_token_ids": True}
    if conversation is not None:
        more["conversation_params"] = {"conversation_id": conversation}
    return more


@pytest.mark.parametrize("name", ["F1", "F3"])
def test_completions_give_the_golden_tokens_for_text_and_for_token_ids(client: openai.OpenAI, name: str):
    case = GOLDEN[name]
    for prompt in (case["prompt"], case["prompt_ids"]):
        answer = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=len(case["greedy_ids"]), temperature=0, extra_body=extra()
        )
        assert answer.choices[0].model_extra["token_ids"] == case["greedy_ids"]
        assert answer.usage.prompt_tokens == len(case["prompt_ids"])


def test_a_chat_goes_on_from_the_generated_ids_though_its_text_encodes_to_others(client: openai.OpenAI):
    """Turn 1 is case A1. Its answer re-encodes to other ids (case A2): only a server that keeps ids reuses them all."""
    first = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": QUESTIONS[0]}],
        max_tokens=40,
        temperature=0,
        extra_body=extra("golden"),
    )
    assert first.choices[0].model_extra["token_ids"] == GOLDEN["A1"]["greedy_ids"]
    assert first.choices[0].finish_reason == "stop"
    kept = len(GOLDEN["A1"]["prompt_ids"]) + len(GOLDEN["A1"]["greedy_ids"])
    second = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": QUESTIONS[0]},
            {"role": "assistant", "content": first.choices[0].message.content},
            {"role": "user", "content": QUESTIONS[1]},
        ],
        max_tokens=40,
        temperature=0,
        extra_body=extra("golden"),
    )
    details = second.usage.prompt_tokens_details
    assert details.cached_tokens == kept - 1  # everything but the last sampled token, which has no KV
    assert second.model_extra["kvferry"]["spliced_tokens"] == kept - 1  # the end-of-turn token is the template's own


def test_an_edited_history_is_encoded_as_its_text_and_still_gives_the_golden_answer(client: openai.OpenAI):
    """Case A2 without a server that remembers: the ids are those of the text."""
    prompt = GOLDEN["A2"]["prompt_ids"]
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=40, temperature=0, extra_body=extra())
    assert answer.choices[0].model_extra["token_ids"] == GOLDEN["A2"]["greedy_ids"]


def test_streaming_gives_the_same_text_as_not_streaming_and_usage_in_the_last_chunk(client: openai.OpenAI):
    messages = [{"role": "user", "content": "Write a short poem about autumn."}]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=30, temperature=0, extra_body=extra()
    )
    assert whole.choices[0].model_extra["token_ids"] == GOLDEN["B1"]["greedy_ids"][:30]
    text, tokens, usage = "", [], None
    for chunk in client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=30,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=extra(),
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            tokens += (choice.model_extra or {}).get("token_ids") or []
        usage = chunk.usage or usage
    assert text == whole.choices[0].message.content
    assert tokens == whole.choices[0].model_extra["token_ids"]
    assert usage is not None and usage.completion_tokens == 30
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_a_seeded_sample_repeats_and_depends_on_the_seed(client: openai.OpenAI):
    def sample(seed: int) -> list[int]:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=12, temperature=1.0, seed=seed, extra_body=extra()
        )
        ids: list[int] = answer.choices[0].model_extra["token_ids"]
        return ids

    assert sample(1) == sample(1) != sample(2)


def test_mistakes_get_openai_errors_and_the_server_goes_on(client: openai.OpenAI, real_server: Any):
    with pytest.raises(openai.NotFoundError) as unknown:
        client.completions.create(model="gpt-5", prompt="x")
    assert MODEL in unknown.value.message
    with pytest.raises(openai.APIStatusError) as long:
        client.completions.create(model=MODEL, prompt=[1] * 9000, max_tokens=1)
    assert long.value.status_code == 413
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}], temperature=9)
    assert bad.value.param == "temperature"
    malformed = httpx.post(f"{real_server.base_url}/v1/completions", content=b"{nope")
    assert malformed.status_code == 400
    assert malformed.json()["error"]["type"] == "invalid_request_error"
    assert [model.id for model in client.models.list()] == [MODEL]
