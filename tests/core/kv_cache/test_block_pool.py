"""The block pool stays consistent under any sequence of operations."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.kv_cache.block_pool import BlockPool, KVCacheBlock

NUM_BLOCKS = 9


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders take, share, cache and free blocks; plain lists model who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.holders: list[list[KVCacheBlock]] = []
        self.next_hash = 0

    @rule(count=st.integers(1, 4))
    def take(self, count: int) -> None:
        if count <= self.pool.num_free_blocks:
            self.holders.append(self.pool.get_new_blocks(count))

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), fresh=st.booleans())
    def cache(self, data: st.DataObject, fresh: bool) -> None:
        """Gives a holder's unhashed head blocks a hash, sometimes one that another block already has."""
        blocks = data.draw(st.sampled_from(self.holders))
        start = sum(1 for block in blocks if block.block_hash is not None)
        if any(block.block_hash is not None for block in blocks[start:]) or start == len(blocks):
            return
        self.next_hash += fresh
        hashes = [f"{self.next_hash}/{i}".encode() for i in range(len(blocks))]
        if any(hashes[i] == block.block_hash for block in blocks[:start] for i in range(len(blocks))):
            return
        self.pool.cache_full_blocks(blocks, hashes, start, len(blocks))

    @rule(number=st.integers(0, 20), length=st.integers(1, 4), backwards=st.booleans())
    def hit(self, number: int, length: int, backwards: bool) -> None:
        """A new holder takes cached blocks, in either order."""
        found = []
        for i in range(length):
            block = self.pool.get_cached_block(f"{number}/{i}".encode())
            if block is None:
                break
            found.append(block)
        if found:
            self.pool.touch(reversed(found) if backwards else found)
            self.holders.append(found)

    @rule(number=st.integers(0, 20), length=st.integers(1, 4))
    def give_up(self, number: int, length: int) -> None:
        """Blocks marked to be evicted first can still be found."""
        self.pool.evict_first(f"{number}/{i}".encode() for i in range(length))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.free_blocks(reversed(blocks))

    @rule()
    def evict_all(self) -> None:
        """Evicts all; held blocks lose their hash."""
        self.pool.evict_all()
        assert not self.pool.num_cached_blocks

    @invariant()
    def counts_are_right(self) -> None:
        held = Counter(block.block_id for blocks in self.holders for block in blocks)
        self.pool.check_invariants(dict(held))
        assert self.pool.num_free_blocks == NUM_BLOCKS - 1 - len(held)


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_unhashed_blocks_are_reused_before_cached_ones() -> None:
    """A scratch block freed last is reused first; cached ones are evicted least recently used first."""
    pool = BlockPool(5)
    old, young = pool.get_new_blocks(1), pool.get_new_blocks(1)
    scratch = pool.get_new_blocks(2)
    pool.cache_full_blocks(old, [b"old"], 0, 1)
    pool.cache_full_blocks(young, [b"young"], 0, 1)
    for blocks in (old, young, scratch):
        pool.free_blocks(blocks)
    assert set(pool.get_new_blocks(2)) == set(scratch)
    assert pool.get_new_blocks(1) == old
    assert pool.get_cached_block(b"old") is None
    assert pool.get_cached_block(b"young") is young[0]


def test_the_tail_of_a_request_is_reused_first() -> None:
    """Blocks are freed in reverse, so the head of a prefix is evicted last."""
    pool = BlockPool(4)
    blocks = pool.get_new_blocks(3)
    pool.cache_full_blocks(blocks, [b"0", b"1", b"2"], 0, 3)
    pool.free_blocks(reversed(blocks))
    assert pool.get_new_blocks(1) == [blocks[2]]
    assert pool.get_cached_block(b"1") is blocks[1]


def test_an_equal_block_takes_over_when_the_first_is_reused() -> None:
    """Of two blocks with one hash, evicting one leaves the other cached."""
    pool = BlockPool(3)
    first, second = pool.get_new_blocks(1), pool.get_new_blocks(1)
    pool.cache_full_blocks(first, [b"same"], 0, 1)
    pool.cache_full_blocks(second, [b"same"], 0, 1)
    assert pool.get_cached_block(b"same") is first[0]
    assert pool.num_cached_blocks == 2
    pool.free_blocks(first)
    assert pool.get_new_blocks(1) == first
    assert pool.get_cached_block(b"same") is second[0]
    assert pool.num_cached_blocks == 1
