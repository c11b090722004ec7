"""Turns generated token ids into the text that a client sees: end tokens hidden, stop strings cut, prefixes held back.

One AnswerText an answer. It decides where a stop string ends the answer and how many tokens lie wholly before that
point; it never talks to a worker. The cut does not depend on how the tokens arrive in batches: the stop string that
completes first wins.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cluster.engine import TextStream

__all__ = ["AnswerText", "TextDelta", "VisibleAnswer"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What a batch of tokens added: text that is certain to be seen, and the tokens consumed."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class VisibleAnswer:
    """A finished answer as the client sees it.

    token_ids    the tokens whose text lies wholly inside `text`, a hidden end token left out
    remainder    what `text` has beyond those tokens (a stop string cut inside a token)
    """

    text: str
    token_ids: tuple[int, ...]
    remainder: str


class AnswerText:
    """Decodes one answer."""

    def __init__(
        self,
        stream: TextStream,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        end_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`end_ids` are hidden when they end the answer; stop strings count only after `min_tokens` tokens."""
        self._stream = stream
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._end_ids = end_ids
        self._token_ids: list[int] = []
        self._text_ends: list[int] = []  # decoded characters up to and including each token
        self._decoded_chars = 0
        self._emitted: list[str] = []
        self._emitted_chars = 0
        self._held = ""  # decoded, not yet emitted: may be the beginning of a stop string
        self._pending_end: int | None = None  # an end token that ends the answer unless another token follows
        self._hidden_end = False
        self.stopped = False

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Every token consumed so far, the one that completed a stop string included."""
        return tuple(self._token_ids)

    @property
    def num_tokens(self) -> int:
        """Number of tokens consumed so far."""
        return len(self._token_ids)

    @property
    def text(self) -> str:
        """All the text emitted so far."""
        return "".join(self._emitted)

    def push(self, token_ids: Iterable[int]) -> TextDelta:
        """Consumes tokens until a stop string is complete (`stopped` is then true and the rest is left out)."""
        texts: list[str] = []
        taken: list[int] = []
        for token_id in token_ids:
            if self.stopped:
                break
            taken.append(token_id)
            texts.append(self._push_one(token_id))
        return TextDelta("".join(texts), tuple(taken))

    def finish(self, *, at_end_token: bool) -> str:
        """The text still held back, once no token follows. `at_end_token`: the answer ended by an end token."""
        if self.stopped:
            return ""
        tail = ""
        if self._pending_end is not None:
            if at_end_token:
                self._hidden_end = True
            else:
                tail = self._decode(self._pending_end)
            self._pending_end = None
        text = self._held + tail + self._stream.flush()
        self._held = ""
        return self._emit(text)

    def visible_answer(self) -> VisibleAnswer:
        """The finished answer; call it after `finish`, or once `stopped`."""
        text = self.text
        keep = self.num_visible_tokens()
        covered = self._text_ends[keep - 1] if keep else 0
        return VisibleAnswer(text, tuple(self._token_ids[:keep]), text[covered:] if self.stopped else "")

    def num_visible_tokens(self) -> int:
        """How many leading tokens have their text wholly inside the emitted text (the hidden end token left out)."""
        if not self.stopped:
            return len(self._token_ids) - self._hidden_end
        inside = [end for end in self._text_ends if end <= self._emitted_chars]
        if not inside or inside[-1] == 0:
            return 0
        return self._text_ends.index(inside[-1]) + 1

    def _push_one(self, token_id: int) -> str:
        piece = ""
        if self._pending_end is not None:  # it did not end the answer
            piece = self._decode(self._pending_end)
            self._text_ends[-1] = self._decoded_chars
            self._pending_end = None
        self._token_ids.append(token_id)
        if token_id in self._end_ids:
            self._pending_end = token_id
        else:
            piece += self._decode(token_id)
        self._text_ends.append(self._decoded_chars)
        return self._filter(piece)

    def _decode(self, token_id: int) -> str:
        piece = self._stream.push(token_id)
        self._decoded_chars += len(piece)
        return piece

    def _filter(self, piece: str) -> str:
        window = self._held + piece
        if not self._stops or len(self._token_ids) <= self._min_tokens:
            self._held = ""
            return self._emit(window)
        cut = self._find_stop(window)
        if cut is not None:
            self.stopped = True
            self._held = ""
            return self._emit(window[:cut])
        hold = self._possible_stop(window)
        self._held = window[len(window) - hold :]
        return self._emit(window[: len(window) - hold])

    def _find_stop(self, window: str) -> int | None:
        """Where the visible text ends in `window`, if a stop string is in it: the one that completes first."""
        best: tuple[int, int] | None = None
        for stop in self._stops:
            start = window.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best):
                best = (start + len(stop), start)
        if best is None:
            return None
        end, start = best
        return end if self._include_stop else start

    def _possible_stop(self, window: str) -> int:
        """Length of the longest suffix of `window` that a stop string may begin with."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(window)), longest, -1):
                if window.endswith(stop[:size]):
                    longest = size
                    break
        return longest

    def _emit(self, text: str) -> str:
        if text:
            self._emitted.append(text)
            self._emitted_chars += len(text)
        return text
