"""One accepted generating request: validated, its prompt encoded, its sampling decided. Made by CallBuilder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.errors import ModelNotFoundError
from cluster.frontend.body import validate_body
from cluster.frontend.prompts import Prompt, PromptEncoder
from cluster.frontend.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest, unknown_fields
from cluster.frontend.sessions import conversation_id_of
from cluster.frontend.settings import FrontendSettings
from cluster.frontend.unsupported import refuse_unsupported
from cluster.request import SamplingParams
from cluster.serve_request import ServeRequest

__all__ = ["Call", "CallBuilder", "check_model"]

_SHOWN_IGNORED = 16
_SHOWN_NAME_CHARS = 64


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A request that is ready to be served.

    ignored_fields   names of fields without effect, the first few, as the answer shows them
    num_ignored      how many there were
    """

    request_id: str
    request: GenerationRequest
    prompt: Prompt
    sampling: SamplingParams
    conversation_id: str | None
    ignored_fields: tuple[str, ...]
    num_ignored: int

    @property
    def is_chat(self) -> bool:
        """Whether the client speaks of messages, not of a prompt."""
        return isinstance(self.request, ChatCompletionRequest)

    def as_serve_request(self) -> ServeRequest:
        """The request as the cluster takes it."""
        return ServeRequest(
            request_id=self.request_id,
            prompt_ids=self.prompt.token_ids,
            sampling=self.sampling,
            conversation_id=self.conversation_id,
            cache_salt=self.request.cache_salt,
        )


class CallBuilder:
    """Builds calls from bodies and headers."""

    def __init__(
        self,
        prompts: PromptEncoder,
        settings: FrontendSettings,
        *,
        model_name: str,
        max_seq_len: int,
        new_id: Callable[[], str],
        new_seed: Callable[[], int],
    ) -> None:
        self._prompts = prompts
        self._settings = settings
        self._model_name = model_name
        self._max_seq_len = max_seq_len
        self._new_id = new_id
        self._new_seed = new_seed

    async def chat(self, body: dict[str, Any], headers: Mapping[str, str]) -> Call:
        """A call of /v1/chat/completions. Raises ClusterError with a 4xx status."""
        neutral = refuse_unsupported(body)
        request = validate_body(ChatCompletionRequest, body)
        check_model(request.model, self._model_name)
        prompt = await self._prompts.from_messages(request.messages, request.cache_salt)
        return self._call("chatcmpl", request, prompt, body, headers, neutral)

    async def completion(self, body: dict[str, Any], headers: Mapping[str, str]) -> Call:
        """A call of /v1/completions. Raises ClusterError with a 4xx status."""
        neutral = refuse_unsupported(body)
        request = validate_body(CompletionRequest, body)
        check_model(request.model, self._model_name)
        prompt = await self._prompts.from_prompt(request.prompt, request.cache_salt)
        return self._call("cmpl", request, prompt, body, headers, neutral)

    def _call(
        self,
        kind: str,
        request: GenerationRequest,
        prompt: Prompt,
        body: Mapping[str, Any],
        headers: Mapping[str, str],
        neutral: list[str],
    ) -> Call:
        ignored = [name for name in unknown_fields(type(request), body) if name not in neutral]
        return Call(
            request_id=f"{kind}-{self._new_id()}",
            request=request,
            prompt=prompt,
            sampling=self._sampling(request, prompt),
            conversation_id=conversation_id_of(request, headers),
            ignored_fields=tuple(name[:_SHOWN_NAME_CHARS] for name in ignored[:_SHOWN_IGNORED]),
            num_ignored=len(ignored),
        )

    def _sampling(self, request: GenerationRequest, prompt: Prompt) -> SamplingParams:
        room = self._max_seq_len - len(prompt.token_ids)
        wanted = request.token_limit
        if wanted is None:
            wanted = room if isinstance(request, ChatCompletionRequest) else self._settings.completion_max_tokens
        max_tokens = min(wanted, room)
        temperature = self._settings.default_temperature if request.temperature is None else request.temperature
        seed = self._new_seed() if request.seed is None else request.seed
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=float(temperature),
            top_p=1.0 if request.top_p is None else float(request.top_p),
            top_k=max(0, request.top_k or 0),
            seed=seed % 2**63,
            ignore_eos=bool(request.ignore_eos),
            min_tokens=min(request.min_tokens or 0, max_tokens),
            stop_token_ids=tuple(request.stop_token_ids or ()),
        )


def check_model(asked: str | None, served: str) -> None:
    """Raises ModelNotFoundError unless `asked` is the served model, or None."""
    if asked is not None and asked != served:
        shown = ascii(asked[:_SHOWN_NAME_CHARS])
        raise ModelNotFoundError(f"model: {shown} is not served here; this server serves '{served}'", param="model")
