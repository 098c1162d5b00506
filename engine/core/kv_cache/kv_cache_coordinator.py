"""Which blocks belong to which request, behind one interface for all attention types.

A model whose layers all attend to everything has one group of layers and one block table per request: V1's
unitary coordinator, the only one so far. A model that mixes full and sliding-window layers needs a second one
behind the same interface: more than one table per request, and a hit that all of its groups have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_pool import BlockPool, KVCacheBlock


class KVCacheCoordinator(Protocol):
    """What the KVCacheManager needs to know about the blocks of each request."""

    block_size: int

    def blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        """The request's block table, first to last; empty if it has none."""

    def has_blocks_for(self, request_id: str, num_tokens: int) -> bool:
        """Whether the request has blocks for so many tokens already."""

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> list[KVCacheBlock]:
        """Cached blocks that cover a prefix of at most ``max_tokens`` tokens."""

    def num_blocks_to_allocate(self, request_id: str, num_tokens: int, hit: Sequence[KVCacheBlock]) -> int:
        """Free blocks that the request takes to have ``num_tokens``; blocks of a hit that are free count."""

    def add_hit(self, request_id: str, hit: Sequence[KVCacheBlock]) -> None:
        """Give a request that has no blocks yet the cached ones it hit."""

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        """Allocate blocks until the request has enough for ``num_tokens``, and return the new ones."""

    def cache_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Cache the full blocks of the first ``num_tokens`` tokens."""

    def uncache_blocks(self, request_id: str, num_tokens: int) -> None:
        """Evict what ``cache_blocks`` has cached beyond the first ``num_tokens`` tokens."""

    def evict_blocks(self, request_id: str) -> None:
        """Evict the request's blocks from the prefix cache, whoever else holds them."""

    def take(self, request_id: str) -> tuple[list[KVCacheBlock], int]:
        """Remove a request; returns its blocks, which are still held, and how many of them are cached."""


class UnitaryKVCacheCoordinator:
    """One group of full-attention layers: block i of a request holds its tokens [i*size, (i+1)*size)."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.block_size = block_size
        self._pool = pool
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        self._num_cached: dict[str, int] = {}

    def blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        return self._blocks.get(request_id, [])

    def has_blocks_for(self, request_id: str, num_tokens: int) -> bool:
        table = self._blocks.get(request_id)
        return table is not None and num_tokens <= len(table) * self.block_size

    def find_longest_cache_hit(
        self, block_hashes: Sequence[BlockHash], max_tokens: int
    ) -> list[KVCacheBlock]:
        return self._pool.get_cached_prefix(block_hashes[: max_tokens // self.block_size])

    def num_blocks_to_allocate(self, request_id: str, num_tokens: int, hit: Sequence[KVCacheBlock]) -> int:
        num_needed = -(-num_tokens // self.block_size) - len(self._blocks.get(request_id, ())) - len(hit)
        # A hit that nobody holds leaves the free list too.
        return max(num_needed, 0) + [block.ref_cnt for block in hit].count(0)

    def add_hit(self, request_id: str, hit: Sequence[KVCacheBlock]) -> None:
        assert request_id not in self._blocks, "only a request without blocks can hit the cache"
        self._pool.touch(hit)
        self._blocks[request_id] = list(hit)
        self._num_cached[request_id] = len(hit)

    def allocate_new_blocks(self, request_id: str, num_tokens: int) -> list[KVCacheBlock]:
        table = self._blocks[request_id]
        num_new = -(-num_tokens // self.block_size) - len(table)
        if num_new <= 0:
            return []
        blocks = self._pool.get_new_blocks(num_new)
        table.extend(blocks)
        return blocks

    def cache_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        start = self._num_cached[request_id]
        end = num_tokens // self.block_size
        if end > start:
            self._pool.cache_full_blocks(self._blocks[request_id], block_hashes, start, end)
            self._num_cached[request_id] = end

    def uncache_blocks(self, request_id: str, num_tokens: int) -> None:
        start = num_tokens // self.block_size
        self._evict(self._blocks[request_id][start : self._num_cached[request_id]])
        self._num_cached[request_id] = min(start, self._num_cached[request_id])

    def evict_blocks(self, request_id: str) -> None:
        self._evict(self.blocks_of(request_id))

    def _evict(self, blocks: Sequence[KVCacheBlock]) -> None:
        for block in blocks:
            if block.block_hash is not None:  # else another request that holds it, too, has evicted it
                self._pool.evict(block)

    def take(self, request_id: str) -> tuple[list[KVCacheBlock], int]:
        return self._blocks.pop(request_id, []), self._num_cached.pop(request_id, 0)
