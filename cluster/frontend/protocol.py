"""Bodies of POST /v1/chat/completions and /v1/completions, and of the token endpoints.

Known fields are validated strictly; unknown ones are left out here and counted by the caller
(`unknown_fields`). Each field's description says what to send: it is the remedy that an error message ends with.
Never touches a tokenizer or the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator, model_validator

__all__ = [
    "MAX_ID_CHARS",
    "ChatCompletionRequest",
    "ChatMessage",
    "CompletionRequest",
    "DetokenizeRequest",
    "GenerationRequest",
    "TokenizeRequest",
    "unknown_fields",
]

MAX_ID_CHARS = 256
_MAX_STOPS = 16
_MAX_STOP_CHARS = 1024

_Identifier = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, protected_namespaces=())


class ConversationParams(_Body):
    """Reference system's place for the conversation id."""

    conversation_id: _Identifier | None = None


class StreamOptions(_Body):
    """What a stream carries besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _stop_strings(value: Any) -> Any:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
        raise ValueError(f"should be a string or a list of at most {_MAX_STOPS} strings")
    if not all(isinstance(stop, str) and 0 < len(stop) <= _MAX_STOP_CHARS for stop in stops):
        raise ValueError(f"each stop should be a string of 1 to {_MAX_STOP_CHARS} characters")
    return tuple(stops)


class GenerationRequest(_Body):
    """Fields that both generating endpoints share."""

    model: str | None = Field(None, description="the name that GET /v1/models lists, or leave it out")
    max_tokens: int | None = Field(None, ge=1, description="a whole number of at least 1, or leave it out")
    temperature: float | None = Field(None, ge=0, le=2, allow_inf_nan=False, description="a number from 0 to 2")
    top_p: float | None = Field(None, gt=0, le=1, allow_inf_nan=False, description="a number above 0, at most 1")
    top_k: int | None = Field(None, ge=-1, le=2**31 - 1, description="a whole number; 0 or -1 switches it off")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="a 64-bit whole number, or leave it out")
    min_tokens: int | None = Field(None, ge=0, description="a whole number of at least 0, at most max_tokens")
    ignore_eos: bool | None = Field(None, description="true or false")
    stop: Annotated[tuple[str, ...], BeforeValidator(_stop_strings)] = Field(
        (), description="a string or a list of strings"
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, max_length=64, description="a list of at most 64 token ids"
    )
    include_stop_str_in_output: bool | None = Field(None, description="true or false")
    stream: bool | None = Field(None, description="true or false")
    stream_options: StreamOptions | None = Field(None, description='an object such as {"include_usage": true}')
    return_token_ids: bool | None = Field(None, description="true or false")
    cache_salt: _Identifier | None = Field(None, description=f"a text of 1 to {MAX_ID_CHARS} characters")
    conversation_params: ConversationParams | None = Field(
        None, description=f'an object {{"conversation_id": TEXT}} of 1 to {MAX_ID_CHARS} characters'
    )
    prompt_cache_key: _Identifier | None = Field(None, description=f"a text of 1 to {MAX_ID_CHARS} characters")

    @property
    def token_limit(self) -> int | None:
        """Most tokens that the client wants, or None when it did not say."""
        return self.max_tokens

    @model_validator(mode="after")
    def _min_within_max(self) -> GenerationRequest:
        limit = self.token_limit
        if self.min_tokens is not None and limit is not None and self.min_tokens > limit:
            raise ValueError(f"min_tokens: {self.min_tokens} is more than max_tokens, which is {limit}")
        return self


def _message_text(value: Any) -> Any:
    """The text of a message's content: a string, or the texts of its parts joined by newlines."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of text parts")
    texts: list[str] = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ValueError(f"part {index} is not a text part; this model reads text only")
        if not isinstance(part.get("text"), str):
            raise ValueError(f'part {index} needs a string under "text"')
        texts.append(part["text"])
    return "\n".join(texts)


class ChatMessage(_Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_message_text)]

    @model_validator(mode="before")
    @classmethod
    def _no_tools(cls, value: Any) -> Any:
        if isinstance(value, dict):
            for name in ("tool_calls", "function_call", "audio"):
                if value.get(name):
                    raise ValueError(f"{name} is not supported: send the message as text")
        return value

    def as_template(self) -> dict[str, str]:
        """The message as a chat template takes it."""
        return {"role": "system" if self.role == "developer" else self.role, "content": self.content}


class ChatCompletionRequest(GenerationRequest):
    """Body of POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(
        min_length=1, description='a list such as [{"role": "user", "content": "Hello"}]'
    )
    max_completion_tokens: int | None = Field(None, ge=1, description="a whole number of at least 1, or leave it out")

    @property
    def token_limit(self) -> int | None:
        """`max_completion_tokens`, else the older `max_tokens`."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _one_prompt(value: Any) -> Any:
    """A text or a tuple of token ids; a list of one of either counts as that one."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError(f"{len(value)} prompts in one request are not supported: send one request a prompt")
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("should be a string or a list of token ids")
    if not all(type(token) is int and 0 <= token < 2**31 for token in value):
        raise ValueError("a list of token ids may hold whole numbers of at least 0 only")
    return tuple(value)


class CompletionRequest(GenerationRequest):
    """Body of POST /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], BeforeValidator(_one_prompt)] = Field(
        description="a string or a list of token ids"
    )


class TokenizeRequest(_Body):
    """Body of POST /tokenize: a text, or messages to be rendered with the chat template."""

    model: str | None = Field(None, description="the name that GET /v1/models lists, or leave it out")
    prompt: str | None = Field(None, description="a string")
    messages: list[ChatMessage] | None = Field(None, min_length=1, description="a list of chat messages")
    add_generation_prompt: bool = Field(True, description="true or false")

    @model_validator(mode="after")
    def _either(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: send either prompt or messages")
        return self


class DetokenizeRequest(_Body):
    """Body of POST /detokenize."""

    model: str | None = Field(None, description="the name that GET /v1/models lists, or leave it out")
    tokens: list[int] = Field(description="a list of token ids")

    @field_validator("tokens")
    @classmethod
    def _not_negative(cls, value: list[int]) -> list[int]:
        if any(token < 0 for token in value):
            raise ValueError("token ids are whole numbers of at least 0")
        return value


_NESTED: dict[str, type[BaseModel]] = {"conversation_params": ConversationParams, "stream_options": StreamOptions}


def unknown_fields(model: type[BaseModel], body: Mapping[str, Any]) -> list[str]:
    """Names in `body` that `model` does not know, in the body's order; inside an option group as `group.name`."""
    unknown: list[str] = []
    for name, value in body.items():
        if name not in model.model_fields:
            unknown.append(name)
        elif name in _NESTED and isinstance(value, Mapping):
            unknown += [f"{name}.{inner}" for inner in value if inner not in _NESTED[name].model_fields]
    return unknown
