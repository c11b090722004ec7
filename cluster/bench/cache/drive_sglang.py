"""Runs under a Python that has SGLang: its own `RadixCache` (Python) on given prompts, with a counting allocator.

Started by `peers`, never imported. Prints one JSON line. Modules that SGLang imports and this machine lacks (GPU
kernels, grammar engines) are replaced by empty ones: the cache manager uses none of them.
"""

# mypy: disable-error-code="import-not-found"

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import sys
import time
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock


class _Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Last resort of the import system: an empty module for what is not installed."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name.split(".")[0] in sys.argv[4].split(","):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        module: Any = MagicMock(name=spec.name)
        module.__path__ = []
        module.__spec__ = spec
        return module  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        pass


def main() -> None:
    """argv: prompts.npz, block, capacity in tokens, names of packages to stub."""
    sys.meta_path.append(_Stubs())
    known_version = importlib.metadata.version
    stubs = sys.argv[4].split(",")
    importlib.metadata.version = lambda distribution_name: (
        "0.0.0" if distribution_name in stubs else known_version(distribution_name)
    )
    from array import array

    import numpy as np
    import torch
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

    data = np.load(sys.argv[1])
    block, capacity = int(sys.argv[2]), int(sys.argv[3])
    capacity -= capacity % block
    prompts = np.split(data["tokens"], np.cumsum(data["lengths"])[:-1])

    class Allocator:
        """Counts token slots; the slots themselves are numbers that nobody reads."""

        device = "cpu"
        left = capacity

        def free(self, slots: Any) -> None:
            self.left += len(slots)

    allocator = Allocator()
    cache = RadixCache.create_simulated(mock_allocator=allocator, page_size=block)
    slots = torch.arange(2_000_000, dtype=torch.int64)
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
    print(
        json.dumps(
            {
                "hit_rate": hits / blocks,
                "cpu_us_per_block": 1e6 * cpu / blocks,
                "cpu_ms_per_request": 1e3 * cpu / len(prompts),
            }
        )
    )


if __name__ == "__main__":
    main()
