"""What the rest of the cluster must know of a model before (or without) loading its weights."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.layout import KvLayout

__all__ = ["ModelDescription"]


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """Facts of one model for one block size.

    fingerprint     identifies the weights (equal iff KV made by both may be mixed); also in `layout`
    max_position    longest sequence in tokens, prompt and answer together
    eos_token_ids   tokens that end an answer
    """

    layout: KvLayout
    vocab_size: int
    max_position: int
    eos_token_ids: frozenset[int]
    fingerprint: str
