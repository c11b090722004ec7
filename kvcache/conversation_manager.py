"""The ledger of conversations: which turns are retained, in order of completion, and what to give up beyond them.

Called by the cache manager only. A conversation id is a hint for retention, never a permission: matching does not look
at it. Exists for policy per_conversation.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Callable

from kvcache.drop_handle import DropHandle

__all__ = ["Conversation", "ConversationManager"]

_LOG = logging.getLogger(__name__)


class Conversation:
    """Retained turns of one id; `completed` counts all its turns, `current` is the request that computes its prompt."""

    __slots__ = ("completed", "conversation_id", "current", "ended", "last_used", "open_requests", "turns")

    def __init__(self, conversation_id: str) -> None:
        self.conversation_id = conversation_id
        self.current: str | None = None
        self.completed = 0
        self.open_requests = 0
        self.turns: deque[DropHandle] = deque()
        self.last_used = 0.0
        self.ended = False


class ConversationManager:
    """Last-N ledger over all conversations, bounded in number and by idle time."""

    def __init__(
        self, max_num_turns: int, max_tracked: int, idle_timeout_s: float | None, clock: Callable[[], float]
    ) -> None:
        self.max_num_turns = max_num_turns
        self._max_tracked = max_tracked
        self._idle_timeout_s = idle_timeout_s
        self._clock = clock
        self._by_id: OrderedDict[str, Conversation] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def retained_turns(self) -> int:
        """Retained turns over all conversations."""
        return sum(len(conversation.turns) for conversation in self._by_id.values())

    def get(self, conversation_id: str) -> Conversation | None:
        """The tracked conversation, or None."""
        return self._by_id.get(conversation_id)

    def conversations(self) -> list[Conversation]:
        """All tracked ones, the one idle for longest first."""
        return list(self._by_id.values())

    def prepare(self, conversation_id: str, request_id: str) -> Conversation | None:
        """A request begins. Returns its conversation, or None (one warning) while another request of it is in its
        prompt: the second one is then treated as a request without a conversation. Call `bound` when the request is
        sure to live.
        """
        conversation = self._by_id.get(conversation_id)
        if conversation is None:
            conversation = self._by_id[conversation_id] = Conversation(conversation_id)
        elif conversation.current is not None:
            _LOG.warning(
                "conversation %s still computes the prompt of request %s: request %s is not counted as a turn of it",
                conversation_id,
                conversation.current,
                request_id,
            )
            return None
        conversation.current = request_id
        conversation.open_requests += 1
        self._touch(conversation)
        return conversation

    def end_of_prompt(self, conversation: Conversation, request_id: str) -> None:
        """The prompt is computed: the next turn may begin."""
        if conversation.current == request_id:
            conversation.current = None

    def save_plan(self, conversation: Conversation, plan: Callable[[], DropHandle | None]) -> None:
        """A turn is completed: append its plan and drop the oldest ones beyond `max_num_turns`.

        Without a plan (a page it needs is gone) a warning is logged and the queue stays as it is. For a conversation
        that was ended meanwhile nothing happens.
        """
        if conversation.ended:
            return
        conversation.completed += 1
        handle = plan()
        if handle is None:
            _LOG.warning(
                "conversation %s: blocks of the turn that ended were given up already, so it is not retained",
                conversation.conversation_id,
            )
            return
        conversation.turns.append(handle)
        self._touch(conversation)
        while len(conversation.turns) > self.max_num_turns:
            conversation.turns.popleft().drop()

    def finish(self, conversation: Conversation, request_id: str) -> None:
        """The request is gone (done, cancelled or failed)."""
        self.end_of_prompt(conversation, request_id)
        conversation.open_requests -= 1
        if not conversation.ended and conversation.open_requests == 0 and not conversation.turns:
            del self._by_id[conversation.conversation_id]

    def end(self, conversation_id: str) -> bool:
        """Forget the conversation and drop its turns. Returns False for an unknown id."""
        conversation = self._by_id.pop(conversation_id, None)
        if conversation is None:
            return False
        conversation.ended = True
        while conversation.turns:
            conversation.turns.popleft().drop()
        return True

    def expire_idle(self) -> int:
        """End conversations idle for longer than the time-out and without an open request. Returns how many."""
        ended = 0
        if self._idle_timeout_s is None:
            return ended
        horizon = self._clock() - self._idle_timeout_s
        for conversation in list(self._oldest_until(horizon)):
            self.end(conversation.conversation_id)
            ended += 1
        return ended

    def clear(self) -> None:
        """Drop every retained turn and forget every conversation."""
        for conversation_id in list(self._by_id):
            self.end(conversation_id)

    def _oldest_until(self, horizon: float) -> list[Conversation]:
        idle = []
        for conversation in self._by_id.values():
            if conversation.last_used >= horizon:
                break
            if conversation.open_requests == 0:
                idle.append(conversation)
        return idle

    def bound(self) -> None:
        """While there are more than `max_tracked`, end those idle for longest, never one with an open request."""
        while len(self._by_id) > self._max_tracked:
            oldest = next((c for c in self._by_id.values() if c.open_requests == 0), None)
            if oldest is None:
                return
            self.end(oldest.conversation_id)

    def _touch(self, conversation: Conversation) -> None:
        conversation.last_used = self._clock()
        self._by_id.move_to_end(conversation.conversation_id)
