"""How soon an idle conversation comes back: hazard rates by class of idle time, learned while serving.

A class is (stop reason, smoothed past gap, output length). Conversations that never return count too: the ones idle
now are part of the exposure. Pure arithmetic over small arrays; knows no clock and no tree.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["ReturnHazard"]

_EDGES = np.array([0, 1, 2, 4, 8, 15, 30, 60, 120, 240, 480, 900, 1800, 3600, 1e9], dtype=np.float64)
_WIDTHS = np.diff(_EDGES)
_BINS = len(_WIDTHS)
_MOST_REASONS = 8
_GAPS = (10.0, 30.0, 120.0)
_OUTPUTS = (150, 600)
_PER_REASON = (len(_GAPS) + 2) * (len(_OUTPUTS) + 1)
_PRIOR_EVENTS = 8.0


class ReturnHazard:
    """Events (returns) and exposure (idle seconds) by class and time bin."""

    def __init__(self) -> None:
        self._reasons: dict[str | None, int] = {None: 0}
        classes = _MOST_REASONS * _PER_REASON
        self._events = np.zeros((classes, _BINS))
        self._exposure = np.zeros((classes, _BINS))

    def class_of(self, stop_reason: str | None, past_gap: float | None, output_tokens: int | None) -> int:
        """The class of an idle period that begins now. Unknown stop reasons beyond eight share one class."""
        reason = self._reasons.get(stop_reason)
        if reason is None:
            reason = self._reasons[stop_reason] = min(len(self._reasons), _MOST_REASONS - 1)
        gap = 0 if past_gap is None else 1 + sum(past_gap >= edge for edge in _GAPS)
        output = 0 if output_tokens is None else sum(output_tokens >= edge for edge in _OUTPUTS)
        return reason * _PER_REASON + gap * (len(_OUTPUTS) + 1) + output

    def returned(self, kind: int, gap: float) -> None:
        """A conversation of class `kind` came back after `gap` seconds."""
        place = min(_BINS - 1, int(np.searchsorted(_EDGES, gap, side="right")) - 1)
        self._events[kind, place] += 1
        self._exposure[kind] += np.clip(gap - _EDGES[:-1], 0, _WIDTHS)

    def within(self, kinds: NDArray[np.int64], ages: NDArray[np.float64], horizon: float) -> NDArray[np.float64]:
        """For idle conversations of the given classes and ages (s): expected returns within `horizon` seconds."""
        exposure = self._exposure.copy()
        np.add.at(exposure, kinds, np.clip(ages[:, None] - _EDGES[:-1], 0, _WIDTHS))
        by_reason = (_MOST_REASONS, _PER_REASON, _BINS)
        events_r = self._events.reshape(by_reason).sum(axis=1)
        exposure_r = exposure.reshape(by_reason).sum(axis=1)
        # far ahead the fine classes say little more than the stop reason: lean on it
        weight = _PRIOR_EVENTS * min(8.0, max(1.0, horizon / 40.0))
        overall = (self._events.sum(axis=0) + 1.0) / (exposure.sum(axis=0) + 60.0)
        reason_rate = (events_r + _PRIOR_EVENTS) / (exposure_r + _PRIOR_EVENTS / overall)
        prior = np.repeat(reason_rate, _PER_REASON, axis=0)
        rate = (self._events + weight) / (exposure + weight / prior)
        total = np.concatenate([np.zeros((len(rate), 1)), np.cumsum(rate * _WIDTHS, axis=1)], axis=1)
        return self._at(total, rate, kinds, ages + horizon) - self._at(total, rate, kinds, ages)

    @staticmethod
    def _at(
        total: NDArray[np.float64], rate: NDArray[np.float64], kinds: NDArray[np.int64], ages: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        place = np.clip(np.searchsorted(_EDGES, ages, side="right") - 1, 0, _BINS - 1)
        return np.asarray(total[kinds, place] + rate[kinds, place] * (ages - _EDGES[place]))
