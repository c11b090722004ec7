"""In which order, and when, the requests of a trace arrive: closed-loop lanes or the trace's own times."""

from __future__ import annotations

import random
from collections import defaultdict

from cluster.replay.trace import Trace, TraceRequest

__all__ = ["scheduled"]

_START_SPREAD_S = 600.0
_BETWEEN_CONVERSATIONS_S = 5.0
_LONGEST_GAP_S = 1800.0


def scheduled(trace: Trace, lanes: int = 48, seed: int = 0) -> list[tuple[float, TraceRequest]]:
    """Requests with their arrival times (s), in order of arrival.

    A closed-loop trace runs in `lanes`: root conversations sorted by name and shuffled; a lane starts within the first
    600 s, takes the next conversation 5 s after its last one ended, and cuts gaps to 1,800 s.
    """
    if not trace.closed_loop:
        return sorted(((request.time, request) for request in trace.requests), key=lambda pair: pair[0])
    roots: dict[str, list[TraceRequest]] = defaultdict(list)
    for request in trace.requests:
        roots[request.root].append(request)
    names = sorted(roots)
    rng = random.Random(seed)
    rng.shuffle(names)
    free_at = [rng.random() * _START_SPREAD_S for _ in range(lanes)]
    arrivals: list[tuple[float, TraceRequest]] = []
    for name in names:
        lane = min(range(lanes), key=free_at.__getitem__)
        now, last = free_at[lane], None
        for request in sorted(roots[name], key=lambda one: one.time):
            if last is not None:
                now += min(max(0.0, request.time - last), _LONGEST_GAP_S)
            last = request.time
            arrivals.append((now, request))
        free_at[lane] = now + _BETWEEN_CONVERSATIONS_S
    arrivals.sort(key=lambda pair: pair[0])
    return arrivals
