"""All ranks of a server with a cache manager each, for conversations of a model with windows and recurrent state.

KV is a function of all tokens up to its own and of its global layer and head; a state one of all tokens before. It is
written as a model runner would and compared wherever a cache says that it has it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache import KvCacheManager, SequenceCache
from kvcache.block_table import BlockTable
from kvcache.config import BlockReuseConfig, KvCacheConfig, ReusePolicy
from kvcache.page_pin import PagePin
from kvcache.storage.bytes_storage import BytesPageStorage
from tests.integration.transceiver.layout_values import TOKENS, Model, live_blocks
from tests.unit.transceiver.rig import SCOPE, SECRET
from transceiver import (
    CacheTransceiver,
    CacheTransceiverConfig,
    FoldedPull,
    GrantTicket,
    Publication,
    TransferOutcome,
    TransferStatus,
)
from transceiver.parallel_layout import ParallelLayout

__all__ = ["CachedServer", "LocalServer", "Received"]

Bytes = NDArray[np.uint8]
Tokens = NDArray[np.int32]
_PAGES = 96
_CHUNK = 13  # tokens of a prefill step: never a whole block
_WAIT_S = 30.0


@dataclass(frozen=True)
class Received:
    """What a rank's hand-off was: tokens it had, wanted ordinals of every group, and the outcome."""

    had: int
    ordinals: tuple[tuple[int, ...], ...]
    outcome: TransferOutcome


def _digests(tokens: Tokens) -> NDArray[np.uint64]:
    """One number for every prefix: after 1, 2, ... tokens."""
    numbers, value = [], 0xCBF29CE484222325
    for token in tokens.tolist():
        value = ((value ^ (token + 1)) * 0x100000001B3) & (2**64 - 1)
        numbers.append(value)
    return np.array(numbers, np.uint64)


