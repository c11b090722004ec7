"""Runs under a Python that has SGLang: its own `RadixCache` (Python) on given prompts, with a counting allocator.

Started by `peers`, never imported. Prints a JSON line a round. Modules that SGLang imports and this machine lacks (GPU
kernels, grammar engines) are replaced by empty ones: the cache manager uses none of them.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
import time
from typing import Any

from peer_rounds import serve_rounds
from stub_modules import install_stubs


def main() -> None:
    """argv: prompts.npz, block, capacity in tokens, names of packages to stub. A round for each line of stdin."""
    install_stubs(frozenset(sys.argv[4].split(",")))
    from array import array

    import numpy as np
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    # more threads only wait for each other here: SGLang is several times slower with two on a busy machine
    torch.set_num_threads(1)
    data = np.load(sys.argv[1])
    block, capacity = int(sys.argv[2]), int(sys.argv[3])
    capacity -= capacity % block
    prompts = np.split(data["tokens"], np.cumsum(data["lengths"])[:-1])
    slots = torch.arange(2_000_000, dtype=torch.int64)

    class Allocator:
        """Counts token slots; the slots themselves are numbers that nobody reads."""

        device = "cpu"

        def __init__(self) -> None:
            self.left = capacity

        def free(self, slots: Any) -> None:
            self.left += len(slots)

        def free_segment(self, slots: Any, start_pos: int = 0) -> None:
            self.left += len(slots)

    def one_round() -> tuple[int, int, float]:
        allocator = Allocator()
        cache = RadixCache.create_simulated(mock_allocator=allocator, page_size=block)
        hits, blocks, cpu = 0, 0, 0.0
        for tokens in prompts:
            whole = tokens[: (len(tokens) - 1) // block * block]
            raw = whole.astype(np.int64).tobytes()
            began = time.thread_time()
            ids = array("q")
            ids.frombytes(raw)
            key = RadixKey(ids)
            match = cache.match_prefix(MatchPrefixParams(key=key))
            cached = match.device_prefix_len
            cache.inc_lock_ref(match.last_device_node)
            need = len(ids) - cached
            if need > allocator.left:
                cache.evict(EvictParams(num_tokens=need - allocator.left))
            if need > allocator.left:
                raise SystemExit("SGLang has no room")
            allocator.left -= need
            before = cache.path_device_indices(match.last_device_node)
            cache.insert(InsertParams(key=key, value=torch.cat([before, slots[:need]])))
            cache.dec_lock_ref(match.last_device_node)
            cpu += time.thread_time() - began
            hits += cached // block
            blocks += len(whole) // block
        return hits, blocks, cpu

    serve_rounds(one_round, len(prompts))


if __name__ == "__main__":
    main()
