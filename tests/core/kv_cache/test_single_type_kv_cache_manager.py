"""What a group with a window or chunks needs of a sequence: V1's test cases for its managers, and more."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.kv_cache.block_pool import BlockPool, KVCacheBlock
from engine.core.kv_cache.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    get_kv_cache_coordinator,
)
from engine.core.kv_cache.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from engine.core.kv_cache.unitary_kv_cache_coordinator import UnitaryKVCacheCoordinator
from engine.records.kv_cache_groups import KVCacheGroup

SIZE = 2
WINDOW = 4
"""Spans two blocks before a block's first token."""
HASHES = [str(i).encode() for i in range(12)]


def window_manager(
    pool: BlockPool, window: int = WINDOW, group_id: int = 0, max_step_tokens: int = 1000
) -> SlidingWindowManager:
    return SlidingWindowManager(pool, SIZE, group_id, KVCacheGroup((0,), window), max_step_tokens)


def cache(pool: BlockPool, manager: SingleTypeKVCacheManager, is_cached: list[bool]) -> None:
    """Caches a block for each True, as if a request had computed it and ended."""
    for block_hash, cached in zip(HASHES, is_cached, strict=False):
        if cached:
            (block,) = pool.get_new_blocks(1)
            pool.cache_full_blocks([block], [manager.key_of(block_hash)], 0, 1)
            pool.free_blocks([block])


def cached_as(text: str) -> list[bool]:
    return [letter == "x" for letter in text]


