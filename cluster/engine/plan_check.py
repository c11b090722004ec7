"""Refuses step plans that would read or write outside a sequence's pages. Every runner calls it first."""

from __future__ import annotations

from cluster.engine.errors import InvalidStepError
from cluster.engine.model_runner import StepPlan
from kvcache.layout import KvLayout

__all__ = ["check_plan"]


def check_plan(plan: StepPlan, layout: KvLayout, num_pages: int, vocab_size: int, max_position: int) -> None:
    """Raise InvalidStepError, naming the sequence by its index, unless every sequence of `plan` can be executed."""
    block = layout.tokens_per_block
    for index, sequence in enumerate(plan.sequences):
        count = len(sequence.token_ids)
        end = sequence.start + count
        where = f"sequence {index} of the step"
        if count < 1:
            raise InvalidStepError(f"{where} has no tokens: plan at least one")
        if sequence.start < 0 or end > max_position:
            raise InvalidStepError(
                f"{where} covers positions {sequence.start}..{end - 1}, the model takes 0..{max_position - 1}"
            )
        if int(sequence.token_ids.min()) < 0 or int(sequence.token_ids.max()) >= vocab_size:
            raise InvalidStepError(f"{where} has a token id outside 0..{vocab_size - 1}")
        if len(sequence.pages) != len(layout.groups):
            raise InvalidStepError(
                f"{where} has {len(sequence.pages)} page tables, the layout has {len(layout.groups)} groups"
            )
        needed = -(-end // block)
        for pages in sequence.pages:
            if len(pages) < needed:
                raise InvalidStepError(f"{where} needs {needed} pages for {end} tokens, its table has {len(pages)}")
            used = pages[:needed]
            if int(used.min()) < 0 or int(used.max()) >= num_pages:
                raise InvalidStepError(f"{where} names a page outside the pool of {num_pages}")
