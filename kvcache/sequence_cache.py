"""One request's KV: its tokens, the pages of every life cycle, and its place in the tree.

Made by `KvCacheManager.create` only; the worker calls it under the manager's lock. It must never write into a page
that the tree shares: a partially matched block and a snapshot are copied first. Getting pages is in
`sequence_growth`, publishing in `publisher`.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from kvcache import publisher, sequence_growth, sequence_pages
from kvcache.block_pool import Pages
from kvcache.block_table import BlockTable
from kvcache.conversation_manager import Conversation
from kvcache.counters import count_blocks
from kvcache.errors import ClosedSequenceError, InvalidSizeError, SuspendedSequenceError, TurnEndedError
from kvcache.page_pin import PagePin
from kvcache.provenance import BlockOrigin, Provenance
from kvcache.radix_match import Match
from kvcache.radix_node import Anchor, Rows, Tokens
from kvcache.suspension import SuspendedPages, bring_back, take_out
from kvcache.token_buffer import TokenBuffer
from kvcache.token_ids import check_turn_end, checked_tokens

if TYPE_CHECKING:
    from kvcache.manager import KvCacheManager

__all__ = ["SequenceCache"]


class SequenceCache:
    """Lengths: committed (published) <= computed (KV exists) <= capacity (pages exist), in tokens."""

    num_reused_tokens = 0
    num_computed_tokens = 0
    num_committed_tokens = 0
    capacity_tokens = 0
    counted_blocks = -1
    blocks = 0
    owned_from = 0
    prompt_end = 0
    lock: Anchor | None = None
    suspended: SuspendedPages | None = None
    points: tuple[int, ...] = ()
    explicit_points = False
    prompt_ended = False
    turn_ended = False
    closed = False

    def __init__(
        self,
        manager: KvCacheManager,
        request_id: str,
        prompt: Tokens,
        scope: bytes,
        match: Match | None,
        conversation: Conversation | None,
        conversation_id: str | None,
    ) -> None:
        self._manager = manager
        self._guard = manager.guard()
        self._tree = manager.tree
        self._shape = manager.tree.shape
        self.request_id = request_id
        self.conversation_id = conversation_id
        self.owner = conversation_id if conversation_id else f"\0{request_id}"
        self.scope = scope
        self.conversation = conversation
        self._tokens = TokenBuffer(request_id, prompt)
        self.prompt_tokens = len(prompt)
        self.matched_tokens = 0 if match is None else match.token_match
        self.rows: Rows = manager.no_rows
        self.state_pages: dict[int, int] = {}
        self.state_sources: dict[int, int] = {}
        self.sources: list[int] = []
        self._origins: list[tuple[int, Provenance]] = []
        if match is not None and match.num_tokens:
            sequence_pages.adopt(self, match)
        if not self._shape.plain:
            publisher.set_points(self, self.matched_tokens if match is not None and match.forks else 0)

    def __enter__(self) -> SequenceCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # growing

    def resize(self, num_tokens: int, *, history: int | None = None) -> None:
        """Provide pages for `num_tokens` tokens, or give pages beyond them back. All or nothing.

        history   the caller vouches that tokens before it will arrive whole (a transfer): windows then get pages only
                  from the live range at `history` on (default: `num_computed_tokens`)

        The first call makes private copies of a partially matched block and of snapshots. Under extreme pressure it
        gives the partial match up instead: read `num_computed_tokens` afterwards. Raises OutOfPagesError (try again
        when another sequence has closed), NeverFitsError, InvalidSizeError.
        """
        with self._guard:
            self.require_open()
            if not isinstance(num_tokens, (int, np.integer)):
                raise InvalidSizeError(f"a size is a whole number of tokens, not {num_tokens!r}")
            if num_tokens < max(1, self.num_computed_tokens):
                raise InvalidSizeError(
                    f"cannot resize to {num_tokens} tokens: {self.num_computed_tokens} are computed already"
                )
            if history is not None and not self.num_computed_tokens <= history <= num_tokens:
                raise InvalidSizeError(f"history lies in {self.num_computed_tokens} .. {num_tokens}, not {history}")
            sequence_growth.resize(self, num_tokens, history)

    # computing

    def chunk_end(self, limit: int) -> int:
        """Where the next chunk of the prompt must end, at most `limit`: recurrent state is kept only at chunk ends.
        Raises InvalidSizeError for a limit before the computed tokens' end.
        """
        if limit < self.num_computed_tokens:
            raise InvalidSizeError(f"a chunk cannot end at {limit}: {self.num_computed_tokens} tokens are computed")
        if not self.points:
            return limit
        return min([limit, *(point for point in self.points if point > self.num_computed_tokens)])

    def append_computed(
        self,
        tokens: Tokens,
        *,
        end_of_prompt: bool = False,
        origin: BlockOrigin = BlockOrigin.COMPUTED,
        worker: str | None = None,
    ) -> None:
        """The KV of `tokens`, at positions `num_computed_tokens` on, now stands in the pages. Publishes as the policy
        says: `all_reusable` whole blocks at every call, the others at `end_of_prompt`. Empty `tokens` are allowed with
        `end_of_prompt`. `origin` and `worker` say how the KV came here and who computed it (default: this worker did).
        Raises InvalidSizeError past the capacity, InvalidTokensError when they contradict the prompt.
        """
        with self._guard:
            self.require_open()
            if self.turn_ended:
                raise TurnEndedError(f"request {self.request_id}: the turn has ended, nothing can be added")
            tokens = checked_tokens(tokens, allow_empty=True)
            end = self.num_computed_tokens + len(tokens)
            if end > self.blocks * self._shape.block or end > self.capacity_tokens:
                raise InvalidSizeError(f"{end} computed tokens exceed the capacity of {self.capacity_tokens}: resize")
            if self.sources or self.state_sources:
                raise InvalidSizeError("call resize before the first append_computed: matched pages are not copied yet")
            self._tokens.put(self.num_computed_tokens, tokens)
            if len(tokens):
                self._note_origin(origin, worker)
            self.num_computed_tokens = end
            if (blocks := -(-end // self._shape.block)) > self.counted_blocks:
                count_blocks(self, blocks, origin)
            if end_of_prompt:
                self.prompt_ended = True
            publisher.after_append(self, end_of_prompt)
            if self._shape.window_rows:
                sequence_pages.release_stale(self)

    def _note_origin(self, origin: BlockOrigin, worker: str | None) -> None:
        turn = 0 if self.conversation is None else self.conversation.completed + 1
        made = Provenance(origin, self._manager.worker_id if worker is None else worker, self.request_id, turn)
        block, origins = self.num_computed_tokens // self._shape.block, self._origins
        if origins and origins[-1][1] != made and origins[-1][0] == block:
            origins.pop()  # a block of two origins is said to come from where its last tokens do
        if not origins or origins[-1][1] != made:
            origins.append((block, made))

    def origins_from(self, block: int) -> list[tuple[int, Provenance]]:
        """Provenance of the blocks from `block` on, with increasing indices counted from there."""
        if len(self._origins) == 1:
            at, made = self._origins[0]
            return [(max(0, at - block), made)]
        later = [(at - block, made) for at, made in self._origins if at > block]
        for at, made in reversed(self._origins):
            if at <= block:
                return [(0, made), *later]
        return later

    def end_turn(self, *, stop_reason: str | None = None, output_tokens: int | None = None) -> None:
        """Publish every computed token, the answer's included, and save the conversation's drop plan. Once.

        stop_reason, output_tokens   why and after how many tokens the answer ended, for eviction policies that learn
                                     (at most 64 characters; 0 .. 2^31 - 1). Raises InvalidArgumentError and
                                     InvalidSizeError, which change nothing.
        """
        with self._guard:
            self.require_open()
            if self.turn_ended:
                raise TurnEndedError(f"request {self.request_id}: end_turn was already called")
            check_turn_end(stop_reason, output_tokens)
            self.turn_ended = True
            publisher.end_turn(self)
            self._tree.order.turn_ended(self.owner, stop_reason, output_tokens)

    def own_bytes(self) -> int:
        """Bytes of the pages that this sequence holds one by one: what `suspend` would move."""
        held, layout = sequence_pages.held_pages(self), self._manager.layout
        return sum(len(pages) * layout.page_bytes(group) for group, pages in held.items())

    def suspend(self) -> int:
        """Move the pages that only this sequence holds to host memory, to make room. Returns the bytes moved. Until
        `resume` only `close` is allowed. Matched blocks stay where they are.
        """
        with self._guard:
            self.require_open()
            if self.sources or self.state_sources:
                sequence_growth.forfeit_match(self)
            self.suspended = take_out(self)
            self._manager.counters.suspended += 1
            return self.suspended.nbytes

    def resume(self) -> bool:
        """Bring a suspended sequence's pages back. False, with nothing changed, while pages lack or the pools are used
        above `max_util_for_resume`. True for a sequence that is not suspended.
        """
        with self._guard:
            suspended, self.suspended = self.suspended, None
            if suspended is None:
                return True
            done = False
            try:
                self.require_open()
                done = bring_back(self, suspended)
                self._manager.counters.resumed += done
            finally:
                if not done:
                    self.suspended = suspended
            return done

    # reading

    def tokens(self, start: int, end: int) -> Tokens:
        """Computed tokens (a view)."""
        return self._tokens.view(start, end)

    def pages(self, group: int = 0) -> Pages:
        """Page of each block ordinal, -1 where a window's page is gone (a recurrent group: its one state page). A copy
        of the moment: valid until the next resize or close.
        """
        self.require_open()
        group = self._manager.check_group(group)
        if group in self._shape.recurrent:
            return np.array([self.state_pages[group]] if group in self.state_pages else [], dtype=np.int32)
        return self.rows[self._shape.attention.index(group), : self.blocks].copy()

    def block_table(self, start_token: int = 0, end_token: int | None = None, group: int = 0) -> BlockTable:
        """The blocks holding tokens `start_token` .. `end_token` (default: the computed ones) that have a page."""
        self.require_open()
        group = self._manager.check_group(group)
        block = self._shape.block
        end = self.num_computed_tokens if end_token is None else end_token
        if not 0 <= start_token <= end or -(-end // block) > self.blocks:
            uncopied = ": call resize first, the matched part of a block is not copied yet" if self.sources else ""
            raise InvalidSizeError(f"tokens {start_token}..{end} are not within 0..{self.capacity_tokens}{uncopied}")
        generations = self._manager.storage.generations(group)
        if group in self._shape.recurrent:
            held = group in self.state_pages and end > 0
            ordinals = np.array([(end - 1) // block] if held else [], dtype=np.int32)
            pages = np.array([self.state_pages[group]] if held else [], dtype=np.int32)
        else:
            ordinals = np.arange(start_token // block, -(-end // block), dtype=np.int32)
            pages = self.rows[self._shape.attention.index(group), start_token // block : -(-end // block)].copy()
            ordinals, pages = ordinals[pages >= 0], pages[pages >= 0]
        valid = np.minimum(block, end - ordinals * np.int32(block)).astype(np.int32)
        return BlockTable(group, ordinals, pages, generations[pages].astype(np.uint64), valid)

    def pin_for_peer(self) -> PagePin:
        """Hold the current pages for a peer's pull; the pin outlives `close`. Raises PinLimitError."""
        with self._guard:
            self.require_open()
            return self._manager.pins.pin(self)

    # ending

    def close(self) -> None:
        """Give everything back. Idempotent. Without `end_turn` nothing more is published."""
        if self.closed:
            return
        with self._guard:
            if self.sources or self.state_sources:
                sequence_pages.let_sources_go(self)
            sequence_pages.give_back(self)
            self.suspended = None
            self.closed = True
            self._manager.forget(self)

    def require_open(self) -> None:
        """Raises ClosedSequenceError after `close`."""
        if self.closed:
            raise ClosedSequenceError(f"request {self.request_id}: its cache was closed, create a new one")
        if self.suspended is not None:
            raise SuspendedSequenceError(f"request {self.request_id} is suspended: resume it first")
