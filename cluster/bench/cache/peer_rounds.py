"""What both peers' drivers do: a measured round for each line of stdin, a JSON line for each round.

Imported by the drivers, which run under the peer's Python: standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

__all__ = ["serve_rounds"]


def serve_rounds(one_round: Callable[[], tuple[int, int, float]], requests: int) -> None:
    """`one_round` starts with an empty cache and returns blocks reused, blocks requested and CPU seconds."""
    for _ in sys.stdin:
        hits, blocks, cpu = one_round()
        figures = {
            "hit_rate": hits / blocks,
            "cpu_us_per_block": 1e6 * cpu / blocks,
            "cpu_ms_per_request": 1e3 * cpu / requests,
        }
        print(json.dumps(figures), flush=True)