def _mixed(*columns: Any) -> Bytes:
    """Bytes that depend on every column, which are broadcast against each other."""
    value: NDArray[np.uint64] = np.zeros(1, np.uint64)  # an array: its product wraps without a warning
    for column in columns:
        value = (value ^ np.asarray(column, np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        value = value ^ (value >> np.uint64(29))
    return (value >> np.uint64(56)).astype(np.uint8)


class CachedServer:
    """Every method works on all ranks, which do the same."""

    def __init__(
        self, stack: ExitStack, name: str, model: Model, server: ParallelLayout, config: CacheTransceiverConfig,
        max_num_turns: int,
    ) -> None:  # fmt: skip
        self.model, self.server, self.name = model, server, name
        self.ranks: list[CacheTransceiver] = []
        self.managers: list[KvCacheManager] = []
        self._storages: list[BytesPageStorage] = []
        self._open: dict[str, list[SequenceCache]] = {}
        self._grants: list[tuple[Publication, PagePin]] = []
        cache_config = KvCacheConfig(
            tokens_per_block=TOKENS, max_tokens=_PAGES * TOKENS,
            block_reuse_config=BlockReuseConfig(policy=ReusePolicy.PER_CONVERSATION, max_num_turns=max_num_turns),
        )  # fmt: skip
        for rank in range(server.world):
            layout, shares = model.rank_layout(server, rank, name)
            storage = BytesPageStorage(layout, [_PAGES] * len(layout.groups), shared=config.wants_shared_pools)
            stack.callback(storage.close)
            self._storages.append(storage)
            self.managers.append(KvCacheManager(layout, cache_config, storage))
            self.ranks.append(
                stack.enter_context(
                    CacheTransceiver(
                        worker_id=f"{name}-{id(stack)}-{rank}", storage=storage, config=config, secret=SECRET,
                        shares=shares,
                    )
                )
            )  # fmt: skip

    # --- what must be where -------------------------------------------------------------------------------------

    def _kv(self, rank: int, group: int, tokens: Tokens) -> Bytes:
        """[layer][k/v][head][token][byte]."""
        shape = self.model.groups[group]
        layers = self.model.layers(self.server, rank, group)
        heads = self.model.heads(self.server, rank, group)
        axes = np.ix_(layers, range(shape.kv), heads, _digests(tokens), range(shape.row_bytes))
        return _mixed(group, *axes)

    def _state(self, rank: int, group: int, tokens: Tokens) -> Bytes:
        """[layer][byte] after all of `tokens`."""
        ranks, at = self.server.ranks_per_dp, self.server.rank_in_dp(rank)
        rows, history = [], _digests(tokens)[-1]
        for layer in self.model.layers(self.server, rank, group):
            parts = [
                _mixed(group, layer, number, history, np.arange(size)).reshape(ranks, -1)[at]
                for number, size in enumerate(self.model.groups[group].sections)
            ]
            rows.append(np.concatenate(parts))
        return np.stack(rows)

    def _attention(self, rank: int, group: int, page: int) -> Bytes:
        """A page as [layer][k/v][head][token][byte], writable."""
        shape = self._storages[rank].layout.groups[group]
        view = self._storages[rank].read_page(page, group)
        return view.reshape(len(shape.layers), shape.kv_factor, shape.num_kv_heads, TOKENS, -1)

    def _has(self, rank: int, group: int) -> bool:
        return bool(self.model.layers(self.server, rank, group))

    # --- a request ----------------------------------------------------------------------------------------------

    def open(self, name: str, tokens: Tokens, conversation: str) -> list[int]:
        """Match a prompt; the tokens that each rank has of it."""
        self._open[name] = [
            manager.create(f"{name}-{rank}", tokens, conversation_id=conversation)
            for rank, manager in enumerate(self.managers)
        ]
        return [cache.num_computed_tokens for cache in self._open[name]]

    def compute(self, name: str, tokens: Tokens, end_of_prompt: bool) -> None:
        """Write the KV of `tokens` from where it ends, in steps, and publish it as the policy says."""
        for rank, cache in enumerate(self._open[name]):
            kv = {
                group: self._kv(rank, group, tokens)
                for group, shape in enumerate(self.model.groups)
                if self._has(rank, group) and not shape.recurrent
            }
            cache.resize(max(len(tokens), cache.num_computed_tokens))
            while (have := cache.num_computed_tokens) < len(tokens):
                end = cache.chunk_end(min(have + _CHUNK, len(tokens)))
                for group, shape in enumerate(self.model.groups):
                    if shape.recurrent and self._has(rank, group):
                        page = self._storages[rank].read_page(int(cache.pages(group)[0]), group)
                        page[:] = self._state(rank, group, tokens[:end])
                for group, values in kv.items():
                    pages = cache.pages(group)
                    for at in range(have, end):
                        self._attention(rank, group, int(pages[at // TOKENS]))[..., at % TOKENS, :] = values[..., at, :]
                cache.append_computed(tokens[have:end], end_of_prompt=end_of_prompt and end == len(tokens))

    def offer(self, name: str, length: int, transfers: list[tuple[int, str]]) -> list[GrantTicket]:
        """Publish the first `length` tokens once for each (rank, transfer id); the pages stay pinned until it ends."""
        tickets = []
        for rank, transfer_id in transfers:
            cache = self._open[name][rank]
            tables = tuple(
                cache.block_table(0, length, group) for group in range(len(self.model.groups)) if self._has(rank, group)
            )
            publication = self.ranks[rank].publish(
                transfer_id, tables, conversation_id="c", scope=SCOPE, lease_s=_WAIT_S
            )
            self._grants.append((publication, cache.pin_for_peer()))
            tickets.append(publication.ticket)
        return tickets

    def settle(self) -> bool:
        """True when every offer was taken whole; its pages are nobody's any more."""
        grants, self._grants = self._grants, []
        ends = [publication.future.result(_WAIT_S).status for publication, _ in grants]
        for _, pin in grants:
            pin.release()
        return set(ends) == {TransferStatus.DONE}

    def receive(self, name: str, tokens: Tokens, sources: list[list[tuple[list[int], GrantTicket]]]) -> list[Received]:
        """Pull what each rank lacks of an open prompt from its sources (groups, ticket); then it is computed."""
        received = []
        for rank, asked in enumerate(sources):
            cache = self._open[name][rank]
            had = cache.num_computed_tokens
            cache.resize(len(tokens), history=len(tokens))
            wanted: list[BlockTable | None] = [
                cache.block_table(had, len(tokens), group) if self._has(rank, group) else None
                for group in range(len(self.model.groups))
            ]
            pulls = [
                self.ranks[rank].pull(
                    ticket, tuple(rows for group in groups if (rows := wanted[group]) is not None and len(rows)),
                    conversation_id="c", scope=SCOPE, timeout_s=_WAIT_S,
                )
                for groups, ticket in asked
            ]  # fmt: skip
            folded = FoldedPull(pulls)
            outcome = folded.future.result(_WAIT_S)
            folded.settled.result(_WAIT_S)
            assert outcome.status is TransferStatus.DONE, outcome
            cache.append_computed(tokens[had:], end_of_prompt=True)
            ordinals = tuple(() if rows is None else tuple(rows.ordinals.tolist()) for rows in wanted)
            received.append(Received(had, ordinals, outcome))
        return received

    def check(self, name: str, tokens: Tokens) -> None:
        """Every page that the next token needs is there and holds what it must."""
        for rank, cache in enumerate(self._open[name]):
            assert cache.num_computed_tokens == len(tokens)
            for group, shape in enumerate(self.model.groups):
                if not self._has(rank, group):
                    continue
                pages = cache.pages(group)
                if shape.recurrent:
                    page = self._storages[rank].read_page(int(pages[0]), group)
                    assert (page == self._state(rank, group, tokens)).all(), f"state of group {group}, rank {rank}"
                    continue
                values = self._kv(rank, group, tokens)
                for block in live_blocks(len(tokens), shape.window):
                    part = values[..., block * TOKENS : (block + 1) * TOKENS, :]
                    page = self._attention(rank, group, int(pages[block]))[..., : part.shape[-2], :]
                    assert (page == part).all(), f"block {block} of group {group}, rank {rank}"

    def close_turn(self, name: str) -> None:
        """Publish what was computed, answer included, and give the pages back."""
        for cache in self._open.pop(name):
            cache.end_turn()
            cache.close()

    def at_rest(self) -> bool:
        """Nothing is held; the caches are sound."""
        for manager in self.managers:
            manager.check_integrity()
        return not any(pool.held for manager in self.managers for pool in manager.stats().pools)

    def page_bytes(self, rank: int) -> list[int]:
        """Of every group."""
        layout = self._storages[rank].layout
        return [layout.page_bytes(group) for group in range(len(layout.groups))]


class LocalServer:
    """Servers one after the other, for a process of their own: `start`, then the methods of `CachedServer`."""

    def __init__(self, stack: ExitStack, config: dict[str, Any]) -> None:
        self._stack = stack.enter_context(ExitStack())
        self._config = CacheTransceiverConfig(**config)
        self._server: CachedServer | None = None

    def start(self, name: str, model: Model, server: ParallelLayout, max_num_turns: int) -> None:
        """A new server; the one before is closed."""
        self._stack.close()
        self._server = CachedServer(self._stack, name, model, server, self._config, max_num_turns)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._server, name)
