from __future__ import annotations

from pathlib import Path

import pytest

from cluster.engine import HashTokenizer
from cluster.errors import StartupError
from cluster.request import FinishReason
from cluster.serve_request import RequestUsage, TurnRecord
from tests.unit.cluster.frontend.fake_backend import (
    MAX_SEQ_LEN,
    MODEL,
    FakeBackend,
    OpenServer,
    ResettableBackend,
    build_app,
    client_of,
    says,
)

HELLO = [{"role": "user", "content": "hello"}]


async def test_models_health_version_and_metrics() -> None:
    backend = FakeBackend(says("x"))
    async with client_of(build_app(backend)) as client:
        models = (await client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == [MODEL]
        assert (await client.get(f"/v1/models/{MODEL}")).json()["max_model_len"] == MAX_SEQ_LEN
        assert (await client.get("/health")).status_code == 200
        assert "version" in (await client.get("/version")).json()
        metrics = await client.get("/metrics")
        assert metrics.headers["content-type"].startswith("text/plain")
        assert "kvferry_fake 1\n" in metrics.text
        backend.ready = False
        assert (await client.get("/health")).status_code == 503
        assert (await client.get("/health/ready")).json()["error"]["code"] == "not_ready"
        assert (await client.get("/health/live")).status_code == 200


async def test_tokenize_and_detokenize_are_inverse() -> None:
    tokenizer = HashTokenizer()
    async with client_of(build_app(FakeBackend(says("x")))) as client:
        text = (await client.post("/tokenize", json={"prompt": "né", "add_special_tokens": True})).json()
        assert text == {"tokens": tokenizer.encode("né"), "count": 3, "max_model_len": MAX_SEQ_LEN}
        chat = (await client.post("/tokenize", json={"messages": HELLO})).json()
        rendered = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)
        assert chat["tokens"] == tokenizer.encode(rendered)
        back = await client.post("/detokenize", json={"tokens": text["tokens"]})
        assert back.json() == {"prompt": "né"}


async def test_cache_reset_forgets_the_turns_too() -> None:
    backend = ResettableBackend(says("Hi"))
    async with client_of(build_app(backend)) as client:
        await client.post("/v1/chat/completions", json={"messages": HELLO})
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        messages = [*HELLO, {"role": "assistant", "content": "Hi"}, *HELLO]
        second = await client.post("/v1/chat/completions", json={"messages": messages})
    assert backend.resets == 1
    assert second.json()["kvferry"]["spliced_tokens"] == 0


async def test_cache_reset_without_support_is_501() -> None:
    async with client_of(build_app(FakeBackend(says("x")))) as client:
        response = await client.post("/reset_prefix_cache")
    assert (response.status_code, response.json()["error"]["code"]) == (501, "not_supported")


async def test_turn_record_is_shown_with_a_bounded_wait() -> None:
    backend = FakeBackend(says("x"))
    usage = RequestUsage(prompt_tokens=5, completion_tokens=2, ctx_cached_tokens=1, recomputed_tokens=4, ttft_s=0.5)
    backend.records["cmpl-1"] = TurnRecord(
        "cmpl-1", "c", FinishReason.STOP, usage, backflow="done", gen_to_ctx_blocks=3, gen_to_ctx_bytes=99
    )
    async with client_of(build_app(backend)) as client:
        record = (await client.get("/kvferry/requests/cmpl-1?wait_s=100000")).json()
        unknown = await client.get("/kvferry/requests/cmpl-2")
    assert (record["gen_to_ctx_blocks"], record["gen_to_ctx_bytes"], record["backflow"]) == (3, 99, "done")
    assert (record["finish_reason"], record["ttft_ms"], record["recomputed_tokens"]) == ("stop", 500.0, 4)
    assert backend.waited == [60.0, 0.0]
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "unknown_id")


async def test_conversation_is_ended() -> None:
    backend = FakeBackend(says("x"))
    async with client_of(build_app(backend)) as client:
        response = await client.delete("/kvferry/conversations/my%20talk")
    assert response.json() == {"id": "my talk", "object": "conversation", "ended": True}
    assert backend.ended == ["my talk"]


class GuardedServer(OpenServer):
    def __init__(self, path: Path) -> None:
        self.api_keys_file = str(path)


async def test_api_keys_guard_everything_but_the_probes(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# team\nalpha\n\n  beta \n")
    backend = FakeBackend(says("x"))
    async with client_of(build_app(backend, server=GuardedServer(keys))) as client:
        for headers in (
            {},
            {"authorization": "Bearer gamma"},
            {"authorization": "alpha"},
            {"authorization": "Bearer "},
        ):
            refused = await client.post("/v1/completions", json={"prompt": "p"}, headers=headers)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await client.get("/v1/models")).status_code == 401
        for path in ("/health", "/health/live", "/metrics", "/version"):
            assert (await client.get(path)).status_code == 200
        for key in ("alpha", "beta"):
            accepted = await client.post(
                "/v1/completions", json={"prompt": "p"}, headers={"authorization": f"Bearer {key}"}
            )
            assert accepted.status_code == 200
    assert len(backend.streams) == 2


@pytest.mark.parametrize("content", [None, "", "# nobody\n"])
def test_key_file_without_keys_stops_the_start(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_text(content)
    with pytest.raises(StartupError, match="api_keys_file"):
        build_app(FakeBackend(says("x")), server=GuardedServer(path))
