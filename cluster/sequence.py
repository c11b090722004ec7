"""One request inside one engine: its tokens, its cache, and when it is finished. Owned by the scheduler's lock."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cluster.request import EngineRequest, FinishReason, conversation_key
from kvcache import KvCacheManager, ReuseScope, SequenceCache

__all__ = ["Sequence", "match_request"]


def match_request(manager: KvCacheManager, request: EngineRequest, token_ids: NDArray[np.int32]) -> SequenceCache:
    """A new cache with what is reusable of `token_ids` in the request's scope. Call it under the engine's lock."""
    return manager.create(
        request.request_id,
        token_ids,
        scope=ReuseScope(cache_salt=request.cache_salt),
        conversation_id=conversation_key(request.conversation_id, request.cache_salt),
    )


class Sequence:
    """Mutable state of a request in an engine.

    Tokens are the prompt, then `first_token_ids` of the request (sampled elsewhere), then what this engine samples.
    `num_prompt_tokens` is where the prompt ends for publishing: everything that was known at the start (on a retry also
    the tokens that the client already has), except the token that a context worker has just sampled.

    max_position  longest sequence (tokens) the engine serves
    decode_limit  stop after that many tokens sampled *here* (1 on a context worker), or None
    cache         an open cache that holds what was pulled for the request, or None to match at admission
    prefilled     `cache` holds the whole prompt; the newest known token was sampled by a context worker
    reports_chunks  every computed chunk is an event, also one that ends with no token
    """

    def __init__(
        self,
        request: EngineRequest,
        *,
        eos_token_ids: frozenset[int],
        max_position: int,
        decode_limit: int | None = None,
        cache: SequenceCache | None = None,
        prefilled: bool = False,
        reports_chunks: bool = False,
    ) -> None:
        known = request.known_ids
        self.request = request
        self.reports_chunks = reports_chunks
        self.cache = cache
        self.num_prompt_tokens = len(known) - 1 if prefilled else len(known)
        self.num_reused_tokens: int | None = cache.num_reused_tokens if cache is not None else None
        self.stop_requested: FinishReason | None = None
        self.prefetched_blocks = 0
        self.reserved_tokens = 0  # capacity that must stay, whatever the next step needs
        self._ends = frozenset(request.sampling.stop_token_ids)
        if not request.sampling.ignore_eos:
            self._ends |= eos_token_ids
        self._max_position = max_position
        self._decode_limit = decode_limit
        self._tokens = np.empty(max(2 * len(known), 64), np.int32)
        self._tokens[: len(known)] = known
        self.num_tokens = len(known)
        self.num_sampled = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_outputs(self) -> int:
        """Answer tokens so far, wherever they were sampled."""
        return self.num_tokens - len(self.request.prompt_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens without KV."""
        return self.num_tokens - (self.cache.num_computed_tokens if self.cache is not None else 0)

    @property
    def suppress_eos(self) -> bool:
        """The next token must not end the answer."""
        return self.num_outputs < self.request.sampling.min_tokens

    def token_ids(self, start: int = 0, end: int | None = None) -> NDArray[np.int32]:
        """A copy of the known tokens start..end."""
        return self._tokens[start : self.num_tokens if end is None else end].copy()

    def append(self, token: int) -> None:
        """Add a token that this engine sampled."""
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.empty_like(self._tokens)])
        self._tokens[self.num_tokens] = token
        self.num_tokens += 1
        self.num_sampled += 1

    def finish_reason(self) -> FinishReason | None:
        """Why the sequence ends with its newest token, or None when it goes on."""
        sampling = self.request.sampling
        if int(self._tokens[self.num_tokens - 1]) in self._ends:
            return FinishReason.STOP
        if self.num_outputs >= sampling.max_tokens or self.num_tokens >= self._max_position:
            return FinishReason.LENGTH
        if self._decode_limit is not None and self.num_sampled >= self._decode_limit:
            return FinishReason.HANDOFF
        return None

    def open_cache(self, manager: KvCacheManager) -> None:
        """Match the tokens against the cache and hold what is there."""
        self.cache = match_request(manager, self.request, self.token_ids())

    def note_reuse(self) -> None:
        """Remember how much was found in the cache when the sequence was first admitted."""
        if self.num_reused_tokens is None and self.cache is not None:
            self.num_reused_tokens = self.cache.num_reused_tokens

    def close_cache(self) -> None:
        """Give every page back. Idempotent."""
        self.reserved_tokens = 0
        if self.cache is not None:
            self.cache.close()
            self.cache = None
