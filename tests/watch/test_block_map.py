"""Promises of the pool's picture: its counts are the pool's, and a block belongs to its holder."""

from __future__ import annotations

import time
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.watch.block_map import MAX_CELLS, BlockPainter, Retention
from engine.watch.view import SHARED, BlockMap


@dataclass(frozen=True, slots=True)
class Held:
    """A holder of blocks in a test."""

    job: int | None
    is_pin: bool
    num_blocks: int


helds = st.lists(
    st.builds(Held, st.none() | st.integers(0, 300), st.booleans(), st.integers(1, 40)), max_size=12
)


def paint(num_blocks: int, helds: list[Held], num_cached: int = 0) -> BlockMap:
    """Paints a pool in which these hold blocks, in order, and ``num_cached`` free blocks are cached."""
    kv = KVCacheManager(num_blocks + 1, 16, 1 << 20)
    holdings = []
    for held in helds:
        count = min(held.num_blocks, kv.pool.num_free_blocks)
        job_id = None if held.job is None else f"job {held.job}"
        holdings.append(Retention(job_id, held.is_pin, kv.pool.get_new_blocks(count)))
    cached = kv.pool.get_new_blocks(min(num_cached, kv.pool.num_free_blocks))
    kv.pool.cache_full_blocks(
        cached, [number.to_bytes(32, "big") for number in range(len(cached))], 0, len(cached)
    )
    kv.pool.free_blocks(cached)
    return BlockPainter(kv).paint(holdings)


@given(st.integers(1, 500), helds, st.integers(0, 200))
def test_the_map_counts_what_is_there(num_blocks: int, helds: list[Held], num_cached: int) -> None:
    """A cell is one block here: the counts of held, cached and free blocks are right."""
    picture = paint(num_blocks, helds, num_cached)
    left = num_blocks
    counts = {False: 0, True: 0}
    for held in helds:
        count = min(held.num_blocks, left)
        counts[held.is_pin] += count
        left -= count
    assert (picture.num_blocks, picture.blocks_per_cell) == (num_blocks, 1)
    assert picture.running.count(255) == counts[False]
    assert picture.pinned.count(255) == counts[True]
    assert picture.cached.count(255) == min(num_cached, left)
    assert (picture.num_running, picture.num_pinned, picture.num_held) == (
        counts[False],
        counts[True],
        counts[True],
    )
    assert picture.num_cached == min(num_cached, left)
    assert all(
        sum(cell) in (0, 255) for cell in zip(picture.running, picture.pinned, picture.cached, strict=True)
    )


def test_a_block_that_several_hold_counts_once() -> None:
    """With two pins and a request on the same blocks all are held, and the request's count as running."""
    kv = KVCacheManager(101, 16, 1 << 20)
    blocks = kv.pool.get_new_blocks(30)
    holders = [Retention("a", True, blocks[:20]), Retention("b", True, blocks[10:30])]
    picture = BlockPainter(kv).paint([*holders, Retention("a", False, blocks[5:15])])
    assert picture.num_held == 30
    assert (picture.num_running, picture.num_pinned) == (10, 20)


@given(st.integers(MAX_CELLS + 1, 5 * MAX_CELLS), st.integers(1, 3000))
def test_a_large_pool_is_told_in_few_cells(num_blocks: int, num_held: int) -> None:
    """The cells never exceed the maximum, and their shares add up to the blocks."""
    picture = paint(num_blocks, [Held(1, False, num_held)])
    per_cell = picture.blocks_per_cell
    assert len(picture.running) == -(-num_blocks // per_cell) <= MAX_CELLS
    held = min(num_held, num_blocks)
    told = sum(picture.running) / 255 * per_cell
    assert abs(told - held) < per_cell


def test_a_block_is_its_jobs() -> None:
    """A block's owner is its job's index; several jobs' blocks are shared; without a job it has none."""
    kv = KVCacheManager(7, 16, 1 << 20)
    blocks = kv.pool.get_new_blocks(5)
    picture = BlockPainter(kv).paint(
        [
            Retention("a", True, blocks[:3]),
            Retention("b", False, blocks[2:4]),
            Retention("a", False, blocks[:1]),
            Retention(None, False, blocks[4:]),
        ]
    )
    first, second = 2 + picture.jobs.index("a"), 2 + picture.jobs.index("b")
    assert list(picture.owners) == [first, first, SHARED, second, 0, 0]
    assert list(picture.running) == [255, 0, 255, 255, 255, 0]  # running wins over a pin of the same block
    assert list(picture.pinned) == [0, 255, 0, 0, 0, 0]


def test_more_jobs_than_a_byte_can_number() -> None:
    """Further jobs' blocks are shown as shared, never as another job's."""
    picture = paint(300, [Held(number, False, 1) for number in range(300)])
    assert len(picture.jobs) == 254
    assert set(picture.owners[254:]) == {SHARED}


def test_a_large_pool_is_painted_quickly() -> None:
    """Painting 100,000 blocks, half of them held, takes a small part of the second between pictures."""
    kv = KVCacheManager(100_001, 16, 1 << 20)
    holdings = [Retention(f"job {n}", n % 2 == 0, kv.pool.get_new_blocks(500)) for n in range(100)]
    started_s = time.process_time()
    BlockPainter(kv).paint(holdings)
    assert time.process_time() - started_s < 0.25
