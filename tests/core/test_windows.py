"""A model with full and sliding-window layers: what its requests and pins hold, and what later turns find."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import pytest

from engine.core.policy import FcfsPolicy, Pin, PinEnd, PolicyContext, StalePrefix
from engine.core.request import Request
from engine.records.kv_cache_groups import KVCacheGroup, groups_of
from tests.core.engine_room import EngineRoom

FULL_AND_WINDOW = (KVCacheGroup((0,)), KVCacheGroup((1,), 8))
"""Blocks have 4 tokens: two blocks are in the window before a block's first token."""


class PinningPolicy(FcfsPolicy):
    """Pins all turns until ``stale`` says otherwise."""

    def __init__(self) -> None:
        self._ids = count()
        self.held: dict[int, Pin] = {}
        self.stale: list[StalePrefix] = []
        self.lost: list[tuple[int, PinEnd]] = []
        """Blocks that each partial break took, with its cause."""

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        hashes = request.block_hashes[: request.num_computed_tokens // 4]
        pin = Pin(next(self._ids), "job", request.request_id, hashes, now + 1000)
        self.held[pin.pin_id] = pin
        return pin

    def revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        yield from list(self.held.values())

    def on_pin_ended(self, pin: Pin, cause: PinEnd, now: float, by: str | None = None) -> None:
        del self.held[pin.pin_id]

    def on_pin_shrunk(
        self, pin: Pin, num_blocks_lost: int, cause: PinEnd, now: float, by: str | None = None
    ) -> None:
        self.lost.append((num_blocks_lost, cause))

    def take_superseded(self) -> Iterator[StalePrefix]:
        while self.stale:
            yield self.stale.pop()

    def pins(self) -> list[Pin]:
        return list(self.held.values())


def room_of(policy: FcfsPolicy | None = None, **options: object) -> EngineRoom:
    options = {"num_blocks": 33, "kv_cache_groups": FULL_AND_WINDOW, "max_num_batched_tokens": 8} | options
    return EngineRoom(policy, **options)  # type: ignore[arg-type]


def held_blocks(room: EngineRoom) -> int:
    return room.scheduler.kv.pool.num_usable_blocks - room.scheduler.kv.num_free_blocks


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_windows_blocks_come_back_while_a_request_runs(async_scheduling: bool) -> None:
    """At 40 tokens full attention holds 10 blocks, and the window the visible blocks and those a step
    writes."""
    room = room_of(async_scheduling=async_scheduling)
    room.add("a", list(range(40)), max_tokens=12)
    most = 0
    while room.scheduler.has_unfinished_requests():
        room.step()
        room.check_invariants()
        if "a" in room.scheduler.requests:
            num_full = room.scheduler.kv.num_slots_of("a") // 4
            most = max(most, room.scheduler.kv.num_blocks_of("a") - num_full)
    assert most == (4 if async_scheduling else 3)
    room.run()
    assert held_blocks(room) == 0


def test_no_window_is_freed_while_a_step_reads_it() -> None:
    """While a step under way reads a window, planning the next step, which needs less, frees none of it."""
    room = room_of(async_scheduling=True)
    room.add("a", list(range(32)), max_tokens=4)
    room.plan_next()
    room.plan_next()
    room.take_output()
    kv = room.scheduler.kv
    assert kv.block_ids("a").count(0) == 0, "the step under way begins at token 8"
    room.plan_next()
    room.take_output()
    assert kv.block_ids("a").count(0) == 2, "the step under way begins at token 16, the next at 24"
    assert kv.block_ids("a")[1:5:2] == [0, 0]
    room.run()


def test_a_hit_needs_only_the_last_window() -> None:
    """The plan has null blocks where the windowed group needs nothing, and every token stays correct."""
    room = room_of()
    prompt = list(range(24))
    room.add("a", prompt, max_tokens=1)
    room.run()
    room.add("b", [*prompt, 1, 2, 3], max_tokens=1)
    plan = room.step()
    (new,) = plan.scheduled_new_reqs
    assert new.num_computed_tokens == 24
    assert new.block_ids[1:12:2][:4] == [0, 0, 0, 0]
    assert 0 not in new.block_ids[0::2]
    assert 0 not in new.block_ids[9::2]
    room.run()
    room.check_invariants()


def test_a_window_that_is_gone_shortens_the_hit() -> None:
    """All full-attention blocks are cached, but a hit must end where its window is cached too."""
    room = room_of()
    room.add("a", list(range(24)), max_tokens=1)
    room.run()
    pool, kv = room.scheduler.kv.pool, room.scheduler.kv
    request = room.add("b", [*range(24), 1, 2], max_tokens=1)
    hit, num_tokens = kv.get_computed_blocks(request)
    assert num_tokens == 24
    pool.evict(hit[9])
    hit, num_tokens = kv.get_computed_blocks(request)
    assert num_tokens == 16
    assert [block.block_id for block in hit[1::2]][:2] == [0, 0]
    room.run()
    assert len(room.received["b"]) == 1


def test_admission_knows_that_a_long_prompt_needs_one_window() -> None:
    """60 tokens take 15 blocks of full attention, and never more than 5 of the window."""
    room = room_of(num_blocks=1 + 15 + 5)
    room.add("a", list(range(60)), max_tokens=2)
    room.run()
    assert len(room.received["a"]) == 2
    assert room.scheduler.make_stats().num_preemptions == 0


def test_a_pin_holds_one_window() -> None:
    """A pin holds all of full attention, and two blocks before its end in the windowed group; the next turn
    takes both."""
    policy = PinningPolicy()
    room = room_of(policy)
    room.add("a", list(range(30)), max_tokens=4)
    room.run()
    (pin,) = policy.pins()
    assert (pin.num_prefix_blocks, pin.num_blocks) == (8, 10)
    context = PolicyContext(4, 32, kv_cache_groups=FULL_AND_WINDOW)
    assert [context.blocks_of_pin(num_blocks) for num_blocks in (0, 1, 2, 3, 8)] == [0, 2, 4, 5, 10]
    assert held_blocks(room) == room.scheduler.kv.num_pinned_blocks == 10
    pool = room.scheduler.kv.pool
    pool.free_blocks(pool.get_new_blocks(pool.num_free_blocks))  # Everything else is evicted.
    back = room.add("back", [*room.tokens["a"][:33], 7, 8], max_tokens=1)
    room.step()
    assert back.num_cached_tokens == 32
    room.run()
    room.check_invariants()


def test_a_pin_is_cut_to_where_a_window_is_still_cached() -> None:
    """A pin cut within a prompt keeps what a later turn can hit: here up to the end of the prompt."""
    policy = PinningPolicy()
    room = room_of(policy, num_blocks=25, max_num_batched_tokens=4)
    room.add("a", list(range(24)), max_tokens=21)
    room.run()
    (pin,) = policy.pins()
    assert (pin.num_prefix_blocks, pin.num_blocks) == (11, 13)
    kv = room.scheduler.kv
    assert kv.pinned.longest_cut(pin.block_hashes, 10) == 10, "nothing was evicted so far"
    taken = kv.pool.get_new_blocks(8)  # Evicts the window's old blocks, but not those at the prompt's end.
    assert kv.pinned.longest_cut(pin.block_hashes, 10) == 6
    kv.pool.free_blocks(taken)
    num_kept, num_freed = kv.pinned.cut_to_free(pin.pin_id, pin.held_hashes, 2)
    assert (num_kept, num_freed) == (6, 5)
    policy.stale.append(StalePrefix(pin.block_hashes[9:], 9, pin, "b"))
    room.scheduler.expire(room.clock.now())
    assert (pin.num_prefix_blocks, pin.num_blocks) == (6, 8)
    assert policy.lost == [(5, PinEnd.SUPERSEDED)]
    assert kv.num_pinned_blocks == 8
    room.check_invariants()
    back = room.add("back", [*range(24), 7, 8], max_tokens=1)
    room.step()
    assert back.num_cached_tokens == 24


def test_a_pin_that_no_return_could_hit_ends() -> None:
    """If no cached window fits a shorter pin, the pin is useless and ends."""
    policy = PinningPolicy()
    room = room_of(policy, num_blocks=25, max_num_batched_tokens=4)
    room.add("a", list(range(24)), max_tokens=21)
    room.run()
    (pin,) = policy.pins()
    kv = room.scheduler.kv
    taken = kv.pool.get_new_blocks(kv.num_free_blocks)
    assert kv.pinned.longest_cut(pin.block_hashes, 10) == 0
    assert kv.pinned.cut_to_free(pin.pin_id, pin.held_hashes, 1) == (0, 13)
    kv.pool.free_blocks(taken)
    policy.stale.append(StalePrefix(pin.block_hashes[9:], 9, pin, "b"))
    room.scheduler.expire(room.clock.now())
    assert not policy.pins()
    assert held_blocks(room) == 0


@pytest.mark.parametrize(
    ("windows", "most"),
    [
        pytest.param([128, None] * 12, 0.55, id="gpt-oss-20b"),
        pytest.param(([1024] * 5 + [None]) * 10, 0.25, id="gemma-3"),
    ],
)
def test_at_100k_tokens_windows_take_little(windows: list[int | None], most: float) -> None:
    """They take a small share of the blocks that full attention in all layers would need."""
    groups = groups_of(windows)
    num_tokens, size = 100_000, 16
    all_full = len(groups) * num_tokens // size
    policy = PinningPolicy()
    policy.on_turn_end = lambda request, now: _pin_all(policy, request, size)  # type: ignore[method-assign]
    room = EngineRoom(
        policy,
        block_size=size,
        num_blocks=all_full,
        max_model_len=num_tokens + 100,
        kv_cache_groups=groups,
        max_num_batched_tokens=2048,
    )
    room.add("a", [i % 50_000 for i in range(num_tokens)], max_tokens=20)
    held = 0
    while room.scheduler.has_unfinished_requests():
        room.plan_next()
        held = max(held, held_blocks(room))
        room.take_output()
    assert held <= most * all_full
    assert room.scheduler.kv.num_pinned_blocks <= most * all_full
    assert held_blocks(room) == room.scheduler.kv.num_pinned_blocks


def _pin_all(policy: PinningPolicy, request: Request, size: int) -> Pin:
    hashes = request.block_hashes[: request.num_computed_tokens // size]
    pin = policy.held[0] = Pin(0, "job", request.request_id, hashes, 1000.0)
    return pin
