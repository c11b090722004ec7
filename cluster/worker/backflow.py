"""Is it cheaper to take an answer's KV back than to compute it again? Decided from what this process has measured.

The rule of `kv_backflow: auto`: pull iff ``a + bytes / B < tokens / R``, with a (seconds a pull costs whatever its
size), B (bytes a second of the link) and R (tokens a second of prefill) estimated online. Before enough was seen of
both, it pulls: an answer that is not there costs every later turn.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["BackflowEstimate", "BackflowPolicy"]

_MIN_OBSERVATIONS = 16
_PROBE_EVERY = 16
_DECAY = 0.95  # weight of the past at each new pull: about the last twenty count


@dataclass(frozen=True, slots=True)
class BackflowEstimate:
    """What a back-flow would cost and save, in seconds; None where too little was measured."""

    pull_s: float | None
    compute_s: float | None

    @property
    def worthwhile(self) -> bool:
        """False only when both are known and pulling costs at least as much as it saves."""
        if self.pull_s is None or self.compute_s is None:
            return True
        return self.pull_s < self.compute_s


class BackflowPolicy:
    """Running estimates of one context worker. Not thread-safe: used on the worker's event loop."""

    def __init__(self) -> None:
        self._pulls = self._declined = 0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def observe_pull(self, num_bytes: int, seconds: float) -> None:
        """A pull of that many bytes took that long."""
        x, y = float(num_bytes), seconds
        self._pulls += 1
        self._weight = self._weight * _DECAY + 1
        self._x = self._x * _DECAY + x
        self._y = self._y * _DECAY + y
        self._xx = self._xx * _DECAY + x * x
        self._xy = self._xy * _DECAY + x * y

    def estimate(
        self, *, num_bytes: int, num_tokens: int, computed_tokens: int, busy_s: float, prefills: int
    ) -> BackflowEstimate:
        """Cost of pulling `num_bytes` and of computing `num_tokens`.

        computed_tokens, busy_s, prefills  what this worker's engine has computed so far, in which time, how many steps
        """
        compute_s = None
        if prefills >= _MIN_OBSERVATIONS and computed_tokens and busy_s > 0:
            compute_s = num_tokens * busy_s / computed_tokens
        return BackflowEstimate(self._pull_seconds(num_bytes), compute_s)

    def declines(self, estimate: BackflowEstimate) -> bool:
        """Whether to compute again instead. Every now and then a pull is made all the same: a link that was slow once
        would never be measured again otherwise.
        """
        if estimate.worthwhile:
            return False
        self._declined += 1
        return self._declined % _PROBE_EVERY != 0

    def _pull_seconds(self, num_bytes: int) -> float | None:
        """Least squares over the recent pulls: fixed cost and cost a byte, neither below zero."""
        if self._pulls < _MIN_OBSERVATIONS:
            return None
        mean_x, mean_y = self._x / self._weight, self._y / self._weight
        spread = self._xx / self._weight - mean_x * mean_x
        slope = 0.0
        if spread > 1e-6 * mean_x * mean_x:
            slope = max(0.0, (self._xy / self._weight - mean_x * mean_y) / spread)
        fixed = max(0.0, mean_y - slope * mean_x)
        return fixed + slope * num_bytes
