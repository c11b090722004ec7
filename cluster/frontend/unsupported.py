"""Fields of the OpenAI interface, and of its common extensions, that would change the answer and are not supported.

Ignoring one silently would give a client something else than it asked for, so each is refused by name unless it has a
value that asks for nothing. Hints without effect on the answer (`user`, `metadata`, `store`) are not listed: they are
ignored like unknown fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.errors import InvalidRequestError

__all__ = ["refuse_unsupported"]

_OFF = (None, False)
_EMPTY: tuple[Any, ...] = (None, [], {})
_ONE_ANSWER = "send one request an answer"
_TEXT_ONLY = "leave it out; answers are plain text"
_LEAVE_OUT = "leave it out"

# field -> (values that ask for nothing, what to do instead)
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((None, 1), _ONE_ANSWER),
    "best_of": ((None, 1), _ONE_ANSWER),
    "use_beam_search": (_OFF, _LEAVE_OUT),
    "logprobs": (_OFF, _LEAVE_OUT),
    "top_logprobs": ((None, 0), _LEAVE_OUT),
    "prompt_logprobs": (_OFF, _LEAVE_OUT),
    "echo": (_OFF, "leave it out and prepend the prompt yourself"),
    "suffix": ((None, ""), _LEAVE_OUT),
    "tools": (_EMPTY, _TEXT_ONLY),
    "tool_choice": ((None, "none", "auto"), _TEXT_ONLY),
    "functions": (_EMPTY, _TEXT_ONLY),
    "function_call": ((None, "none", "auto"), _TEXT_ONLY),
    "response_format": ((None, {"type": "text"}), _TEXT_ONLY),
    "structured_outputs": (_EMPTY, _TEXT_ONLY),
    "guided_json": ((None,), _TEXT_ONLY),
    "guided_regex": ((None,), _TEXT_ONLY),
    "guided_choice": ((None,), _TEXT_ONLY),
    "guided_grammar": ((None,), _TEXT_ONLY),
    "modalities": ((None, ["text"]), _TEXT_ONLY),
    "audio": ((None,), _TEXT_ONLY),
    "prediction": ((None,), _LEAVE_OUT),
    "web_search_options": ((None,), _LEAVE_OUT),
    "logit_bias": (_EMPTY, _LEAVE_OUT),
    "bad_words": (_EMPTY, _LEAVE_OUT),
    "allowed_token_ids": ((None,), _LEAVE_OUT),
    "presence_penalty": ((None, 0), "leave it out or send 0"),
    "frequency_penalty": ((None, 0), "leave it out or send 0"),
    "repetition_penalty": ((None, 1), "leave it out or send 1"),
    "min_p": ((None, 0), "leave it out or send 0; top_p and top_k are supported"),
    "skip_special_tokens": ((None, True), "leave it out; return_token_ids shows special tokens"),
    "truncate_prompt_tokens": ((None,), "leave it out and shorten the prompt"),
    "chat_template": ((None,), "leave it out; the model's own template is used"),
    "continue_final_message": (_OFF, "use /v1/completions with the text to be continued"),
    "add_generation_prompt": ((None, True), "use /v1/completions with the rendered prompt"),
    "documents": (_EMPTY, "put the documents into a message"),
    "lora_request": ((None,), _LEAVE_OUT),
    "disaggregated_params": ((None,), "leave it out; this server moves KV between its own workers"),
    "kv_transfer_params": ((None,), "leave it out; this server moves KV between its own workers"),
}


def refuse_unsupported(body: Mapping[str, Any]) -> list[str]:
    """Raises InvalidRequestError for the first field that asks for something unsupported.

    Returns the names of listed fields that ask for nothing: known, and rightly without effect.
    """
    neutral: list[str] = []
    for name in body:
        if name not in _UNSUPPORTED:
            continue
        allowed, remedy = _UNSUPPORTED[name]
        if not any(_same(body[name], value) for value in allowed):
            raise InvalidRequestError(f"{name}: not supported by this server; {remedy}", param=name, code="unsupported")
        neutral.append(name)
    return neutral


def _same(value: Any, other: Any) -> bool:
    return isinstance(value, bool) == isinstance(other, bool) and bool(value == other)
