"""Remembers the blocks of ended turns, so that a request that continues one need not look up each block.

A dictionary of 100,000 blocks fits in no CPU cache, and a prefix of 100,000 tokens has 6,250 blocks. Here a
turn is found by its last hash; each block itself shows whether it still caches the same content.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.kv_cache.block_pool import BlockPool, KVCacheBlock

MAX_CHAINS = 256


class KnownChains:
    """The last ``MAX_CHAINS`` chains, by the hash of their last block."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._chains: OrderedDict[BlockHash, list[KVCacheBlock]] = OrderedDict()

    def note(self, block_hashes: Sequence[BlockHash], blocks: list[KVCacheBlock]) -> None:
        """Remember that these blocks have these hashes now."""
        if blocks:
            self._chains[block_hashes[len(blocks) - 1]] = blocks
            if len(self._chains) > MAX_CHAINS:
                self._chains.popitem(last=False)

    def find(self, block_hashes: Sequence[BlockHash], num_blocks: int, max_blocks: int) -> list[KVCacheBlock]:
        """The cached blocks, at most ``max_blocks``, of a prefix whose first ``num_blocks`` blocks are a
        turn's; empty if the turn is not known. Else they are those of a look-up, as no two have one hash.
        """
        if not 0 < num_blocks <= max_blocks or self._pool.has_duplicates:
            return []
        blocks = self._chains.get(block_hashes[num_blocks - 1])
        if blocks is None or len(blocks) != num_blocks:
            return []
        if [block.block_hash for block in blocks] != block_hashes[:num_blocks]:
            return []
        return blocks + self._pool.get_cached_prefix(block_hashes[num_blocks:max_blocks])