@pytest.mark.parametrize(
    ("text", "num_hit"),
    [
        ("..........", 0),
        ("x", 1),
        ("x.", 1),
        ("xx", 2),
        ("xx.", 2),
        ("xxx", 3),
        ("xxx.", 3),
        ("xx.x..xx.xxx", 12),
        ("xx.x..xx.x..", 8),
        ("xx.x..xx...", 8),
        ("xx.x..x.x.x", 2),
        (".x.x.x", 0),
    ],
)
def test_a_window_is_hit_from_the_right(text: str, num_hit: int) -> None:
    """The longest prefix whose last window is cached is hit; null blocks precede the window."""
    pool = BlockPool(100)
    manager = window_manager(pool)
    cache(pool, manager, cached_as(text))
    hit = manager.find_longest_cache_hit(HASHES[: len(text)], len(text) * SIZE)
    assert len(hit) == num_hit
    assert all(block is pool.null_block for block in hit[:-2])
    assert [block.block_hash for block in hit[-2:]] == [
        manager.key_of(HASHES[i]) for i in range(max(0, num_hit - 2), num_hit)
    ]


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 9))
def test_a_window_hit_is_the_longest(is_cached: list[bool], window: int) -> None:
    pool = BlockPool(100)
    manager = window_manager(pool, window)
    cache(pool, manager, is_cached)
    ends = [
        end
        for end in range(len(is_cached) + 1)
        if all(is_cached[max(0, end * SIZE - window + 1) // SIZE : end])
    ]
    hashes = HASHES[: len(is_cached)]
    assert len(manager.find_longest_cache_hit(hashes, len(hashes) * SIZE)) == max(ends)


def chunk_manager(pool: BlockPool, chunk: int) -> ChunkedLocalAttentionManager:
    group = KVCacheGroup((0,), attention_chunk=chunk)
    return ChunkedLocalAttentionManager(pool, SIZE, 0, group, 1000)


@pytest.mark.parametrize(
    ("text", "num_hit"),
    [
        ("x", 1),
        (".", 0),
        ("x.", 2),
        ("xx", 2),
        ("xx.", 2),
        ("xxx", 3),
        ("xxx.", 4),
        (".x.x..x.x", 9),
        (".x.x..x..", 8),
        (".x.x..x.xx", 10),
        (".x.x..x.x.", 10),
        (".x.x..x..x", 10),
        (".x.x..x...", 10),
    ],
)
def test_a_chunk_is_hit_from_the_left(text: str, num_hit: int) -> None:
    """With chunks of two blocks, a hit at a chunk's start needs nothing from earlier chunks."""
    pool = BlockPool(100)
    manager = chunk_manager(pool, 4)
    cache(pool, manager, cached_as(text))
    hit = manager.find_longest_cache_hit([*HASHES, b"more"][: len(text)], len(text) * SIZE)
    assert len(hit) == num_hit
    start = num_hit // 2 * 2
    assert all(block is pool.null_block for block in hit[:start])
    assert [block.block_hash for block in hit[start:]] == [
        manager.key_of(HASHES[i]) for i in range(start, num_hit)
    ]


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 9))
def test_a_chunks_hit_is_the_longest(is_cached: list[bool], chunk: int) -> None:
    """The longest hit is found, also if a chunk ends within a block."""
    pool = BlockPool(100)
    manager = chunk_manager(pool, chunk)
    cache(pool, manager, is_cached)
    ends = [
        end
        for end in range(len(is_cached) + 1)
        if all(is_cached[place // SIZE] for place in range(end * SIZE // chunk * chunk, end * SIZE))
    ]
    hashes = HASHES[: len(is_cached)]
    assert len(manager.find_longest_cache_hit(hashes, len(hashes) * SIZE)) == max(ends)


def test_a_chunks_blocks_come_back_when_the_next_begins() -> None:
    pool = BlockPool(100)
    manager = chunk_manager(pool, 6)
    assert [manager.get_num_skipped_tokens(n) for n in (0, 5, 6, 11, 12)] == [0, 0, 6, 6, 12]
    manager.add_hit("a", [])
    blocks = list(manager.allocate_new_blocks("a", 14))
    for num_computed, num_freed in {0: 0, 4: 0, 5: 0, 6: 3, 11: 3, 12: 6, 14: 6}.items():
        manager.remove_skipped_blocks("a", num_computed)
        assert manager.req_to_blocks["a"] == [pool.null_block] * num_freed + blocks[num_freed:]
        assert pool.num_free_blocks == 99 - len(blocks) + num_freed


def test_blocks_come_back_as_the_window_moves() -> None:
    """A block is freed once no token that may follow sees any of its tokens."""
    pool = BlockPool(100)
    manager = window_manager(pool)
    manager.add_hit("a", [])
    blocks = list(manager.allocate_new_blocks("a", 11))
    table = manager.req_to_blocks["a"]
    expected = {0: 0, 4: 0, 5: 1, 6: 1, 7: 2, 8: 2, 11: 4}
    for num_computed, num_freed in expected.items():
        num_free = 99 - len(blocks) + num_freed
        manager.remove_skipped_blocks("a", num_computed)
        assert table[:num_freed] == [pool.null_block] * num_freed
        assert table[num_freed:] == blocks[num_freed:]
        assert pool.num_free_blocks == num_free


def test_a_windows_blocks_are_evicted_before_those_of_full_attention() -> None:
    """A window's old blocks are evicted first, except where a branch is expected."""
    pool = BlockPool(13)
    manager = window_manager(pool)
    manager.add_hit("a", [])
    manager.expect_branches("a", (3,))
    manager.allocate_new_blocks("a", 24)
    manager.cache_blocks("a", HASHES, 24)
    manager.remove_skipped_blocks("a", 24)
    assert pool.num_free_blocks == 10
    pool.get_new_blocks(7)
    is_left = [pool.get_cached_block(manager.key_of(block_hash)) is not None for block_hash in HASHES]
    assert is_left == cached_as("xxx.......xx")


def test_a_long_prompt_needs_no_more_than_window_and_step() -> None:
    pool = BlockPool(1000)
    manager = window_manager(pool, max_step_tokens=10)
    assert manager.max_blocks_per_request == 2 + 5 + 1
    assert manager.num_blocks_to_allocate("a", 8, []) == 4
    assert manager.num_blocks_to_allocate("a", 1000, []) == 8
    cache(pool, manager, cached_as("xxxxxx"))
    hit = manager.find_longest_cache_hit(HASHES[:6], 12)
    assert manager.num_blocks_to_allocate("a", 1000, hit) == 8, "the hit leaves the free list, too"
    pool.touch(hit[-2:])
    assert manager.num_blocks_to_allocate("a", 1000, hit) == 6
    assert manager.num_blocks_to_allocate("a", 14, hit) == 1


def hybrid(pool: BlockPool, *windows: int | None) -> HybridKVCacheCoordinator:
    groups = [KVCacheGroup((i,), window) for i, window in enumerate(windows)]
    return HybridKVCacheCoordinator(pool, SIZE, groups, 1000)


def by_group(hit: list[KVCacheBlock], num_groups: int) -> list[list[int]]:
    return [[block.block_id for block in hit[group::num_groups]] for group in range(num_groups)]


@pytest.mark.parametrize(
    ("full", "near", "far", "num_hit"),
    [
        ("xxxxxxxx", "xxxxxxxx", "xxxxxxxx", 8),
        ("xxxxx...", "xxxxxxxx", "xxxxxxxx", 5),
        ("........", "xxxxxxxx", "xxxxxxxx", 0),
        ("xxxxxxxx", "......xx", "....xxxx", 8),
        ("xxxxxxxx", "..xx..xx", "xxxx..xx", 4),
        ("xxxxxxxx", "..xx..xx", "..xx.xxx", 0),
        ("xxxxxx..", "...xx...", "xxxxxxxx", 5),
        ("xxxxxxxx", "......xx", "xxxxxxx.", 0),
    ],
)
def test_a_hit_is_what_all_groups_have(full: str, near: str, far: str, num_hit: int) -> None:
    """The search repeats until all groups agree: here a full group, and windows of 2 and 4 blocks."""
    pool = BlockPool(100)
    coordinator = hybrid(pool, None, 4, 8)
    for manager, text in zip(coordinator.single_type_managers, (full, near, far), strict=True):
        cache(pool, manager, cached_as(text))
    hit = coordinator.find_longest_cache_hit(HASHES[:8], 16)
    tables = by_group(hit, 3)
    assert [len(table) for table in tables] == [num_hit] * 3
    num_skipped = [0, max(0, num_hit - 2), max(0, num_hit - 4)]
    assert [table.count(0) for table in tables] == num_skipped
    assert sum(num_skipped) == coordinator.num_skipped_blocks(num_hit)


@pytest.mark.parametrize(
    ("full", "window", "chunk", "num_hit"),
    [
        ("xxxxxxxx", "......xx", "........", 8),
        ("xxxxxxxx", ".....xx.", "....xxx.", 7),
        ("xxxxxxxx", ".....xx.", "....x.x.", 0),
        ("xxxxxx..", "xxxxxxxx", "....x...", 5),
        ("xxxxxx..", "..xxxxxx", "........", 4),
        ("xxx.....", ".xx.....", "xx......", 0),
    ],
)
def test_windows_and_chunks_agree_on_a_hit(full: str, window: str, chunk: str, num_hit: int) -> None:
    """A full group, a window of two blocks and chunks of four agree on a hit."""
    pool = BlockPool(100)
    groups = [KVCacheGroup((0,)), KVCacheGroup((1,), 4), KVCacheGroup((2,), attention_chunk=8)]
    coordinator = HybridKVCacheCoordinator(pool, SIZE, groups, 1000)
    for manager, text in zip(coordinator.single_type_managers, (full, window, chunk), strict=True):
        cache(pool, manager, cached_as(text))
    tables = by_group(coordinator.find_longest_cache_hit(HASHES[:8], 16), 3)
    assert [len(table) for table in tables] == [num_hit] * 3
    assert tables[2].count(0) == num_hit // 4 * 4


def test_tables_of_all_groups_are_one_list() -> None:
    """Tables are ordered by block, then by group; one name serves a block in each group."""
    pool = BlockPool(100)
    coordinator = hybrid(pool, None, 4)
    coordinator.add_hit("a", [])
    new = coordinator.allocate_new_blocks("a", 5)
    assert [block.block_id for block in new] == [1, 4, 2, 5, 3, 6]
    coordinator.cache_blocks("a", HASHES, 4)
    full, windowed = coordinator.single_type_managers
    assert pool.get_cached_block(full.key_of(HASHES[1])) is new[2]
    assert pool.get_cached_block(windowed.key_of(HASHES[1])) is new[3]
    assert coordinator.blocks_of("a") == new
    assert [block.block_id for block in coordinator.allocate_new_blocks("a", 7)] == [7, 8]
    coordinator.remove_skipped_blocks("a", 6)
    assert [block.block_id for block in coordinator.blocks_of("a")] == [1, 0, 2, 5, 3, 6, 7, 8]
    assert [block.block_id for block in coordinator.held_by("a")] == [1, 2, 5, 3, 6, 7, 8]


def test_the_coordinator_goes_by_the_groups() -> None:
    full, windowed = KVCacheGroup((0,)), KVCacheGroup((1,), 8)
    kinds = {
        (True, (full,)): UnitaryKVCacheCoordinator,
        (True, (windowed,)): HybridKVCacheCoordinator,
        (True, (full, windowed)): HybridKVCacheCoordinator,
        (False, (full,)): KVCacheCoordinatorNoPrefixCache,
        (False, (full, windowed)): KVCacheCoordinatorNoPrefixCache,
    }
    for (enable_caching, groups), kind in kinds.items():
        made = get_kv_cache_coordinator(
            BlockPool(9), SIZE, groups, enable_caching=enable_caching, max_step_tokens=8
        )
        assert type(made) is kind
