"""A block's digest covers its valid tokens and nothing else; the cache follows generations."""

from __future__ import annotations

import pytest

from kvcache.layout import KvLayout, LayerGroup, LifeCycleKind
from tests.unit.transceiver.rig import make_storage
from transceiver.digest import DigestCache, block_digest


@pytest.mark.parametrize("valid", [1, 7, 8])
def test_only_valid_tokens_count(valid: int) -> None:
    storage = make_storage(fill=1)
    storage.copy_page(0, 1)
    row = 16 * 4  # bytes of one token of one head
    storage.page(1)[(valid - 1) * row] ^= 1
    assert block_digest(storage, 0, 0, valid) != block_digest(storage, 0, 1, valid)
    storage.copy_page(0, 1)
    if valid < 8:
        storage.page(1)[valid * row] ^= 1
    assert block_digest(storage, 0, 0, valid) == block_digest(storage, 0, 1, valid)
    storage.close()


def test_recurrent_state_is_hashed_whole() -> None:
    group = LayerGroup(LifeCycleKind.RECURRENT, (0,), state_bytes_per_layer=64)
    storage = make_storage(KvLayout("m", 8, (group,)), (2,), fill=1)
    storage.copy_page(0, 1)
    storage.page(1)[63] ^= 1
    assert block_digest(storage, 0, 0, 1) != block_digest(storage, 0, 1, 1)
    storage.close()


def test_a_new_generation_is_hashed_anew_and_a_stale_one_is_not_kept() -> None:
    storage = make_storage(fill=1)
    cache = DigestCache(storage)
    (first,) = cache.compute([(0, 3, 1, 8)])
    assert cache.find(0, 3, 1, 8) == first
    storage.generations()[3] = 2
    storage.page(3)[0] ^= 1
    (second,) = cache.compute([(0, 3, 2, 8)])
    assert second != first
    cache.compute([(0, 4, 9, 8)])  # page 4 has generation 1
    assert cache.find(0, 4, 9, 8) is None
    storage.close()


def test_the_cache_is_bounded() -> None:
    storage = make_storage(fill=1)
    cache = DigestCache(storage, capacity=2)
    cache.compute([(0, page, 1, 8) for page in range(4)])
    assert [cache.find(0, page, 1, 8) is None for page in range(4)] == [True, True, False, False]
    storage.close()
