"""A "model" for tests and dry runs whose every output is a hash of the KV bytes it reads (numpy only).

The KV written for a token depends on the token, its position and all KV bytes before it; the logits depend on every
KV byte of the sequence, read through its page table. One wrong, stale or shifted block therefore changes the tokens at
once, on a model that needs no weights and microseconds a step. Integer arithmetic only: results are the same to the
bit for every batch, chunking and block size. It must never keep state between steps beside the pages.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cluster.engine.errors import EngineError
from cluster.engine.hash_tokenizer import EOS_ID, VOCAB_SIZE, byte_id
from cluster.engine.model_description import ModelDescription
from cluster.engine.model_runner import SequenceStep, StepPlan
from cluster.engine.plan_check import check_plan
from cluster.engine.sampler import sample_plan
from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from kvcache.storage.page_storage import PageStorage

__all__ = ["HashRunner", "describe_hash_model"]

_WORD = (1 << 64) - 1
_STEP = 0x9E37_79B9_7F4A_7C15
_MIX_A = 0xBF58_476D_1CE4_E5B9
_MIX_B = 0x94D0_49BB_1331_11EB
_TOKEN_KEY = 0xD6E8_FEB8_6659_FD93
_EOS_ONE_IN = 96  # an answer ends after this many tokens on average
_HEAD_DIM = 8  # one 64-bit word a head, layer and k/v


def _mix(value: int) -> int:
    """splitmix64's finaliser on one word."""
    value = (value ^ (value >> 30)) * _MIX_A & _WORD
    value = (value ^ (value >> 27)) * _MIX_B & _WORD
    return value ^ (value >> 31)


