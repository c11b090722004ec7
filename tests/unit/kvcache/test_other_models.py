"""Models whose layers are not full attention and something: MLA latents, windows alone, recurrent state alone."""

from __future__ import annotations

import pytest

from kvcache import InvalidSizeError, LayerGroup, LifeCycleKind

ENDS = (12, 24, 36, 48, 60)


def turns(b) -> list[int]:
    return [b.turn(range(end), "c") for end in ENDS]


def rewinds(b) -> list[int]:
    return [b.probe([*range(end), 999]) for end in ENDS]


def test_recurrent_state_alone(bench):
    """A model without any attention: nothing is paged by blocks, a state a turn is kept."""
    b = bench(full=False, recurrent=2, turns=5, pages=16)
    turns(b)
    assert rewinds(b) == list(ENDS)
    b.turn(range(72), "c", range(100, 110))
    assert rewinds(b) == [0, 24, 36, 48, 60]
    assert b.probe([*range(72), *range(100, 110), 1]) == 81
    assert b.cached(0) == b.cached(1) == 6  # five ends, and the last prompt's end, which goes with its turn


def test_windows_alone(bench):
    b = bench(full=False, windows=(4, 8), turns=2, pages=16)
    turns(b)
    assert rewinds(b) == [0, 0, 0, 48, 60]


MLA = {"alone": {"full": False, "mla": True}, "and full": {"mla": True}}
MLA_WINDOWED = {
    "and window": {"full": False, "mla": True, "windows": (8,)},
    "and recurrent": {"full": False, "mla": True, "recurrent": 1},
}


@pytest.mark.parametrize("kind", MLA)
def test_mla_is_kept_like_full_attention(bench, kind):
    b = bench(turns=1, **MLA[kind])
    assert b.layout.groups[-1].kind is LifeCycleKind.MLA
    assert turns(b) == [0, 12, 24, 36, 48]
    assert rewinds(b) == list(ENDS)
    branch = [*range(10), *range(500, 512)]
    assert b.turn(branch, "c") == 10
    assert b.probe([*branch, 1]) == 22
    group = len(b.layout.groups) - 1
    assert b.cached(group) == 15 + 4
    assert b.manager.stats().pools[group].kind == "mla"
    cache = b.start(range(20), "d")
    assert cache.block_table(0, 16, group=group).ordinals.tolist() == [0, 1, 2, 3]
    with pytest.raises(InvalidSizeError, match="call resize first"):
        cache.block_table(group=group)
    cache.resize(20)
    assert cache.block_table(group=group).valid_tokens.tolist() == [4, 4, 4, 4, 3]
    cache.close()


@pytest.mark.parametrize("kind", MLA_WINDOWED)
def test_mla_beside_windows_and_states(bench, kind):
    b = bench(turns=2, **MLA_WINDOWED[kind])
    turns(b)
    assert rewinds(b) == [0, 0, 0, 48, 60]


def test_mla_latent_under_pressure_and_in_a_lower_tier(bench):
    b = bench(full=False, mla=True, pages=8, policy="per_request", host_cache_size=1000)
    for k in range(4):
        b.turn(range(k * 100, k * 100 + 16))
    assert b.manager.stats().evictions["capacity"] == 8
    assert b.turn([*range(16), 7]) == 16


def test_mla_page_is_one_latent_a_token():
    latent = LayerGroup(LifeCycleKind.MLA, (0, 1, 2), num_kv_heads=1, head_dim=576, dtype="bfloat16", kv_factor=1)
    assert (latent.token_bytes, latent.page_bytes(16)) == (3 * 576 * 2, 16 * 3 * 576 * 2)
