"""Conversations of a model with full attention, a window, recurrent states and index keys, between two servers with
cache managers: only blocks inside the window that the other side lacks move, to and fro, and their bytes are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.transceiver.fabrics import FABRICS, UCX_CMA, Fabric
from tests.integration.transceiver.layout_cases import hybrid, pair_id
from tests.integration.transceiver.layout_process import Remote
from tests.integration.transceiver.layout_sides import sources_by_rank
from tests.integration.transceiver.layout_values import TOKENS, Model, live_blocks
from tests.integration.transceiver.window_server import CachedServer, LocalServer, Received
from transceiver import CacheTransceiverConfig
from transceiver.parallel_layout import ParallelLayout as P

pytestmark = [pytest.mark.ucx, pytest.mark.timeout(300)]
Tokens = NDArray[np.int32]
PAIRS = [(P(1), P(1)), (P(2), P(1)), (P(1, 2), P(2)), (P(2), P(1, 3))]
_names = count(1)


@pytest.fixture(scope="module")
def processes() -> Iterator[dict[str, Remote]]:
    with ExitStack() as stack:

        class Started(dict[str, Remote]):
            def __missing__(self, name: str) -> Remote:
                fabric = next(p.values[0] for p in FABRICS if str(p.values[0]) == name)
                self[name] = stack.enter_context(Remote(LocalServer, fabric.config))
                return self[name]

        yield Started()


class Duo:
    """The context server in the other process, the generation server here."""

    def __init__(self, stack: ExitStack, process: Remote, fabric: Fabric, ctx: P, gen: P, turns: int) -> None:
        self.model: Model = hybrid()
        self._there, self._layouts = process, (ctx, gen)
        process.ask("start", "ctx", self.model, ctx, turns)
        config = CacheTransceiverConfig(**fabric.config)
        self._here = CachedServer(stack, "gen", self.model, gen, config, turns)

    def turn(self, conversation: str, tokens: Tokens, prompt: int) -> list[Received]:
        """One turn: prefill there, hand-off, the answer (the tokens behind `prompt`) here, its way back."""
        there, here, name = self._there, self._here, f"r{next(_names)}"
        asked = tokens[:prompt]
        there.ask("open", name, asked, conversation)
        there.ask("compute", name, asked, True)
        here.open(name, asked, conversation)
        sources = self._ask_for(name, prompt, back=False)
        received = here.receive(name, asked, sources)
        here.check(name, asked)
        assert there.ask("settle")
        for rank, one in enumerate(received):
            self._check_amount(here, rank, one, prompt)
        here.compute(name, tokens, False)
        here.check(name, tokens)
        there.ask("close_turn", name)
        back = f"{name}-back"  # as a prompt of its own: what the context server now has is what was handed to it
        there.ask("open", back, tokens, conversation)
        returned = there.ask("receive", back, tokens, self._ask_for(name, len(tokens), back=True))
        assert here.settle()
        there.ask("check", back, tokens)
        for one in returned:
            assert one.had == prompt  # nothing of the prompt comes back
        there.ask("close_turn", back)
        here.close_turn(name)
        assert there.ask("at_rest") and here.at_rest()
        return received

    def _ask_for(self, name: str, length: int, *, back: bool) -> list[list[tuple[list[int], object]]]:
        """The receiver's sources, rank by rank, with tickets for each."""
        ctx, gen = self._layouts
        holder, receiver = (gen, ctx) if back else (ctx, gen)
        asked = [sources_by_rank(self.model, holder, receiver, rank, 0) for rank in range(receiver.world)]
        offers = [(source, f"t{next(_names)}") for sources in asked for source in sources]
        arguments = (name, length, offers)
        tickets = iter(self._here.offer(*arguments) if back else self._there.ask("offer", *arguments))
        return [[(groups, next(tickets)) for groups in sources.values()] for sources in asked]

    def _check_amount(self, server: CachedServer, rank: int, one: Received, length: int) -> None:
        """Blocks of the window that lay before what it had, or left it, did not move; the others did, once."""
        nbytes = 0
        for group, (shape, ordinals) in enumerate(zip(self.model.groups, one.ordinals, strict=True)):
            expected: tuple[int, ...] = ()
            if not self.model.layers(self._layouts[1], rank, group):
                pass
            elif shape.recurrent:
                expected = ((length - 1) // TOKENS,)
            else:
                expected = tuple(b for b in live_blocks(length, shape.window) if b >= one.had // TOKENS)
            assert ordinals == expected, f"group {group}, {length} tokens, had {one.had}"
            nbytes += len(expected) * server.page_bytes(rank)[group]
        assert one.outcome.bytes == nbytes


def tokens_of(seed: int, count: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 30_000, count, dtype=np.int32)


@pytest.mark.parametrize("fabric", FABRICS)
@pytest.mark.parametrize(("ctx", "gen"), PAIRS, ids=pair_id)
def test_five_turns_a_rewind_and_a_branch(processes: dict[str, Remote], fabric: Fabric, ctx: P, gen: P) -> None:
    """Ends at, before and behind a block and the window; every turn finds all of the one before on either side."""
    tokens = tokens_of(1, 160)
    turns = [(7, 8), (16, 23), (24, 25), (33, 48), (73, 90)]  # ends of prompt and answer
    with ExitStack() as stack:
        duo = Duo(stack, processes[str(fabric)], fabric, ctx, gen, turns=5)
        had = [duo.turn("a", tokens[:end], prompt) for prompt, end in turns]
        assert [{one.had for one in turn} for turn in had] == [{0}, {8}, {23}, {25}, {48}]
        branch = np.concatenate([tokens[:25], tokens_of(2, 40)])  # from the end of the third turn
        assert {one.had for one in duo.turn("a", branch[:60], 41)} == {25}


@pytest.mark.parametrize("length", [1, 7, 8, 9, 23, 24, 25, 32, 33])
def test_prompts_at_the_edges(processes: dict[str, Remote], length: int) -> None:
    """A first prompt of every length, and a second one that is longer by a token, by a block and by a window."""
    tokens = tokens_of(10 + length, length + 60)
    with ExitStack() as stack:
        duo = Duo(stack, processes[str(UCX_CMA)], UCX_CMA, P(2), P(1, 2), turns=3)
        assert {one.had for one in duo.turn("a", tokens[: length + 1], length)} == {0}
        had = length + 1
        for more in (1, TOKENS, 24):
            prompt = had + more
            assert {one.had for one in duo.turn("a", tokens[: prompt + 2], prompt)} == {had}
            had = prompt + 2


def test_a_turn_that_was_given_up_moves_again(processes: dict[str, Remote]) -> None:
    """One retained turn: a rewind to the first end finds nothing, windows and states are gone; the bytes are right."""
    tokens = tokens_of(3, 100)
    with ExitStack() as stack:
        duo = Duo(stack, processes[str(UCX_CMA)], UCX_CMA, P(2), P(1), turns=1)
        duo.turn("a", tokens[:30], 26)
        duo.turn("a", tokens[:70], 60)
        rewound = np.concatenate([tokens[:30], tokens_of(4, 20)])
        assert {one.had for one in duo.turn("a", rewound, 40)} == {0}
