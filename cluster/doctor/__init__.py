"""`kvferry doctor`: does this machine have what a cluster needs? Looks, changes nothing."""

from __future__ import annotations

from cluster.doctor.examination import examine
from cluster.doctor.finding import Finding, Verdict

__all__ = ["Finding", "Verdict", "examine"]
