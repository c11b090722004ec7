"""What a caller can get wrong, with the named error that each mistake must raise."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvcache import (
    InvalidSizeError,
    InvalidTokensError,
    NeverFitsError,
    PinLimitError,
    TurnEndedError,
    UnknownLifeCycleError,
)
from tests.property.kvcache.cache_model import Open
from tests.property.kvcache.checked_manager import MOST_PINS, CheckedManager

__all__ = ["wrong_calls"]


def wrong_calls(machine: CheckedManager, one: Open | None) -> list[tuple[type[Exception], Callable[[], object]]]:
    """Calls that the machine's manager must refuse, `one` being an open request, with the error that says why."""
    manager, create = machine.manager, machine.manager.create
    calls: list[tuple[type[Exception], Callable[[], object]]] = [
        (InvalidTokensError, lambda: create("bad", np.zeros(0, dtype=np.int32), conversation_id="a")),
        (InvalidTokensError, lambda: create("bad", np.array([1, 2, -3], dtype=np.int32), conversation_id="b")),
        (InvalidTokensError, lambda: create("bad", np.array([1, 2**31]), conversation_id="c")),
        (InvalidTokensError, lambda: manager.probe_reuse(np.array([1.5]))),
        (InvalidSizeError, lambda: manager.set_budget(0)),
        (InvalidSizeError, lambda: manager.set_budget(machine.pages + 1)),
        (UnknownLifeCycleError, lambda: manager.set_budget(1, group=9)),
        (InvalidSizeError, lambda: manager.poll_events(-1)),
    ]
    if one is None or not one.runs:
        return calls
    cache, done = one.cache, one.cache.num_computed_tokens
    calls += [
        (InvalidSizeError, lambda: cache.resize(0)),
        (InvalidSizeError, lambda: cache.resize(-1)),
        (InvalidSizeError, lambda: cache.resize(max(0, done - 1))),
        (InvalidSizeError, lambda: cache.resize(done + 1, history=done + 2)),
        (InvalidSizeError, lambda: cache.chunk_end(done - 1)),
        (InvalidSizeError, lambda: cache.append_computed(np.zeros(cache.capacity_tokens + 9, dtype=np.int32))),
        (InvalidSizeError, lambda: cache.block_table(-1)),
        (InvalidSizeError, lambda: cache.block_table(0, machine.block * cache.blocks + 1)),
        (UnknownLifeCycleError, lambda: cache.pages(9)),
    ]
    if not cache.sources and not cache.state_sources and machine.full:  # windows alone hold any number of tokens
        calls.append((NeverFitsError, lambda: cache.resize(machine.pages * machine.block + 1)))
    if len(machine.pins) == MOST_PINS:
        calls.append((PinLimitError, cache.pin_for_peer))
    ended = next((o.cache for o in machine.open if o.ended and o.cache.suspended is None), None)
    if ended is not None:
        calls += [
            (TurnEndedError, ended.end_turn),
            (TurnEndedError, lambda: ended.append_computed(np.array([1], dtype=np.int32))),
        ]
    return calls
