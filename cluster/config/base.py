"""The common parent of the configuration models.

Owned by `cluster.config`; nothing else derives from it. It must never hold values of its own.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["StrictModel"]


class StrictModel(BaseModel):
    """A frozen model that refuses unknown keys and converts nothing (the text "5" is not the number 5)."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