def _mix_array(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mix` on every element."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(_MIX_A)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(_MIX_B)
    return values ^ (values >> np.uint64(31))


def _bonus() -> NDArray[np.float32]:
    """Logit offset of every id: letters, blanks and a little punctuation win, so that answers can be read."""
    bonus = np.zeros(VOCAB_SIZE, dtype=np.float32)
    for character in "abcdefghijklmnopqrstuvwxyz    ,.":
        bonus[byte_id(ord(character))] = 16.0
    return bonus


def describe_hash_model(
    tokens_per_block: int, *, num_layers: int = 2, num_kv_heads: int = 1, max_position: int = 32768
) -> ModelDescription:
    """The facts of a hash model; 16 bytes of KV a token, layer and head."""
    fingerprint = hashlib.sha256(
        f"kvferry hash model 1: {num_layers} layers, {num_kv_heads} heads".encode()
    ).hexdigest()
    group = LayerGroup(
        LifeCycleKind.FULL, tuple(range(num_layers)), num_kv_heads=num_kv_heads, head_dim=_HEAD_DIM, dtype="uint8"
    )
    layout = KvLayout(fingerprint, tokens_per_block, (group,))
    return ModelDescription(layout, VOCAB_SIZE, max_position, frozenset({EOS_ID}), fingerprint)


class HashRunner:
    """ModelRunner over host pages. `step_seconds` slows every step down by that much (for tests that need the time)."""

    def __init__(
        self,
        tokens_per_block: int,
        *,
        num_layers: int = 2,
        num_kv_heads: int = 1,
        max_position: int = 32768,
        step_seconds: float = 0.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._description = describe_hash_model(
            tokens_per_block, num_layers=num_layers, num_kv_heads=num_kv_heads, max_position=max_position
        )
        self._words = num_layers * 2 * num_kv_heads
        self._block = tokens_per_block
        self._step_seconds = step_seconds
        self._sleep = sleep
        self._pool: NDArray[np.uint64] | None = None
        blocks = -(-max_position // tokens_per_block)
        # One odd factor for every word of every position, as [block][word][token]: odd, so that no change of a single
        # word can vanish modulo 2**64.
        numbers = np.arange(blocks * tokens_per_block * self._words, dtype=np.uint64)
        factors = _mix_array(numbers * np.uint64(_STEP) + np.uint64(1)) | np.uint64(1)
        by_position = factors.reshape(blocks, tokens_per_block, self._words)
        self._factors = np.ascontiguousarray(by_position.transpose(0, 2, 1))
        self._vocabulary = np.arange(VOCAB_SIZE, dtype=np.uint64) * np.uint64(_STEP)
        self._bonus = _bonus()

    @property
    def layout(self) -> KvLayout:
        """One full-attention group of `num_layers` layers."""
        return self._description.layout

    @property
    def vocab_size(self) -> int:
        """256 bytes and the special tokens."""
        return self._description.vocab_size

    @property
    def max_position(self) -> int:
        """Longest sequence in tokens."""
        return self._description.max_position

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The id of the end-of-turn token."""
        return self._description.eos_token_ids

    def bind(self, storage: PageStorage) -> None:
        """Use `storage` for KV. Raises EngineError for device memory or another layout."""
        region = storage.region(0)
        if region.device != "cpu":
            raise EngineError(f"the hash model needs host memory, the storage is on {region.device}")
        if storage.layout != self.layout:
            raise EngineError("the storage was made for another layout: use make_storage(runner, num_pages)")
        # The mapping behind the first page is the whole pool; a view of it keeps it alive even if `close` comes early.
        count = storage.num_pages(0) * self._words * self._block
        pool = np.frombuffer(memoryview(storage.page(0).obj), dtype=np.uint64, count=count)
        if pool.ctypes.data != region.address:
            raise EngineError(
                "the pages of this storage are not one span of memory: use make_storage(runner, num_pages)"
            )
        self._pool = pool.reshape(storage.num_pages(0), self._words, self._block)

    def execute(self, plan: StepPlan) -> list[int | None]:
        """See ModelRunner."""
        if self._step_seconds > 0:
            self._sleep(self._step_seconds)
        return sample_plan(plan, self.forward(plan), self.eos_token_ids)

    def forward(self, plan: StepPlan) -> list[NDArray[np.float32] | None]:
        """Write the KV of the step, return a row of logits for each sequence that samples.

        All sequences write before any is read for its logits: two that share a page to write disturb each other, as
        they would in a real model.
        """
        pool = self._pool
        if pool is None:
            raise EngineError("bind a storage before the first step")
        check_plan(plan, self.layout, len(pool), self.vocab_size, self.max_position)
        for sequence in plan.sequences:
            self._write(pool, sequence)
        return [
            None if sequence.sampling is None else self._logits(self._digest(pool, sequence, with_new=True))
            for sequence in plan.sequences
        ]

    def _digest(self, pool: NDArray[np.uint64], sequence: SequenceStep, *, with_new: bool) -> int:
        """Sum of word * factor over the pages of tokens before `start`, or up to the end of the step."""
        length = sequence.start + (len(sequence.token_ids) if with_new else 0)
        whole, rest = divmod(length, self._block)
        pages = sequence.pages[0]
        total = 0
        if whole:
            total = int(np.vdot(pool[pages[:whole]], self._factors[:whole]))
        if rest:
            words = pool[pages[whole], :, :rest]
            total += int((words * self._factors[whole, :, :rest]).sum(dtype=np.uint64))
        return total & _WORD

    def _write(self, pool: NDArray[np.uint64], sequence: SequenceStep) -> None:
        """Compute and store the KV of the step's tokens, one after the other (each depends on all before it)."""
        digest = self._digest(pool, sequence, with_new=False)
        pages = sequence.pages[0]
        position = sequence.start
        for token in sequence.token_ids.tolist():
            ordinal, offset = divmod(position, self._block)
            seed = _mix((digest + (token + 1) * _TOKEN_KEY + position * _STEP) & _WORD)
            words = [_mix((seed + index * _STEP) & _WORD) for index in range(self._words)]
            pool[pages[ordinal], :, offset] = words
            factors = self._factors[ordinal, :, offset].tolist()
            digest = (digest + sum(word * factor for word, factor in zip(words, factors, strict=True))) & _WORD
            position += 1

    def _logits(self, digest: int) -> NDArray[np.float32]:
        """Logits in 0..24 from a digest; the end of the turn wins once in `_EOS_ONE_IN` draws."""
        seed = _mix(digest ^ _MIX_B)
        noise = _mix_array(self._vocabulary + np.uint64(seed)) >> np.uint64(40)
        logits = noise.astype(np.float32) * np.float32(8.0 / (1 << 24)) + self._bonus
        if _mix(seed ^ _MIX_A) % _EOS_ONE_IN == 0:
            logits[EOS_ID] = 64.0
        return logits
