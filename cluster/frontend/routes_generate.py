"""POST /v1/chat/completions and POST /v1/completions.

parse -> build the call (conversation id, prompt ids) -> backend.serve -> text -> answer or events; at the end the
turn's ids are remembered for splicing. A client that goes away cancels its answer, at any point.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from cluster.errors import ClusterError
from cluster.frontend.answer import Answer
from cluster.frontend.body import parse_json_object, read_body
from cluster.frontend.call import Call
from cluster.frontend.chunks import AnswerFormat
from cluster.frontend.context import FrontendContext
from cluster.frontend.disconnect import run_while_connected
from cluster.frontend.errors import ClientGoneError, error_response
from cluster.frontend.streaming import EventStreamResponse, KeepAlive
from cluster.frontend.text_output import AnswerText

__all__ = ["GenerateRoutes"]

_Build = Callable[[dict[str, Any], Mapping[str, str]], Awaitable[Call]]


class GenerateRoutes:
    """The two generating endpoints."""

    def __init__(self, context: FrontendContext) -> None:
        self._context = context

    def install(self, app: FastAPI) -> None:
        """Add the routes to `app`."""

        @app.post("/v1/chat/completions", response_model=None)
        async def chat_completions(request: Request) -> Response:
            """Answer a conversation, whole or as a stream."""
            return await self._answer(request, "chat_completions", self._context.calls.chat)

        @app.post("/v1/completions", response_model=None)
        async def completions(request: Request) -> Response:
            """Continue a text or a list of token ids, whole or as a stream."""
            return await self._answer(request, "completions", self._context.calls.completion)

    async def _answer(self, request: Request, route: str, build: _Build) -> Response:
        metrics = self._context.metrics
        call: Call | None = None
        try:
            body = parse_json_object(await read_body(request, self._context.settings.max_body_bytes))
            call = await build(body, request.headers)
            metrics.ignored_fields.inc(call.num_ignored)
            metrics.spliced_tokens.inc(call.prompt.spliced_tokens)
            start = self._stream if call.request.stream else self._whole
            response = await run_while_connected(request.receive, start(call), _discard)
        except ClientGoneError:
            metrics.client_disconnects.inc()
            raise
        except Exception as error:
            if isinstance(error, ClusterError) or call is not None:
                response = error_response(error)
            else:
                raise
        if call is not None:
            response.headers["x-request-id"] = call.request_id
        metrics.requests.labels(route, str(response.status_code)).inc()
        return response

    async def _whole(self, call: Call) -> Response:
        answer = await self._serve(call)
        await answer.run()
        self._remember(call, answer)
        return JSONResponse(self._format(call).whole(answer))

    async def _stream(self, call: Call) -> Response:
        answer = await self._serve(call)
        source = self._format(call).stream(answer, lambda: self._remember(call, answer))
        chunks = KeepAlive(source, self._context.settings.keep_alive_s, answer.close)
        try:
            await chunks.prime()
        except BaseException:
            await chunks.aclose()
            raise
        return EventStreamResponse(chunks, {}, self._context.metrics)

    async def _serve(self, call: Call) -> Answer:
        context = self._context
        ends = frozenset(call.sampling.stop_token_ids)
        text = AnswerText(
            context.tokenizer.stream(),
            stops=call.request.stop,
            include_stop=bool(call.request.include_stop_str_in_output),
            min_tokens=call.sampling.min_tokens,
            end_ids=ends if call.sampling.ignore_eos else ends | context.tokenizer.eos_token_ids,
        )
        stream = await context.backend.serve(call.as_serve_request())
        return Answer(stream, text, cancel_timeout_s=context.settings.cancel_timeout_s)

    def _remember(self, call: Call, answer: Answer) -> None:
        self._context.prompts.remember(call.prompt, answer.visible, call.request.cache_salt)

    def _format(self, call: Call) -> AnswerFormat:
        return AnswerFormat(call, model_name=self._context.model_name, created=int(self._context.wall_clock()))


async def _discard(response: Response) -> None:
    """A response that will not be sent: its answer is cancelled if it is still being made."""
    if isinstance(response, EventStreamResponse):
        await response.aclose()
