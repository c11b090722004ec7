"""A block computed twice is held once: the later sequence goes on with the page that the tree has already."""

from __future__ import annotations

import numpy as np
import pytest

from kvcache import (
    BlockReuseConfig,
    BytesPageStorage,
    KvCacheConfig,
    KvCacheManager,
    KvLayout,
    LayerGroup,
    LifeCycleKind,
    ReusePolicy,
)

BLOCK = 4
LAYOUT = KvLayout("m", BLOCK, (LayerGroup(LifeCycleKind.FULL, (0,), 1, 4, "uint8"),))


@pytest.mark.parametrize("policy", list(ReusePolicy))
def test_a_sequence_that_repeats_another_one_needs_no_more_pages_than_it_has_blocks(policy: ReusePolicy):
    storage = BytesPageStorage(LAYOUT, (7,))
    config = KvCacheConfig(tokens_per_block=BLOCK, block_reuse_config=BlockReuseConfig(policy=policy))
    manager = KvCacheManager(LAYOUT, config, storage)
    tokens = np.arange(24, dtype=np.int32)
    both = [manager.create(name, tokens[:13]) for name in ("first", "second")]
    for sequence in both:
        sequence.resize(13)
        if sequence is both[0]:
            sequence.append_computed(tokens[:13], end_of_prompt=True)
            sequence.end_turn()
            sequence.close()
    second = both[1]  # was opened before the first published: it matched nothing and computes the same blocks
    second.append_computed(tokens[:13], end_of_prompt=True)
    own = set(second.pages().tolist())
    manager.check_integrity()
    for token in range(13, 24):  # 6 blocks of 7 pages: there is no room for a second copy of the prompt
        second.resize(token + 1)
        second.append_computed(tokens[token : token + 1])
        manager.check_integrity()
    assert len(set(second.pages().tolist())) == 6
    assert len(own) == 4
    second.end_turn()
    second.close()
    manager.check_integrity()
    assert manager.stats().open_sequences == 0
    storage.close()
