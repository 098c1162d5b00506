"""Measures how long a sample of KV blocks lives in the prefix cache, and its use: V1's KV cache metrics.

It only observes a pool; an unobserved pool pays nothing for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.records.reported_stats import BlockLives

if TYPE_CHECKING:
    from engine.core.kv_cache.block_pool import KVCacheBlock

MAX_GAPS = 4
"""How many gaps between uses are reported of one block, the last ones, as in V1."""


@dataclass(slots=True)
class _Life:
    """The life of one block, from its allocation on."""

    born_s: float
    used_s: float | None = None
    """When a request last hit it."""
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_GAPS))


class BlockLifeWatch:
    """Follows every n-th block, in the order of allocation."""

    def __init__(self, share: float, now: Callable[[], float]) -> None:
        """``share``: fraction of blocks to follow, in (0, 1]. ``now``: a clock, used for metrics only."""
        self._every = max(1, round(1 / share))
        self._until_next = 0
        """Blocks to be allocated before the next one that is followed."""
        self._now = now
        self._lives: dict[int, _Life] = {}
        self._ended = BlockLives()

    def allocated(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Note that these blocks get new content; their previous content has been evicted."""
        lives = self._lives
        if lives:
            for block in blocks:
                lives.pop(block.block_id, None)  # never cached, or reported already
        if self._until_next < len(blocks):
            now = self._now()
            for block in blocks[self._until_next :: self._every]:
                lives[block.block_id] = _Life(now)
        self._until_next = (self._until_next - len(blocks)) % self._every

    def used(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Note that a request hit these blocks."""
        now: float | None = None
        for block in blocks:
            life = self._lives.get(block.block_id)
            if life is not None:
                now = self._now() if now is None else now
                if life.used_s is not None:
                    life.gaps_s.append(now - life.used_s)
                life.used_s = now

    def evicted(self, block: KVCacheBlock) -> None:
        """End the life of a block that was evicted."""
        life = self._lives.pop(block.block_id, None)
        if life is None:
            return
        now = self._now()
        self._ended.lifetimes_s.append(now - life.born_s)
        self._ended.idle_s.append(now - (life.born_s if life.used_s is None else life.used_s))
        self._ended.reuse_gaps_s += life.gaps_s

    def cleared(self) -> None:
        """Forget all lives: an operator evicted all blocks at once, which says nothing about the load."""
        self._lives.clear()

    def take(self) -> BlockLives | None:
        """The lives that ended since the last call; None if none did."""
        if not self._ended.lifetimes_s:
            return None
        ended = self._ended
        self._ended = BlockLives()
        return ended
