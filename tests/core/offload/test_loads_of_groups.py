"""A host tier for a model with full and sliding-window layers: which blocks of each group it keeps, up to
where a prefix can be loaded, and what a load copies. Every step runs on a fake memory that fails if a request
would read another one's KV."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.offload.disk_tier import DiskLevel
from engine.core.request import Request, RequestStatus
from engine.records.kv_cache_groups import KVCacheGroup, groups_of
from tests.core.engine_room import EngineRoom

FULL_AND_WINDOW = (KVCacheGroup((0,)), KVCacheGroup((1,), 8))
"""Blocks have 4 tokens: two blocks are in the window before a block's first token."""
FULL, WINDOW = 0, 1


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def room_of(**options: Any) -> EngineRoom:
    chosen: dict[str, Any] = {
        "num_blocks": 33,
        "num_host_blocks": 80,
        "kv_cache_groups": FULL_AND_WINDOW,
        "max_num_batched_tokens": 8,
    } | options
    return EngineRoom(**chosen)


def forget_on_device(room: EngineRoom) -> None:
    """Evicts everything cached on the device."""
    pool = room.scheduler.kv.pool
    pool.free_blocks(pool.get_new_blocks(pool.num_free_blocks))


def key(request: Request, index: int, group: int) -> BlockHash:
    return request.block_hashes[index] + group.to_bytes(2, "big")


def copied(room: EngineRoom, request: Request, group: int) -> list[int]:
    """Blocks of the request with a host copy in this group that is not marked to be evicted first."""
    assert room.connector is not None
    tier = room.connector.tier
    return [
        index
        for index in range(len(request.block_hashes))
        if key(request, index, group) in tier and key(request, index, group) not in tier._stale
    ]


def ran(room: EngineRoom, name: str, prompt: list[int], max_tokens: int = 1) -> Request:
    request = room.add(name, prompt, max_tokens=max_tokens)
    room.run()
    return request


def test_what_returns_need_is_kept() -> None:
    """Copies are kept of all full-attention blocks, and of the windows before the ends of prompt and answer.
    A resent prompt needs one block more."""
    room = room_of()
    request = ran(room, "a", tokens(0, 24), max_tokens=21)
    assert copied(room, request, FULL) == list(range(11))
    assert copied(room, request, WINDOW) == [3, 4, 5, 9, 10]
    room.check_invariants()


def test_a_load_brings_one_window() -> None:
    """Eleven blocks of full attention and two of the window are loaded; null blocks precede the window."""
    room = room_of()
    ran(room, "a", tokens(0, 24), max_tokens=21)
    forget_on_device(room)
    room.add("back", [*room.tokens["a"][:44], 7, 8], max_tokens=1)
    (load,) = room.step().kv_loads
    assert len(load.copies) == 11 + 2
    (new,) = room.step().scheduled_new_reqs
    assert new.num_computed_tokens == 44
    assert new.block_ids[WINDOW : 2 * 11 : 2] == [0] * 9 + new.block_ids[19:22:2]
    assert 0 not in new.block_ids[18:]
    room.run()
    assert room.finished["back"].num_cached_tokens == 44
    assert room.scheduler.make_stats().loaded_tokens == 44
    room.check_invariants()


def test_what_the_device_has_of_a_group_is_not_loaded() -> None:
    """Full attention is cached on the device, but a hit also needs the window: two blocks are loaded."""
    room = room_of()
    request = ran(room, "a", tokens(0, 24))
    pool = room.scheduler.kv.pool
    for index in range(6):
        block = pool.get_cached_block(key(request, index, WINDOW))
        if block is not None:
            pool.touch([block])
            pool.evict(block)
            pool.free_blocks([block])
    back = room.add("back", [*tokens(0, 24), 7, 8], max_tokens=1)
    assert room.scheduler.kv.get_computed_blocks(back) == ([], 0)
    (load,) = room.step().kv_loads
    assert len(load.copies) == 2
    room.run()
    assert room.finished["back"].num_cached_tokens == 24
    room.check_invariants()


def test_a_prefix_ends_where_each_group_has_what_it_needs() -> None:
    """If both tiers lack the window before the answer's end, the load ends with the prompt."""
    room = room_of()
    request = ran(room, "a", tokens(0, 24), max_tokens=21)
    forget_on_device(room)
    assert room.connector is not None
    room.connector.tier.discard([key(request, index, WINDOW) for index in range(6, 11)])
    room.add("back", [*room.tokens["a"][:44], 7, 8], max_tokens=1)
    (load,) = room.step().kv_loads
    assert len(load.copies) == 6 + 2
    room.run()
    assert room.finished["back"].num_cached_tokens == 24


