"""Runs under a Python that has vLLM: its own requests, hasher and `KVCacheManager` on given prompts, no scheduler.

Started by `peers`, never imported. Prints a JSON line a round. Modules that vLLM imports and this machine lacks (GPU
kernels, grammar engines) are replaced by empty ones: the cache manager uses none of them.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import sys
import time

from peer_rounds import serve_rounds
from stub_modules import install_stubs


def main() -> None:
    """argv: prompts.npz, block, capacity in tokens, names of packages to stub. A round for each line of stdin."""
    install_stubs(frozenset(sys.argv[4].split(",")))
    import numpy as np
    import torch
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request

    data = np.load(sys.argv[1])
    block, capacity = int(sys.argv[2]), int(sys.argv[3])
    prompts = np.split(data["tokens"], np.cumsum(data["lengths"])[:-1])
    spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float16)
    config = KVCacheConfig(
        num_blocks=capacity // block + 1,  # one is vLLM's null block
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    init_none_hash(sha256)
    hasher = get_request_block_hasher(block, sha256)
    sampling = SamplingParams(max_tokens=1)

    def one_round() -> tuple[int, int, float]:
        manager = KVCacheManager(
            config, max_model_len=2_000_000, scheduler_block_size=block, hash_block_size=block, enable_caching=True
        )
        hits, blocks, cpu = 0, 0, 0.0
        for number, prompt in enumerate(prompts):
            tokens = prompt.tolist()
            began = time.thread_time()
            request = Request(str(number), tokens, sampling, None, block_hasher=hasher)
            found, cached, *_ = manager.get_computed_blocks(request)
            # the last token is only there so that a whole cached prompt is not cut by one block: no slot for it
            new = len(tokens) - 1 - cached
            if new > 0 and manager.allocate_slots(request, new, cached, found) is None:
                raise SystemExit(f"vLLM has no room for request {number}")
            if new == 0:
                manager.allocate_slots(request, 1, cached, found)
            manager.free(request)
            cpu += time.thread_time() - began
            hits += cached // block
            blocks += (len(tokens) - 1) // block
        return hits, blocks, cpu

    serve_rounds(one_round, len(prompts))


if __name__ == "__main__":
    main()
