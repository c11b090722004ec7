"""How soon an idle conversation comes back: hazard rates by class of idle time, learned while serving.

A class is (stop reason, how long this conversation stayed away after that reason before, output length). A class with
few observations leans on the coarser one: without the output length, then the stop reason alone, then everything.
Conversations that are away now count too, as so many seconds without a return; so those that never return make their
class look worse the longer they are away. Pure arithmetic over small arrays; knows no clock and no tree.

That the gap is taken after the same stop reason (a user's pauses say little about a tool's), the bins and the worth
were found by replaying a public agentic trace; docs/replay.md says what they gain, also on each half of it alone.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["ReturnHazard"]

# steps of a third to a half: within coarser bins, an hour-long wait that ends looks like one that never does
_EDGES = np.array(
    [0, 2, 4, 8, 15, 30, 45, 60, 90, 120, 180, 240, 360, 480, 720, 960, 1280, 1920, 2700, 3600, 1e9], dtype=np.float64
)
_STARTS, _WIDTHS = _EDGES[:-1], np.diff(_EDGES)
_BINS = len(_WIDTHS)
_MOST_REASONS = 8
_GAPS = (10.0, 30.0, 120.0, 400.0)
_OUTPUTS = (150, 600)
_SHAPE = (_MOST_REASONS, len(_GAPS) + 2, len(_OUTPUTS) + 1, _BINS)
_PRIOR_EVENTS, _PRIOR_EVENTS_OVERALL = 8.0, 2.0  # how many observations the coarser class is worth
_LONGEST_S = 100_000.0
_RATES_LAST = 16  # calls of `learn` for which learned rates are used: they change slowly


class ReturnHazard:
    """Events (returns) and exposure (seconds away) by class and bin of the time away."""

    def __init__(self) -> None:
        self._reasons: dict[str | None, int] = {None: 0}
        self._events = np.zeros(_SHAPE)
        self._exposure = np.zeros(_SHAPE)
        self._learned = np.zeros((0, _BINS))
        self._calls = 0

    def class_of(self, stop_reason: str | None, past_gap: float | None, output_tokens: int | None) -> int:
        """The class of an idle period that begins now. `past_gap` (s): how long the conversation stayed away after
        that stop reason before. Unknown stop reasons beyond eight share one class.
        """
        reason = self._reasons.get(stop_reason)
        if reason is None:
            reason = min(len(self._reasons), _MOST_REASONS - 1)
            if len(self._reasons) < _MOST_REASONS:
                self._reasons[stop_reason] = reason
        gap = 0 if past_gap is None else 1 + sum(past_gap >= edge for edge in _GAPS)
        output = 0 if output_tokens is None else sum(output_tokens >= edge for edge in _OUTPUTS)
        return (reason * _SHAPE[1] + gap) * _SHAPE[2] + output

    def returned(self, kind: int, gap: float) -> None:
        """A conversation of class `kind` came back after `gap` seconds (0 when a clock that was set back says less)."""
        gap = max(0.0, gap)
        place = min(_BINS - 1, int(np.searchsorted(_EDGES, gap, side="right")) - 1)
        self._events.reshape(-1, _BINS)[kind, place] += 1
        self._exposure.reshape(-1, _BINS)[kind] += np.clip(gap - _STARTS, 0, _WIDTHS)

    def learn(self, kinds: NDArray[np.int64], ages: NDArray[np.float64]) -> None:
        """Bring the rates up to date, with those who are away now (class, seconds away) counted in. Of a number of
        calls only the first does so: the rates change slowly.
        """
        if self._calls % _RATES_LAST == 0:
            self._learned = self._rates(kinds, ages)
        self._calls += 1

    def worth(self, kinds: NDArray[np.int64], ages: NDArray[np.float64], patience: float) -> NDArray[np.float64]:
        """After `learn`: how much keeping an idle conversation (class, seconds away) promises, as the most returns for
        a second of keeping it that any length of waiting gives. `patience` (s) is added to every wait: small hopes
        that are only just ahead count less.

        This is the index of Gittins for one page: of all ways to spend page-seconds, the best ones are those of the
        highest index, and it needs no horizon.
        """
        rate = self._learned[kinds]
        start = np.maximum(_STARTS, ages[:, None])
        ends = np.minimum(_EDGES[1:], ages[:, None] + _LONGEST_S)
        stay = np.exp(-rate * np.maximum(0.0, ends - start))
        survive = np.cumprod(stay, axis=1)
        before = np.concatenate([np.ones((len(kinds), 1)), survive[:, :-1]], axis=1)
        waited = np.cumsum(before * (1 - stay) / rate, axis=1)
        best = ((1 - survive) / (waited + patience)).max(axis=1)
        return np.asarray(best)

    def _rates(self, kinds: NDArray[np.int64], ages: NDArray[np.float64]) -> NDArray[np.float64]:
        """Returns a second by class and bin, those who are away now counted in."""
        exposure = self._exposure.copy()
        np.add.at(exposure.reshape(-1, _BINS), kinds, np.clip(ages[:, None] - _STARTS, 0, _WIDTHS))
        seen, away = [self._events], [exposure]
        for axis in (2, 1, 0):
            seen.append(seen[-1].sum(axis=axis, keepdims=True))
            away.append(away[-1].sum(axis=axis, keepdims=True))
        base = (seen[-1].sum() + 1.0) / (away[-1].sum() + 60.0)
        rate = (seen[-1] + _PRIOR_EVENTS_OVERALL) / (away[-1] + _PRIOR_EVENTS_OVERALL / base)
        for events, seconds in zip(seen[-2::-1], away[-2::-1], strict=True):
            rate = (events + _PRIOR_EVENTS) / (seconds + _PRIOR_EVENTS / rate)
        return np.asarray(rate.reshape(-1, _BINS))
