"""Promises about the blocks of ended turns: what is known of them equals what a look-up finds."""

from __future__ import annotations

from hashlib import sha256

import pytest

from engine.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from engine.core.kv_cache.known_chains import MAX_CHAINS, KnownChains

HASHES = [sha256(bytes([number])).digest() for number in range(8)]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(20)


def cached(pool: BlockPool, count: int) -> list[KVCacheBlock]:
    """Free blocks that cache the first hashes."""
    blocks = pool.get_new_blocks(count)
    pool.cache_full_blocks(blocks, HASHES, 0, count)
    pool.free_blocks(reversed(blocks))
    return blocks


def test_a_known_turn_and_what_follows_it_is_found(pool: BlockPool) -> None:
    """The chain is found up to the last cached block, and up to the requested length."""
    blocks = cached(pool, 6)
    chains = KnownChains(pool)
    chains.note(HASHES, blocks[:4])
    assert chains.find(HASHES, 4, 8) == blocks == pool.get_cached_prefix(HASHES)
    assert chains.find(HASHES, 4, 5) == blocks[:5]
    assert chains.find(HASHES, 3, 8) == [], "a part of it is looked up"
    assert chains.find(HASHES, 4, 3) == []
    assert chains.find(HASHES, 0, 8) == []


def test_what_is_cached_no_more_is_looked_up(pool: BlockPool) -> None:
    """If a block of the turn was reused, the chain is looked up."""
    blocks = cached(pool, 4)
    chains = KnownChains(pool)
    chains.note(HASHES, blocks)
    taken = pool.get_new_blocks(16)
    assert blocks[3] in taken
    assert chains.find(HASHES, 4, 8) == []
    assert len(pool.get_cached_prefix(HASHES)) == 3


def test_equal_blocks_are_looked_up(pool: BlockPool) -> None:
    """If two blocks cache the same content, a look-up finds the older one, as a replay does."""
    blocks = cached(pool, 4)
    chains = KnownChains(pool)
    chains.note(HASHES, blocks)
    cached(pool, 1)
    assert pool.has_duplicates
    assert chains.find(HASHES, 4, 8) == []


def test_only_the_last_turns_are_known(pool: BlockPool) -> None:
    """The number of known turns is bounded."""
    block = cached(pool, 1)
    chains = KnownChains(pool)
    chains.note(HASHES, block)
    for number in range(MAX_CHAINS):
        chains.note([sha256(b"%d" % number).digest()], block)
    assert chains.find(HASHES, 1, 8) == []
