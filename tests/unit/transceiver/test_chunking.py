"""Chunks partition the blocks; open-ended grants deliver them while later ones do not exist yet."""

from __future__ import annotations

import pytest

from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from tests.unit.transceiver.rig import SCOPE, eventually, make_layout, pair, table
from transceiver import TransferStatus
from transceiver.chunking import chunk_blocks, held_back

LAYOUT = make_layout(8)
WINDOWED = KvLayout(
    "m", 8,
    (
        LayerGroup(LifeCycleKind.SLIDING, (0,), 1, 8, window=24),
        LayerGroup(LifeCycleKind.RECURRENT, (1,), state_bytes_per_layer=8),
    ),
)  # fmt: skip


@pytest.mark.parametrize("reused", [0, 1, 5])
@pytest.mark.parametrize("ends", [(136,), (8, 136), (64, 128, 130, 136), (13, 27, 136), (131, 136)])
def test_every_block_leaves_once(reused: int, ends: tuple[int, ...]) -> None:
    chunks = chunk_blocks(LAYOUT, 0, 136, ends, reused)
    blocks = [block for chunk in chunks for block in range(chunk.start, chunk.stop)]
    assert blocks == list(range(reused, 17))
    for chunk, end in zip(chunks[:-1], ends, strict=False):
        assert chunk.stop <= max(reused, end // 8)  # never a block that is not full yet


def test_a_partial_last_block_goes_with_the_last_chunk() -> None:
    assert [(c.start, c.stop) for c in chunk_blocks(LAYOUT, 0, 20, (12, 20))] == [(0, 1), (1, 3)]


def test_thousand_blocks() -> None:
    chunks = chunk_blocks(LAYOUT, 0, 8000, tuple(range(128, 8001, 128)) + ((8000,) if 8000 % 128 else ()))
    assert [(c.start, c.stop) for c in chunks[:3]] == [(0, 16), (16, 32), (32, 48)]


@pytest.mark.parametrize(("tokens", "first"), [(23, 0), (24, 0), (25, 0), (31, 1), (32, 1), (33, 1), (64, 5)])
def test_windowed_blocks_are_held_back_and_stale_ones_never_move(tokens: int, first: int) -> None:
    chunks = chunk_blocks(WINDOWED, 0, tokens, (8, tokens))
    if tokens > 24:
        assert held_back(WINDOWED.groups[0], tokens)
        assert len(chunks[0]) == 0
    assert chunks[0].start == first == max(0, (tokens + 1 - 24) // 8)
    assert [(c.start, c.stop) for c in chunk_blocks(WINDOWED, 1, tokens, (8, tokens))] == [(0, 0), (0, 1)]


def test_bad_ends() -> None:
    for ends in ((), (8, 8, 16), (8,), (0, 16)):
        with pytest.raises(ValueError, match="chunk ends"):
            chunk_blocks(LAYOUT, 0, 16, ends)


def test_blocks_leave_while_later_ones_do_not_exist() -> None:
    with pair(enable_pipelined_transfer=True) as p:
        grant = p.publish("t", pages=(1, 2), open_ended=True)
        pull = p.pull(grant, pages=(4, 5, 6, 7), ordinals=(0, 1, 2, 3))
        assert eventually(lambda: p.same((1, 2), (4, 5)))
        assert not pull.future.done()
        grant.extend((table((8,), ordinals=(2,)),), last=False)
        assert eventually(lambda: p.same((8,), (6,)))
        grant.extend((table((9,), ordinals=(3,)),), last=True)
        assert pull.future.result(5).status is TransferStatus.DONE
        assert grant.future.result(5).status is TransferStatus.DONE
        assert p.same((1, 2, 8, 9), (4, 5, 6, 7))


def test_blocks_that_never_come_are_named_at_the_end() -> None:
    with pair(enable_pipelined_transfer=True) as p:
        grant = p.publish("t", pages=(1,), open_ended=True)
        pull = p.pull(grant, pages=(4, 5), ordinals=(0, 1))
        grant.extend((), last=True)
        assert pull.future.result(5).bad_ordinals == ((0, 1),)


def test_an_open_ended_grant_that_fails_tells_its_receiver() -> None:
    with pair(enable_pipelined_transfer=True) as p:
        grant = p.publish("t", pages=(1,), open_ended=True)
        pull = p.pull(grant, pages=(4, 5), ordinals=(0, 1))
        assert eventually(lambda: pull.state.value == "transferring")
        grant.cancel()
        assert pull.future.result(1).status is TransferStatus.CANCELLED
        grant.extend((table((2,), ordinals=(1,)),), last=True)  # too late: changes nothing
        assert grant.future.result(1).status is TransferStatus.CANCELLED


def test_open_ended_needs_the_switch() -> None:
    with pair() as p, pytest.raises(ValueError, match="enable_pipelined_transfer"):
        p.holder.publish("t", (), conversation_id=None, scope=SCOPE, lease_s=1, open_ended=True)
