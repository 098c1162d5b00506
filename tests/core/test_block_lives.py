"""Promises about the sampled lives of KV blocks: reported values match a complete record."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.kv_cache.block_lives import MAX_GAPS, BlockLifeWatch
from engine.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from engine.errors import ConfigError
from engine.frontend.llm import engine_config


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def watched(num_blocks: int, share: float) -> tuple[BlockPool, BlockLifeWatch, Clock]:
    pool, clock = BlockPool(num_blocks), Clock()
    pool.lives = BlockLifeWatch(share, clock)
    return pool, pool.lives, clock


def cached(pool: BlockPool, count: int, names: list[bytes]) -> list[KVCacheBlock]:
    blocks = pool.get_new_blocks(count)
    pool.cache_full_blocks(blocks, names, 0, count)
    return blocks


def test_a_life_is_told_when_it_ends() -> None:
    """A life is reported when it ends: from allocation to eviction, with the uses in between."""
    pool, lives, clock = watched(3, 1.0)
    blocks = cached(pool, 2, [b"a", b"b"])
    pool.free_blocks(blocks)
    for clock.now in (2.0, 5.0):
        pool.touch([blocks[0]])
        pool.free_blocks([blocks[0]])
    assert lives.take() is None
    clock.now = 6.0
    pool.get_new_blocks(2)
    told = lives.take()
    assert told is not None
    assert sorted(told.lifetimes_s) == [6.0, 6.0]
    assert sorted(told.idle_s) == [1.0, 6.0]
    assert told.reuse_gaps_s == [3.0]
    assert lives.take() is None


def test_blocks_that_were_never_cached_have_no_life() -> None:
    pool, lives, clock = watched(3, 1.0)
    pool.free_blocks(pool.get_new_blocks(2))
    clock.now = 1.0
    pool.get_new_blocks(2)
    pool.evict_all()
    assert lives.take() is None


@given(
    share=st.sampled_from([1.0, 0.5, 0.34, 0.1]),
    steps=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=30),
)
def test_as_many_blocks_are_followed_as_asked(share: float, steps: list[tuple[int, bool]]) -> None:
    """Every second, third or tenth block is sampled, and each sample matches the complete record."""
    pool, lives, clock = watched(7, share)
    everything, all_lives, same_clock = watched(7, 1.0)
    every, allocated = round(1 / share), 0
    for number, (count, touches) in enumerate(steps):
        clock.now = same_clock.now = float(number)
        names = [f"{number}-{index}".encode() for index in range(count)]
        for each in (pool, everything):
            blocks = cached(each, count, names)
            if touches:
                each.touch([blocks[0]])
                each.free_blocks([blocks[0]])
            each.free_blocks(blocks)
        allocated += count
    told, whole = lives.take(), all_lives.take()
    followed = len(lives._lives) + (0 if told is None else len(told.lifetimes_s))
    assert followed == -(-allocated // every)
    if told is not None:
        assert whole is not None
        for mine, theirs in ((told.lifetimes_s, whole.lifetimes_s), (told.idle_s, whole.idle_s)):
            assert all(mine.count(value) <= theirs.count(value) for value in mine)


def test_only_the_last_gaps_are_told() -> None:
    pool, lives, clock = watched(2, 1.0)
    blocks = cached(pool, 1, [b"a"])
    pool.free_blocks(blocks)
    for number in range(8):
        clock.now += number
        pool.touch(blocks)
        pool.free_blocks(blocks)
    pool.get_new_blocks(1)
    told = lives.take()
    assert told is not None
    assert told.reuse_gaps_s == [4.0, 5.0, 6.0, 7.0]
    assert len(told.reuse_gaps_s) == MAX_GAPS


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_a_share_is_a_share(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_metrics_sample must be in \(0, 1\]"):
        engine_config("model", kv_cache_metrics_sample=share)
