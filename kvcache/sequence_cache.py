"""One request's KV: its tokens, the pages of every life cycle, and its place in the tree.

Made by `KvCacheManager.create` only; the worker calls it under the manager's lock. It must never write into a page
that the tree shares: a partially matched block and a snapshot are copied first. Getting pages is in
`sequence_growth`, publishing in `publisher`.
"""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvcache import publisher, sequence_growth
from kvcache.block_pool import Pages
from kvcache.block_table import BlockTable
from kvcache.conversation_manager import Conversation
from kvcache.counters import count_blocks
from kvcache.errors import (
    ClosedSequenceError,
    InvalidSizeError,
    SuspendedSequenceError,
    TurnEndedError,
)
from kvcache.live_range import first_live_block
from kvcache.page_pin import PagePin
from kvcache.provenance import BlockOrigin, Provenance
from kvcache.radix_match import Match
from kvcache.radix_node import Anchor, Rows, Tokens
from kvcache.radix_path import block_provenance
from kvcache.suspension import SuspendedPages, bring_back, take_out
from kvcache.token_buffer import TokenBuffer
from kvcache.token_ids import checked_tokens

if TYPE_CHECKING:
    from kvcache.manager import KvCacheManager

__all__ = ["SequenceCache"]


class SequenceCache:
    """Lengths: committed (published) <= computed (KV exists) <= capacity (pages exist), in tokens."""

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
        self._tree = manager.tree
        self._shape = manager.tree.shape
        self.request_id = request_id
        self.conversation_id = conversation_id
        self.owner = conversation_id if conversation_id else f"\0{request_id}"
        self.scope = scope
        self.conversation = conversation
        self._tokens = TokenBuffer(request_id, prompt)
        self.prompt_tokens = len(prompt)
        self.num_reused_tokens = 0
        self.matched_tokens = 0 if match is None else match.token_match
        self.counted_blocks = -1
        self.num_computed_tokens = 0
        self.num_committed_tokens = 0
        self.capacity_tokens = 0
        self.blocks = 0
        self.rows: Rows = np.zeros((len(self._shape.attention), 0), dtype=np.int32)
        self.owned: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self.state_pages: dict[int, int] = {}
        self.state_sources: dict[int, int] = {}
        self.sources: list[int] = []
        self.lock: Anchor | None = None
        self.closed = False
        self.prompt_ended = False
        self.turn_ended = False
        self.suspended: SuspendedPages | None = None
        self.prompt_end = 0
        self._origins: list[tuple[int, Provenance]] = []
        self.points: tuple[int, ...] = ()
        self.explicit_points = False
        if match is not None and match.num_tokens:
            self._adopt(match)
        publisher.set_points(self, 0 if match is None else match.token_match)

    def __enter__(self) -> SequenceCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _adopt(self, match: Match) -> None:
        """Hold what was matched."""
        block, reused = self._shape.block, match.num_tokens
        rows = self._tree.rows(match.node, match.offset)
        self.lock = self._tree.lock(match.node, match.offset)
        self.blocks = reused // block
        if reused % block:
            self.sources = [int(page) for page in rows[:, -1]]
        self.rows = rows[:, : self.blocks]
        self.owned = np.zeros(self.blocks, dtype=np.bool_)
        for row, group, window in self._shape.window_rows:
            self.rows[row, : first_live_block(reused, block, window)] = -1
            pages = self.rows[row]
            self._manager.pools[group].hold(pages[pages >= 0])
        for row, group in enumerate(self._shape.attention):
            if self.sources and self.sources[row] >= 0:  # another publisher may replace a partial block meanwhile
                self._manager.pools[group].hold(np.array(self.sources[row : row + 1], dtype=np.int32))
        for group in self._shape.recurrent:
            page = match.node.states[group, reused]
            self._manager.pools[group].hold(np.array([page], dtype=np.int32))
            self.state_sources[group] = page
        self.num_reused_tokens = self.num_computed_tokens = self.num_committed_tokens = self.capacity_tokens = reused

    # growing

    def resize(self, num_tokens: int, *, history: int | None = None) -> None:
        """Provide pages for `num_tokens` tokens, or give pages beyond them back. All or nothing.

        history   the caller vouches that tokens before it will arrive whole (a transfer): windows then get pages only
                  from the live range at `history` on (default: `num_computed_tokens`)

        The first call makes private copies of a partially matched block and of snapshots. Under extreme pressure it
        gives the partial match up instead: read `num_computed_tokens` afterwards. Raises OutOfPagesError (try again
        when another sequence has closed), NeverFitsError, InvalidSizeError.
        """
        with self._manager.guard():
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
        with self._manager.guard():
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
            self._release_stale()

    def _note_origin(self, origin: BlockOrigin, worker: str | None) -> None:
        turn = 0 if self.conversation is None else self.conversation.completed + 1
        computed_by = self._manager.worker_id if worker is None else worker
        made = Provenance(origin, computed_by, self.request_id, turn)
        block = self.num_computed_tokens // self._shape.block
        if self._origins and self._origins[-1][1] != made and self._origins[-1][0] == block:
            self._origins.pop()  # a block of two origins is said to come from where its last tokens do
        if not self._origins or self._origins[-1][1] != made:
            self._origins.append((block, made))

    def origins_from(self, block: int) -> list[tuple[int, Provenance]]:
        """Provenance of the blocks from `block` on, with indices counted from there."""
        return [(max(0, at - block), made) for at, made in self._origins]

    def _release_stale(self) -> None:
        for row, group, window in self._shape.window_rows:
            first = min(first_live_block(self.num_computed_tokens, self._shape.block, window), self.blocks)
            pages = self.rows[row, :first]
            held = pages >= 0
            if held.any():
                self._manager.pools[group].release(pages[held])
                pages[held] = -1

    def end_turn(self, *, stop_reason: str | None = None, output_tokens: int | None = None) -> None:
        """Publish every computed token, the answer's included, and save the conversation's drop plan. Once.

        stop_reason, output_tokens   why and after how many tokens the answer ended, for eviction policies that learn
        """
        with self._manager.guard():
            self.require_open()
            if self.turn_ended:
                raise TurnEndedError(f"request {self.request_id}: end_turn was already called")
            self.turn_ended = True
            publisher.end_turn(self)
            self._manager.turn_completed(self, stop_reason, output_tokens)

    def suspend(self) -> int:
        """Move the pages that only this sequence holds to host memory, to make room. Returns the bytes moved. Until
        `resume` only `close` is allowed. Matched blocks stay where they are.
        """
        with self._manager.guard():
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
        with self._manager.guard():
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
        with self._manager.guard():
            self.require_open()
            return self._manager.pin(self)

    def held_pages(self) -> dict[int, Pages]:
        """Pages that this sequence holds one by one, a group each (matched tree blocks are not among them)."""
        held: dict[int, Pages] = {}
        for row, group in enumerate(self._shape.attention):
            pages = self.rows[row, : self.blocks]
            mine = pages >= 0
            held[group] = pages[mine & self.owned[: self.blocks]] if row in self._shape.full_rows else pages[mine]
        for group in self._shape.recurrent:
            held[group] = np.array([self.state_pages[group]] if group in self.state_pages else [], dtype=np.int32)
        return held

    def source_pages(self, group: int) -> Pages:
        """Shared pages and snapshots held until they are copied."""
        pages = [self.state_sources[group]] if group in self.state_sources else []
        for row, owner in enumerate(self._shape.attention):
            if owner == group and self.sources and self.sources[row] >= 0:
                pages.append(self.sources[row])
        return np.array(pages, dtype=np.int32)

    # ending

    def let_sources_go(self) -> None:
        """Stop holding shared pages and snapshots that were to be copied."""
        for row, group in enumerate(self._shape.attention):
            if self.sources and self.sources[row] >= 0:
                self._manager.pools[group].release(np.array([self.sources[row]], dtype=np.int32))
        for group, page in self.state_sources.items():
            self._manager.pools[group].release(np.array([page], dtype=np.int32))
        self.state_sources = {}
        if self.sources:
            self.sources = []
            publisher.align_lock(self)

    def own_everything(self) -> None:
        """Hold matched tree blocks page by page, so that the tree may go (`KvCacheManager.clear`)."""
        if self.lock is None:
            return
        if self.sources:
            return  # not copied yet: the lock stays, and with it the matched path
        mine = self._origins[0][0] if self._origins else self.blocks
        matched = block_provenance(self.lock.node, self.lock.offset, self._shape.block)
        self._origins[:0] = [(one.first, one.provenance) for one in matched if one.first < mine]
        shared = ~self.owned[: self.blocks]
        for row in self._shape.full_rows:
            self._manager.pools[self._shape.attention[row]].hold(self.rows[row, : self.blocks][shared])
        self.owned[: self.blocks] = True
        self._tree.unlock(self.lock)
        self.lock = None
        self.num_committed_tokens = 0

    def close(self) -> None:
        """Give everything back. Idempotent. Without `end_turn` nothing more is published."""
        if self.closed:
            return
        with self._manager.guard():
            self.let_sources_go()
            self.give_back()
            self.suspended = None
            self.closed = True
            self._manager.forget(self)

    def give_back(self) -> None:
        """Release every page and the place in the tree."""
        for group, pages in self.held_pages().items():
            self._manager.pools[group].release(pages)
        self.state_pages = {}
        self.blocks = 0
        self.rows = self.rows[:, :0]
        self.owned = self.owned[:0]
        if self.lock is not None:
            self._tree.touch(self.lock.node, self.owner)
            self._tree.unlock(self.lock)
            self.lock = None

    def require_open(self) -> None:
        """Raises ClosedSequenceError after `close`."""
        if self.closed:
            raise ClosedSequenceError(f"request {self.request_id}: its cache was closed, create a new one")
        if self.suspended is not None:
            raise SuspendedSequenceError(f"request {self.request_id} is suspended: resume it first")
