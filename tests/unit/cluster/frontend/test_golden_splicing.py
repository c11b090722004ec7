"""Case A2: history that comes back as text shares all 46 ids with what was generated, not 39."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cluster.engine import Tokenizer, load_tokenizer
from cluster.request import FinishReason
from tests.unit.cluster.frontend.fake_backend import FakeBackend, build_app, client_of, shared_prefix

CASES = Path(__file__).parents[4].parent / "shared" / "cases" / "golden_tokens.json"
QUESTIONS = ("What is the capital of Italy?", "And what river runs through it?", "Name one famous building there.")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    if not CASES.is_file():
        pytest.skip(f"{CASES} is not here")
    return {case["name"]: case for case in json.loads(CASES.read_text())["cases"]}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    pytest.importorskip("gguf", reason="the GGUF reader is not installed")
    return load_tokenizer("smollm2-135m")


@pytest.mark.parametrize("stream", [False, True])
async def test_history_as_text_gets_the_generated_ids(
    golden: dict[str, Any], tokenizer: Tokenizer, stream: bool
) -> None:
    answers = iter([golden["A1"]["greedy_ids"], golden["A2"]["greedy_ids"], golden["A3"]["greedy_ids"]])
    backend = FakeBackend(lambda request: [(token,) for token in next(answers)], FinishReason.STOP)
    app = build_app(backend, tokenizer=tokenizer)
    messages: list[dict[str, str]] = []
    facts: list[dict[str, Any]] = []
    async with client_of(app) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            body = {"messages": messages, "temperature": 0, "stream": stream}
            response = await client.post("/v1/chat/completions", json=body)
            assert response.status_code == 200
            text, kvferry = read_answer(response.text, stream)
            messages.append({"role": "assistant", "content": text})
            facts.append(kvferry)
    first, second, third = (request.prompt_ids.tolist() for request in backend.requests)
    generated = first + golden["A1"]["greedy_ids"]
    assert first == golden["A1"]["prompt_ids"]
    assert len(generated) == 46
    assert shared_prefix(golden["A2"]["prompt_ids"], generated) == 39  # what encoding the text again would share
    assert shared_prefix(second, generated) == 46
    assert tokenizer.decode(second) == tokenizer.decode(golden["A2"]["prompt_ids"])
    assert second[46:] == golden["A2"]["prompt_ids"][-len(second[46:]) :]
    assert shared_prefix(third, second + golden["A2"]["greedy_ids"]) == len(second) + len(golden["A2"]["greedy_ids"])
    assert [fact["spliced_tokens"] for fact in facts] == [0, 45, len(second) + len(golden["A2"]["greedy_ids"]) - 1]
    assert facts[1]["ctx_cached_tokens"] + facts[1]["ctx_pulled_tokens"] == 46


def read_answer(body: str, stream: bool) -> tuple[str, dict[str, Any]]:
    if not stream:
        answer = json.loads(body)
        return answer["choices"][0]["message"]["content"], answer["kvferry"]
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert lines[-1] == "[DONE]"
    text = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    return text, chunks[-1]["kvferry"]
