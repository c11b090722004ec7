"""`kvferry chat`: a chat in the terminal against a running server, with the reuse of every turn."""

from __future__ import annotations

from typing import Annotated

import typer

__all__ = ["chat"]


def chat(
    url: Annotated[str, typer.Option(help="The server.", envvar="KVFERRY_URL")] = "http://127.0.0.1:8000",
    api_key: Annotated[str | None, typer.Option(envvar="KVFERRY_API_KEY", help="Key, if the server wants one.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the draws.")] = 0,
    conversation_id: Annotated[str | None, typer.Option(help="Continue under this id; a new one by default.")] = None,
) -> None:
    """Chat with a running server; /rewind K goes back to the end of turn K, /quit ends."""
    import asyncio
    import sys
    import uuid

    from cluster.chat import KvferryClient, TerminalChat

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    with asyncio.Runner() as runner:
        client = KvferryClient(url, api_key=api_key)
        try:
            models = runner.run(client.models())
            conversation = TerminalChat(
                client,
                write,
                conversation_id=conversation_id or f"chat-{uuid.uuid4().hex}",
                system=system,
                fields={"max_tokens": max_tokens, "temperature": temperature, "seed": seed},
            )
            write(f"{', '.join(models)} at {url}; /help lists the commands\n")
            going_on = True
            while going_on:
                try:
                    line = input(f"{conversation.num_turns + 1}> ")
                except EOFError:
                    write("\n")
                    break
                line = line.encode(errors="surrogateescape").decode(errors="replace")  # a terminal may send anything
                try:
                    going_on = runner.run(conversation.handle(line))
                except KeyboardInterrupt:  # Ctrl-C ends the answer, at the prompt it ends the chat
                    write("\n(interrupted; the turn is not kept)\n")
        finally:
            runner.run(client.close())
