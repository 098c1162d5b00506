"""Converts a number of the pool's blocks to tokens, by the KV cache groups of the model."""

from __future__ import annotations

from bisect import bisect_right

from engine.records.kv_cache_groups import ONE_FULL_GROUP, num_blocks_held
from eval.trace.recorded_groups import recorded_groups
from tracing.events import TraceHeader


def pinned_tokens(header: TraceHeader, num_blocks: int) -> int:
    """Returns the tokens of the longest turn whose KV, over all groups, fits in a pin of this many blocks."""
    groups = recorded_groups(header)
    size = header.block_size
    if groups == ONE_FULL_GROUP:
        return num_blocks * size
    steady = [group for group in groups if group.attention_chunk is None]
    longest = bisect_right(
        range(1, num_blocks + 1), num_blocks, key=lambda n: num_blocks_held(steady, size, n)
    )
    # The blocks of chunks shrink where a chunk begins, so bisection cannot find this part.
    while num_blocks_held(groups, size, longest) > num_blocks:
        longest -= 1
    return longest * size
