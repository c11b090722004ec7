"""What a receiver checks of a grant before it believes it: rows it asked for, once each, pages that exist. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transceiver.messages import Grant
from transceiver.pull_reads import UNKNOWN_PAGE, Rows

__all__ = ["grant_problem", "is_duplicate_grant"]


def _outside(rows: Rows, message: Grant) -> bool:
    return bool(len(message.rows)) and not 0 <= int(message.rows.min()) <= int(message.rows.max()) < len(rows)


def is_duplicate_grant(rows: Rows, message: Grant) -> bool:
    """True for a grant that came before, all of it."""
    if not len(message.rows) or message.last or _outside(rows, message):
        return False
    return bool((rows.remote[message.rows] != UNKNOWN_PAGE).all())


def grant_problem(rows: Rows, message: Grant, num_pages: Sequence[int]) -> str | None:
    """What is wrong with a grant, or None. `num_pages`: pages in the holder's pool of every group."""
    if _outside(rows, message):
        return "rows that were not asked for"
    granted = message.rows
    if len(set(granted.tolist())) != len(granted) or bool((rows.remote[granted] != UNKNOWN_PAGE).any()):
        return "a row twice"
    if not len(granted):
        return None
    limits = num_pages[rows.only_group] if rows.only_group is not None else np.asarray(num_pages)[rows.group[granted]]
    if int(message.pages.min()) < -1 or bool((message.pages >= limits).any()):
        return "pages outside its pool"
    return None
