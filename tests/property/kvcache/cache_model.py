"""What the state machine knows about the cache without looking at it: slow and obvious."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvcache import ReuseScope, SequenceCache

SCOPES = (ReuseScope(), ReuseScope(cache_salt="s"), ReuseScope(adapter="s"))


@dataclass
class Open:
    """An open request."""

    cache: SequenceCache
    tokens: list[int]
    prompt: int
    scope: int
    conversation: str | None
    accepted: bool
    ended: bool = False

    @property
    def runs(self) -> bool:
        return not self.ended and self.cache.suspended is None

    @property
    def can_end(self) -> bool:
        return self.runs and self.cache.prompt_ended


@dataclass
class Published:
    """Every token sequence that was published, where anonymous publishers ended, and the retained turns."""

    max_num_turns: int
    everything: list[set[tuple[int, ...]]] = field(default_factory=lambda: [set() for _ in SCOPES])
    anonymous_ends: list[set[tuple[int, ...]]] = field(default_factory=lambda: [set() for _ in SCOPES])
    turns: dict[str, deque[tuple[int, tuple[int, ...]]]] = field(default_factory=dict)
    known: list[tuple[int, list[int]]] = field(default_factory=list)

    def longest(self, scope: int, tokens: list[int]) -> int:
        """The most tokens of a prompt that could be reused if nothing was ever given up."""
        asked, best = tokens[:-1], 0
        for known in self.everything[scope]:
            same = next((i for i, (x, y) in enumerate(zip(known, asked, strict=False)) if x != y), None)
            best = max(best, min(len(known), len(asked)) if same is None else same)
        return best

    def remember(self, one: Open) -> None:
        """A request published up to its committed tokens."""
        tokens = tuple(one.tokens[: one.cache.num_committed_tokens])
        if not tokens:
            return
        self.everything[one.scope].add(tokens)
        if one.cache.num_committed_tokens == one.cache.num_computed_tokens and not one.accepted:
            self.anonymous_ends[one.scope].add(tokens)
        if (one.scope, list(tokens)) not in self.known:
            self.known.append((one.scope, list(tokens)))

    def turn_completed(self, one: Open) -> None:
        """The newest of its conversation; the oldest goes."""
        assert one.conversation is not None
        queue = self.turns.setdefault(one.conversation, deque())
        queue.append((one.scope, tuple(one.tokens[: one.cache.num_computed_tokens])))
        while len(queue) > self.max_num_turns:
            queue.popleft()

    def keep_turns_of(self, conversations: set[str]) -> None:
        """The others were ended."""
        for name in set(self.turns) - conversations:
            del self.turns[name]

    def forget(self, everything: bool) -> None:
        """The cache was cleared; open requests and pins may have kept blocks (then not `everything` is gone)."""
        self.turns.clear()
        for ends in self.anonymous_ends:
            ends.clear()
        if everything:
            for published in self.everything:
                published.clear()
