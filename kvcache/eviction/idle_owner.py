"""What the learned eviction order knows of one conversation."""

from __future__ import annotations

from math import exp, log

from kvcache.eviction.leaf_heap import LeafHeap

__all__ = ["IdleOwner", "is_anonymous"]

_SMOOTHING = 0.3  # weight of the newest gap
_LONGEST_GAP_S = 3600.0
_MOST_GAPS = 8  # stop reasons remembered for one conversation


def is_anonymous(owner: str) -> bool:
    """Whether `owner` is nobody, or stands for one request without a conversation: it never comes back."""
    return not owner or owner[0] == "\0"


class IdleOwner:
    """A conversation (or a request without one), its evictable leaf runs and what is known of its rhythm.

    leaves       its runs that may be given up
    runs         how many runs count as its own: `leaves`, and those that were given out to be shortened
    active       open requests
    away         a turn ended and no request was opened since: a return is to be learned from
    idle_since   when its last turn ended (s)
    seen         when a request of it was last opened or closed, or a turn ended (s)
    kind         class of the last turn's end (`ReturnHazard.class_of`)
    gaps         by stop reason: the smoothed logarithm of the time (s) that it stayed away after such turns
    """

    __slots__ = ("active", "away", "gaps", "idle_since", "kind", "leaves", "name", "runs", "seen", "stop_reason")

    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.leaves = LeafHeap()
        self.runs = 0
        self.idle_since = self.seen = now
        self.away = False
        self.kind = 0
        self.stop_reason: str | None = None
        self.gaps: dict[str | None, float] = {}
        self.active = 0

    def age(self, now: float) -> float:
        """Seconds since its turn ended or, while a turn goes on elsewhere, since it was seen last."""
        return max(0.0, now - (self.idle_since if self.away else self.seen))

    def past_gap(self, stop_reason: str | None) -> float | None:
        """Seconds that it stays away after such a turn, or None when there was none yet."""
        smoothed = self.gaps.get(stop_reason)
        return None if smoothed is None else exp(smoothed)

    def came_back(self, gap: float) -> None:
        """It stayed away for `gap` seconds."""
        newest = log(min(_LONGEST_GAP_S, max(1.0, gap)))
        smoothed = self.gaps.get(self.stop_reason)
        if smoothed is None and len(self.gaps) >= _MOST_GAPS:
            return
        self.gaps[self.stop_reason] = newest if smoothed is None else smoothed + _SMOOTHING * (newest - smoothed)
