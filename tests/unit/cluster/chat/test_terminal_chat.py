"""Commands, history and the reuse line of the terminal chat."""

from __future__ import annotations

import json

import httpx
import pytest

from cluster.chat import KvferryClient, TerminalChat


class Server:
    """Answers `answer N` to the N-th request and keeps the bodies."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, object]] = []
        self.refuse = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if self.refuse:
            return httpx.Response(429, json={"error": {"message": "queue full"}})
        self.bodies.append(json.loads(request.content))
        chunk = {
            "id": "r",
            "choices": [{"delta": {"content": f"answer {len(self.bodies)}"}}],
            "usage": {"prompt_tokens": 40, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 32}},
            "kvferry": {
                "ctx_cached_tokens": 32,
                "gen_cached_tokens": 16,
                "recomputed_tokens": 8,
                "ctx_to_gen_blocks": 1,
            },
        }
        return httpx.Response(200, text=f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")


class Rig:
    def __init__(self) -> None:
        self.server = Server()
        self.printed: list[str] = []
        client = KvferryClient("http://s", transport=httpx.MockTransport(self.server))
        self.chat = TerminalChat(client, self.printed.append, conversation_id="c", system="be kind", fields={"seed": 1})

    async def say(self, *lines: str) -> str:
        self.printed.clear()
        for line in lines:
            assert await self.chat.handle(line)
        return "".join(self.printed)

    def last_messages(self) -> list[tuple[str, str]]:
        messages = self.server.bodies[-1]["messages"]
        assert isinstance(messages, list)
        return [(message["role"], message["content"]) for message in messages]


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_history_grows_and_reuse_is_shown(rig: Rig) -> None:
    text = await rig.say("one", "two")
    assert "answer 1" in text
    assert "[turn 2: prompt 40, reused 32 (ctx 32, gen 16), recomputed 8, ctx->gen 1 blocks, first token" in text
    assert rig.last_messages() == [
        ("system", "be kind"),
        ("user", "one"),
        ("assistant", "answer 1"),
        ("user", "two"),
    ]
    assert rig.server.bodies[0]["seed"] == 1


async def test_rewind_drops_the_later_turns(rig: Rig) -> None:
    await rig.say("one", "two", "three")
    assert "end of turn 1" in await rig.say("/rewind 1")
    await rig.say("other")
    assert [content for _, content in rig.last_messages()] == ["be kind", "one", "answer 1", "other"]
    assert "1  one  ->  answer 1" in await rig.say("/turns")


@pytest.mark.parametrize("line", ["/rewind", "/rewind 3", "/rewind -1", "/rewind x", "/rewind 1 2"])
async def test_a_wrong_rewind_changes_nothing(rig: Rig, line: str) -> None:
    await rig.say("one", "two")
    assert "0 to 2" in await rig.say(line)
    assert rig.chat.num_turns == 2


async def test_a_refused_message_is_no_turn(rig: Rig) -> None:
    await rig.say("one")
    rig.server.refuse = True
    assert "queue full" in await rig.say("two")
    assert rig.chat.num_turns == 1


async def test_quit_ends_and_unknown_commands_help(rig: Rig) -> None:
    assert not await rig.chat.handle("/quit")
    assert "/rewind" in await rig.say("/nonsense")
    assert "/rewind" in await rig.say("/help")
    assert await rig.say("   ") == ""
