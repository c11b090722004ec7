"""A conversation in one process: engine and cache manager by hand, and what each turn reuses.

    python examples/01_single_process.py [--model smollm2-135m | hash]

No cluster, no network: this is what a worker does for every request. The last turn goes back to turn 1 and branches.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.engine import ModelRunner, SequenceStep, StepPlan, load_runner, load_tokenizer, make_storage
from cluster.request import SamplingParams
from kvcache import BlockReuseConfig, KvCacheConfig, KvCacheManager, ReusePolicy

BLOCK = 16
SYSTEM = "You are a patient guide on a small ferry. You answer in one short sentence and never guess."
QUESTIONS = ("What is a ferry?", "Who steers it?", "Where does it go at night?")


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn did."""

    prompt: int
    reused: int
    answer: list[int]
    seconds: float


def run_turn(
    runner: ModelRunner, manager: KvCacheManager, prompt: list[int], conversation_id: str, max_tokens: int
) -> Turn:
    """Compute what the cache lacks of `prompt`, decode greedily, publish the turn for the next one."""
    started = time.perf_counter()
    ids = np.array(prompt, dtype=np.int32)
    with manager.create(f"turn-{len(prompt)}", ids, conversation_id=conversation_id) as sequence:
        reused = sequence.num_reused_tokens
        answer: list[int] = []
        pending: NDArray[np.int32] = ids[reused:]
        while len(answer) < max_tokens:
            start = sequence.num_computed_tokens
            sequence.resize(start + len(pending))
            step = SequenceStep(pending, start, (sequence.pages(),), SamplingParams())
            (token,) = runner.execute(StepPlan([step]))
            assert token is not None
            sequence.append_computed(pending, end_of_prompt=not answer)
            answer.append(token)
            if token in runner.eos_token_ids:
                break
            pending = np.array([token], dtype=np.int32)
        sequence.end_turn()
    return Turn(len(prompt), reused, answer, time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=24, help="of each answer")
    args = parser.parse_args()

    tokenizer = load_tokenizer(args.model)
    runner = load_runner(args.model, tokens_per_block=BLOCK)
    storage = make_storage(runner, [128])
    runner.bind(storage)
    reuse = BlockReuseConfig(policy=ReusePolicy.PER_CONVERSATION, max_num_turns=5)
    manager = KvCacheManager(runner.layout, KvCacheConfig(tokens_per_block=BLOCK, block_reuse_config=reuse), storage)

    def ask(history: list[int], question: str) -> list[int]:
        """The prompt of the next turn: the ids so far (never re-encoded), then the new message."""
        messages = [{"role": "user", "content": question}]
        if not history:
            messages.insert(0, {"role": "system", "content": SYSTEM})
            return tokenizer.encode(tokenizer.apply_chat_template(messages))
        return history + tokenizer.encode(f"\n<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n")

    print(f"{'turn':>6} {'prompt':>7} {'reused':>7} {'computed':>9} {'seconds':>8}  answer")
    histories: list[list[int]] = [[]]
    for number, question in enumerate(QUESTIONS, start=1):
        prompt = ask(histories[-1], question)
        turn = run_turn(runner, manager, prompt, "ferry", args.max_tokens)
        ended = [] if turn.answer[-1] in runner.eos_token_ids else sorted(runner.eos_token_ids)[:1]
        histories.append(prompt + turn.answer + ended)
        show(str(number), turn, tokenizer.decode(turn.answer))
    branch = run_turn(runner, manager, ask(histories[1], "And who built it?"), "ferry", args.max_tokens)
    show("1'", branch, tokenizer.decode(branch.answer))
    manager.check_integrity()
    manager.clear()
    storage.close()


def show(name: str, turn: Turn, text: str) -> None:
    """One row of the table."""
    computed = turn.prompt - turn.reused
    print(f"{name:>6} {turn.prompt:>7} {turn.reused:>7} {computed:>9} {turn.seconds:>8.2f}  {text.strip()!r}")


if __name__ == "__main__":
    main()
