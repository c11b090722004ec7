"""Random models, layouts, pool forms and prompts inside one process: whatever the lists of cases have left out."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from kvcache.layout import LifeCycleKind as K
from tests.integration.transceiver.layout_exchange import EVERYTHING, INPROC, Processes, exchange
from tests.integration.transceiver.layout_values import Group, Model, Request
from transceiver.parallel_layout import ParallelLayout as P

#: KVFERRY_ALL_FABRICS=1 takes more of them.
SEEDS = range(1000 if EVERYTHING else 30)


def random_model(rng: np.random.Generator, heads: int, ranks: int) -> Model:
    """One to four groups; each layer has its KV or state in one of them, and maybe index keys."""
    layers = int(rng.integers(1, 10))
    dim = int(rng.choice([8, 24, 512]))
    kinds = rng.choice(["full", "window", "window", "mla", "state"], size=int(rng.integers(1, 4)))
    dealt = rng.integers(0, len(kinds), layers)
    groups = []
    for index, kind in enumerate(kinds):
        mine = tuple(np.flatnonzero(dealt == index).tolist())
        dtype = str(rng.choice(["float32", "bfloat16", "uint8"]))
        if not mine:
            continue
        if kind == "state":
            sections = tuple(int(size) * ranks for size in rng.integers(1, 200, int(rng.integers(1, 4))))
            groups.append(Group(mine, kind=K.RECURRENT, sections=sections, dtype="uint8"))
        elif kind == "mla":
            groups.append(Group(mine, 1, dim, K.MLA, kv=1, dtype=dtype))
        else:
            window = int(rng.integers(1, 60)) if kind == "window" else None
            groups.append(Group(mine, heads, dim, K.SLIDING if window else K.FULL, window, dtype=dtype))
    if rng.random() < 0.3:
        some = tuple(np.flatnonzero(rng.random(layers) < 0.6).tolist()) or (0,)
        groups.append(Group(some, 1, 16, kv=1, dtype="uint8"))
    return Model(layers, tuple(groups))


def random_requests(rng: np.random.Generator, model: Model) -> list[Request]:
    requests = []
    for number in range(int(rng.integers(1, 4))):
        length = int(rng.integers(1, 70))
        cached = int(rng.integers(0, length + 1)) if rng.random() < 0.4 else 0
        held = length + int(rng.integers(1, 20)) if rng.random() < 0.3 else 0
        ends = np.unique(rng.integers(1, (held or length) + 1, 3)) if rng.random() < 0.3 else []
        requests.append(
            Request(
                number + 1, length, cached, held, keeps_stale=bool(held), state=not held,
                chunks=() if held else tuple(int(end) for end in ends if end < length),
            )
        )  # fmt: skip
    return requests


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_the_layouts(seed: int) -> None:
    rng = np.random.default_rng(seed)
    heads = int(rng.choice([1, 2, 3, 4, 6, 8]))
    fits = [tp for tp in (1, 2, 3, 4, 6, 8) if heads % tp == 0 or tp % heads == 0]
    pairs = [(a, b) for a in fits for b in fits if a % b == 0 or b % a == 0]
    ranks = pairs[int(rng.integers(len(pairs)))]
    model = random_model(rng, heads, int(np.lcm(*ranks)))
    ctx, gen = (
        P(tp, int(rng.integers(1, min(4, model.num_layers) + 1)), attention_dp=bool(rng.random() < 0.2)) for tp in ranks
    )
    forms, backwards = (bool(rng.random() < 0.4), bool(rng.random() < 0.4)), bool(rng.random() < 0.3)
    requests = random_requests(rng, model)
    with ExitStack() as stack:
        holders = Processes(stack)[str(INPROC)]
        with exchange(INPROC, holders, model, ctx, gen, forms=forms, backwards=backwards) as sides:
            sides.hand_over(requests, receive_first=bool(rng.random() < 0.3))
