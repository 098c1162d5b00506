"""How much of the KV cache is in use."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheStatistics:
    """Counts of usable blocks, and of pins."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Blocks, free or not, that are cached: the prefix cache finds them."""
    num_pinned_blocks: int
    """Blocks in pins, where a block in two pins counts twice."""
    num_pins: int
