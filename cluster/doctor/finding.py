"""One line of the doctor's report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Finding", "Verdict"]


class Verdict(StrEnum):
    """How bad it is: `fail` keeps a cluster from working, `warn` costs speed or a feature."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found and, unless it is fine, what to do."""

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""