def test_a_load_that_failed_is_computed_from_the_queue() -> None:
    """Without the window the request cannot continue: it frees its blocks and is recomputed."""
    fates = iter([(1, False)])
    room = room_of(load_fate=lambda: next(fates))
    ran(room, "a", tokens(0, 32))
    forget_on_device(room)
    room.add("back", tokens(0, 32), max_tokens=2)
    while not room.scheduler.num_pending_loads:
        room.step()
    while room.scheduler.num_pending_loads:
        room.step()
        room.check_invariants()
    assert room.scheduler.requests["back"].status is RequestStatus.PREEMPTED
    assert room.scheduler.kv.num_free_blocks == 32
    plan = room.step()
    assert [new.num_computed_tokens for new in plan.scheduled_new_reqs] == [0]
    room.run()
    assert room.finished["back"].num_cached_tokens == 0
    stats = room.scheduler.make_stats()
    assert (stats.failed_loads, stats.loaded_tokens, stats.num_preemptions) == (1, 0, 0)
    room.check_invariants()


def test_a_common_beginning_is_loaded_from_the_second_time_on_that_it_is_computed() -> None:
    """Only the host has the prefix, without a window at its end; the next one to compute it leaves one."""
    room = room_of(max_num_batched_tokens=32)
    common = tokens(0, 16)
    for number in range(3):
        ran(room, f"r{number}", [*common, *tokens(100 * (number + 1), 20)])
        forget_on_device(room)
    cached = [room.finished[f"r{number}"].num_cached_tokens for number in range(3)]
    assert cached == [0, 0, 16]


def test_what_a_window_has_left_makes_way_first_and_is_not_written_to_disk() -> None:
    """A full host evicts blocks that left a window before any that a return would need."""
    level = DiskLevel(num_blocks=100, max_writes=100)
    room = room_of(num_host_blocks=20, disk_level=level)
    request = ran(room, "a", tokens(0, 48))
    assert room.connector is not None
    assert room.connector.disk is not None
    assert copied(room, request, FULL) == list(range(12))
    assert copied(room, request, WINDOW) == [9, 10, 11]
    ran(room, "b", tokens(100, 40))
    on_disk = room.connector.disk.tier.contents()
    assert sum(content.endswith(b"\1") for content in on_disk) <= 3
    forget_on_device(room)
    ran(room, "back", [*tokens(0, 48), 1])
    assert room.finished["back"].num_cached_tokens == 48
    room.check_invariants()


@pytest.mark.parametrize(("read_share", "cached"), [(0.1, 48), (0.9, 24)])
def test_windows_on_disk_are_read_where_that_is_faster(read_share: float, cached: int) -> None:
    """Two blocks on disk only extend the hit from 24 to 48 tokens: reading is weighed against that."""
    level = DiskLevel(num_blocks=100, max_writes=100, fixed_tokens=20.0, read_share=read_share)
    room = room_of(disk_level=level)
    request = ran(room, "a", tokens(0, 24), max_tokens=25)
    connector = room.connector
    assert connector is not None
    assert connector.disk is not None
    gone = [key(request, index, WINDOW) for index in range(6, 12)]
    held = connector.tier.contents()
    moved = [content for content in gone if content in held]
    connector.tier.discard(moved)
    for content in moved:
        connector.disk.write(content, held[content])
    writes = connector.disk.take_writes()
    for content, slot in zip(moved, writes.disk_slots, strict=True):
        room.memory.disk[slot] = content
    connector.disk.end_writes(writes.disk_slots, [])
    forget_on_device(room)
    ran(room, "back", [*room.tokens["a"][:48], 7])
    assert room.finished["back"].num_cached_tokens == cached
    # Of 14 blocks loaded for 48 tokens two are read.
    assert room.scheduler.make_stats().disk_loaded_tokens == (48 * 2 // 14 if cached == 48 else 0)


@pytest.mark.parametrize(
    ("windows", "most"),
    [
        pytest.param([128, None] * 12, 0.51, id="gpt-oss-20b"),
        pytest.param(([1024] * 5 + [None]) * 10, 0.18, id="gemma-3"),
    ],
)
def test_at_100k_tokens_a_tier_keeps_little(windows: list[int | None], most: float) -> None:
    """The tier keeps a small share of the copies that full attention in all layers would need; blocks that
    leave a window between two steps' ends are never copied."""
    groups = groups_of(windows)
    num_tokens, size = 100_000, 16
    all_full = len(groups) * num_tokens // size
    room = EngineRoom(
        block_size=size,
        num_blocks=all_full,
        max_model_len=num_tokens + 100,
        kv_cache_groups=groups,
        max_num_batched_tokens=2048,
        num_host_blocks=2 * all_full,
    )
    ran(room, "a", [i % 50_000 for i in range(num_tokens)], max_tokens=20)
    assert room.connector is not None
    tier = room.connector.tier
    assert len(tier) - len(tier._stale) <= most * all_full
    forget_on_device(room)
    room.add("back", [*room.tokens["a"], 1, 2], max_tokens=1)
    (load,) = room.step().kv_loads
    assert len(load.copies) <= most * all_full
    room.run()
    assert room.finished["back"].num_cached_tokens == (num_tokens + 19) // size * size
