"""Checks of token ids and of what else comes from outside, before anything is matched or stored."""

from __future__ import annotations

import numpy as np

from kvcache.errors import InvalidArgumentError, InvalidSizeError, InvalidTokensError
from kvcache.radix_node import Tokens

__all__ = ["check_conversation_id", "check_signs", "check_turn_end", "checked_tokens"]

_INT32 = np.dtype(np.int32)
_LONGEST_STOP_REASON = 64


def checked_tokens(tokens: Tokens, *, allow_empty: bool = False) -> Tokens:
    """`tokens` as contiguous int32 (the sign of int32 ids is left to `check_signs`). Raises InvalidTokensError."""
    if (
        type(tokens) is np.ndarray
        and tokens.dtype is _INT32
        and tokens.strides == (4,)
        and (len(tokens) or allow_empty)
    ):
        return tokens
    array = np.asarray(tokens)
    if array.ndim != 1 or (len(array) == 0 and not allow_empty):
        raise InvalidTokensError("give token ids as a non-empty one-dimensional array")
    if array.dtype != np.int32:
        if len(array) and array.dtype.kind not in "iu":
            raise InvalidTokensError(f"token ids are integers, not {array.dtype}")
        if len(array) and (int(array.min()) < 0 or int(array.max()) >= 2**31):
            raise InvalidTokensError("token ids lie in 0 .. 2^31 - 1")
        array = array.astype(np.int32)
    return np.ascontiguousarray(array)


def check_signs(tokens: Tokens) -> None:
    """Raises InvalidTokensError for a negative id. What the tree holds needs no check: it never takes one in."""
    if len(tokens) and np.minimum.reduce(tokens) < 0:
        raise InvalidTokensError("token ids lie in 0 .. 2^31 - 1")


def check_conversation_id(conversation_id: str | None) -> None:
    """Raises InvalidArgumentError for anything but a text or None."""
    if not (conversation_id is None or isinstance(conversation_id, str)):
        raise InvalidArgumentError(f"a conversation id is a text or None, not {conversation_id!r}")


def check_turn_end(stop_reason: str | None, output_tokens: int | None) -> None:
    """Raises InvalidArgumentError for a stop reason that is no text or tokens that are no integer, InvalidSizeError for
    a text of more than 64 characters or a number out of 0 .. 2^31 - 1. Either may be None.
    """
    if stop_reason is not None:
        if not isinstance(stop_reason, str):
            raise InvalidArgumentError(f"a stop reason is a text or None, not a {type(stop_reason).__name__}")
        if len(stop_reason) > _LONGEST_STOP_REASON:
            raise InvalidSizeError(
                f"a stop reason has at most {_LONGEST_STOP_REASON} characters, not {len(stop_reason)}: give its name"
            )
    if output_tokens is not None:
        if isinstance(output_tokens, bool) or not isinstance(output_tokens, int | np.integer):
            raise InvalidArgumentError(f"output_tokens is an integer or None, not a {type(output_tokens).__name__}")
        if not 0 <= output_tokens < 2**31:
            raise InvalidSizeError("output_tokens lies in 0 .. 2^31 - 1")
