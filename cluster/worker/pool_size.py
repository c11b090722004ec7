"""How many pages a worker's pools get from its configuration."""

from __future__ import annotations

from cluster.errors import StartupError
from kvcache import KvCacheConfig, KvLayout

__all__ = ["pool_pages"]


def pool_pages(config: KvCacheConfig, layout: KvLayout, available_bytes: int) -> tuple[int, ...]:
    """Pages of each layer group's pool: `max_tokens` in blocks, or `free_memory_fraction` of the available memory.

    available_bytes  what this worker may count on. Raises StartupError when not even one block fits.
    """
    tokens_per_block = layout.tokens_per_block
    page_bytes = sum(layout.page_bytes(group) for group in range(len(layout.groups)))
    if config.max_tokens is not None:
        pages = -(-config.max_tokens // tokens_per_block)
        if pages * page_bytes > available_bytes:
            raise StartupError(
                f"kv_cache_config.max_tokens {config.max_tokens} needs {pages * page_bytes / 2**20:.0f} MiB, but only "
                f"{available_bytes / 2**20:.0f} MiB of memory are free for this worker: lower it",
                param="kv_cache_config.max_tokens",
            )
    else:
        pages = int(available_bytes * config.free_memory_fraction) // page_bytes
    if pages < 1:
        raise StartupError(
            f"the KV pool would hold no block of {page_bytes} bytes: raise kv_cache_config.max_tokens or "
            "kv_cache_config.free_memory_fraction",
            param="kv_cache_config",
        )
    return (pages,) * len(layout.groups)
