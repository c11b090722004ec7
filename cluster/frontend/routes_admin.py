"""Everything but generating: models, health, version, metrics, tokens, cache reset, turn records, conversations."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from cluster.errors import InvalidRequestError, NotReadyError
from cluster.frontend.backend import CacheReset
from cluster.frontend.body import parse_json_object, read_body, validate_body
from cluster.frontend.call import check_model
from cluster.frontend.context import FrontendContext
from cluster.frontend.errors import UnknownIdError, UnsupportedHereError
from cluster.frontend.protocol import MAX_ID_CHARS, DetokenizeRequest, TokenizeRequest
from cluster.frontend.usage import turn_record_object

__all__ = ["AdminRoutes"]

_PathId = Annotated[str, Path(min_length=1, max_length=MAX_ID_CHARS)]
_WaitSeconds = Annotated[float, Query(ge=0, allow_inf_nan=False)]


class AdminRoutes:
    """The small endpoints."""

    def __init__(self, context: FrontendContext) -> None:
        self._context = context

    def install(self, app: FastAPI) -> None:
        """Add the routes to `app`."""
        self._install_probes(app)
        self._install_models(app)
        self._install_tokens(app)
        self._install_cache(app)

    def _install_probes(self, app: FastAPI) -> None:
        context = self._context

        @app.get("/health")
        @app.get("/health/ready")
        async def health() -> dict[str, str]:
            """200 once a request can be served, 503 before."""
            if not context.backend.ready:
                raise NotReadyError("no worker can take a request yet")
            return {"status": "ready"}

        @app.get("/health/live")
        async def live() -> dict[str, str]:
            """200 as long as this process answers."""
            return {"status": "live"}

        @app.get("/version")
        async def version() -> dict[str, str]:
            """Version of the server."""
            return {"version": context.version}

        @app.get("/metrics", response_model=None)
        async def metrics() -> Response:
            """Metrics of the cluster and of this frontend, in Prometheus' text format."""
            text = await context.cluster_metrics() + context.metrics.exposition()
            return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})

    def _install_models(self, app: FastAPI) -> None:
        context = self._context
        model = {
            "id": context.model_name,
            "object": "model",
            "created": context.started_at,
            "owned_by": "kvferry",
            "max_model_len": context.max_seq_len,
        }

        @app.get("/v1/models")
        async def models() -> dict[str, Any]:
            """The model that is served."""
            return {"object": "list", "data": [model]}

        @app.get("/v1/models/{name:path}")
        async def one_model(name: str) -> dict[str, Any]:
            """One model by name."""
            check_model(name, context.model_name)
            return model

    def _install_tokens(self, app: FastAPI) -> None:
        context = self._context

        @app.post("/tokenize")
        async def tokenize(request: Request) -> dict[str, Any]:
            """Token ids of a text, or of messages as the chat template renders them; nothing is spliced."""
            asked = validate_body(TokenizeRequest, await self._body(request))
            check_model(asked.model, context.model_name)
            if asked.messages is not None:
                text = context.prompts.render(asked.messages, add_generation_prompt=asked.add_generation_prompt)
            else:
                text = asked.prompt or ""
            ids = await context.prompts.encode(text)
            return {"tokens": ids, "count": len(ids), "max_model_len": context.max_seq_len}

        @app.post("/detokenize")
        async def detokenize(request: Request) -> dict[str, Any]:
            """Text of token ids, special tokens left out."""
            asked = validate_body(DetokenizeRequest, await self._body(request))
            check_model(asked.model, context.model_name)
            try:
                return {"prompt": context.tokenizer.decode(asked.tokens)}
            except (ValueError, OverflowError) as error:
                raise InvalidRequestError(f"tokens: {error}", param="tokens") from error

    def _install_cache(self, app: FastAPI) -> None:
        context = self._context

        @app.post("/reset_prefix_cache")
        async def reset_prefix_cache() -> dict[str, str]:
            """Drop every cached block that no running request holds, and every remembered turn."""
            if not isinstance(context.backend, CacheReset):
                raise UnsupportedHereError("this cluster cannot reset its caches while it serves")
            await context.backend.reset_prefix_cache()
            context.prompts.forget_all()
            return {"status": "reset"}

        @app.get("/kvferry/requests/{request_id}", response_model=None)
        async def turn_record(request_id: _PathId, wait_s: _WaitSeconds = 0.0) -> Response:
            """What a finished turn moved in both directions, waiting up to `wait_s` for its back-flow."""
            wait_s = min(wait_s, context.settings.max_record_wait_s)
            record = await context.backend.turn_record(request_id, wait_s)
            if record is None:
                raise UnknownIdError(
                    "no finished turn with this request id is known; records are kept for recent requests only",
                    param="request_id",
                )
            return JSONResponse(turn_record_object(record))

        @app.delete("/kvferry/conversations/{conversation_id}")
        async def end_conversation(conversation_id: _PathId) -> dict[str, Any]:
            """Release what is retained for a conversation; an unknown id is no error."""
            await context.backend.end_conversation(conversation_id)
            return {"id": conversation_id, "object": "conversation", "ended": True}

    async def _body(self, request: Request) -> dict[str, Any]:
        return parse_json_object(await read_body(request, self._context.settings.max_body_bytes))
