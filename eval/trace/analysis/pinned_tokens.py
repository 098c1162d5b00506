"""How many tokens a number of the pool's blocks is worth, by the KV cache groups of the model."""

from __future__ import annotations

from bisect import bisect_right

from engine.kv_cache_groups import KVCacheGroup, num_blocks_held
from tracing.events import TraceHeader


def pinned_tokens(header: TraceHeader, num_blocks: int) -> int:
    """Tokens of the longest turn that a pin of so many blocks, over all groups, holds for its return."""
    if not header.kv_group_windows:
        return num_blocks * header.block_size
    groups = [KVCacheGroup((0,), window or None) for window in header.kv_group_windows]
    size = header.block_size
    longest = range(1, num_blocks + 1)
    return size * bisect_right(longest, num_blocks, key=lambda n: num_blocks_held(groups, size, n))
