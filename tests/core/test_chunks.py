"""A model with full and chunked layers: what its requests and pins hold, and what later turns find."""

from __future__ import annotations

import pytest

from continuum.policy import ContinuumPolicyFactory
from engine.core.policy import Pin, PinEnd, PolicyContext, StalePrefix
from engine.core.request import Request
from engine.records.kv_cache_groups import KVCacheGroup, groups_of
from eval.trace.analysis.pinned_tokens import pinned_tokens
from eval.trace.recorded_groups import recorded_groups
from tests.core.engine_room import EngineRoom
from tests.core.test_windows import PinningPolicy, held_blocks, room_of

GROUPS = (KVCacheGroup((0,)), KVCacheGroup((1,), attention_chunk=16))
"""Blocks have 4 tokens, so a chunk is four of them."""


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_chunks_blocks_come_back_while_a_request_runs(async_scheduling: bool) -> None:
    """The request holds the current chunk, and the blocks that steps under way read and write."""
    room = room_of(async_scheduling=async_scheduling, kv_cache_groups=GROUPS)
    room.add("a", list(range(40)), max_tokens=12)
    most = 0
    while room.scheduler.has_unfinished_requests():
        while room.can_plan:
            room.plan_next()
        room.check_invariants()
        if "a" in room.scheduler.requests:
            num_full = room.scheduler.kv.num_slots_of("a") // 4
            most = max(most, room.scheduler.kv.num_blocks_of("a") - num_full)
        room.take_output()
    assert most == (6 if async_scheduling else 4)
    room.run()
    assert held_blocks(room) == 0


def test_a_hit_needs_only_the_chunk_that_goes_on() -> None:
    """Null blocks precede the current chunk and tokens stay correct; at a chunk's start nothing is needed."""
    room = room_of(kv_cache_groups=GROUPS)
    prompt = list(range(40))
    room.add("a", prompt, max_tokens=1)
    room.run()
    room.add("b", [*prompt, 1, 2, 3], max_tokens=1)
    (new,) = room.step().scheduled_new_reqs
    assert new.num_computed_tokens == 40
    assert new.block_ids[1:20:2][:8] == [0] * 8
    assert 0 not in new.block_ids[17::2]
    assert 0 not in new.block_ids[0::2]
    room.run()
    room.add("c", [*prompt[:32], 7], max_tokens=1)
    (new,) = room.step().scheduled_new_reqs
    assert new.num_computed_tokens == 32
    assert new.block_ids[1::2][:8] == [0] * 8
    room.run()
    room.check_invariants()


def test_admission_knows_that_a_long_prompt_needs_one_chunk() -> None:
    """60 tokens take 15 blocks of full attention, and never more than 6 of a chunk and a step."""
    room = room_of(num_blocks=1 + 15 + 6, kv_cache_groups=GROUPS)
    room.add("a", list(range(60)), max_tokens=2)
    room.run()
    assert len(room.received["a"]) == 2
    assert room.scheduler.make_stats().num_preemptions == 0


def test_a_pin_holds_the_chunk_that_goes_on() -> None:
    """The pin holds its chunk's blocks and all of full attention; the next turn takes both."""
    policy = PinningPolicy()
    room = room_of(policy, kv_cache_groups=GROUPS)
    room.add("a", list(range(24)), max_tokens=6)
    room.run()
    (pin,) = policy.pins()
    assert (pin.num_prefix_blocks, pin.num_blocks) == (7, 7 + 3)
    context = PolicyContext(4, 32, kv_cache_groups=GROUPS)
    assert [context.blocks_of_pin(n) for n in (0, 1, 3, 4, 7, 8)] == [0, 2, 6, 4, 10, 8]
    assert held_blocks(room) == room.scheduler.kv.num_pinned_blocks == 10
    pool = room.scheduler.kv.pool
    pool.free_blocks(pool.get_new_blocks(pool.num_free_blocks))  # Everything else is evicted.
    back = room.add("back", [*room.tokens["a"][:29], 7, 8], max_tokens=1)
    room.step()
    assert back.num_cached_tokens == 28
    room.run()
    room.check_invariants()


def test_a_pin_is_never_cut_to_more_than_it_holds() -> None:
    """After 17 tokens a pin holds one block of a chunk; in the previous chunk it would hold up to three, so
    it is cut to a point that needs fewer."""
    policy = PinningPolicy()
    room = room_of(policy, kv_cache_groups=GROUPS)
    room.add("a", list(range(20)), max_tokens=1)
    room.run()
    (pin,) = policy.pins()
    assert (pin.num_prefix_blocks, pin.num_blocks) == (5, 5 + 1)
    pinned = room.scheduler.kv.pinned
    assert pinned.longest_cut(pin.block_hashes, 4) == 4
    assert pinned.longest_cut(pin.block_hashes, 3) == 2
    policy.stale.append(StalePrefix(pin.block_hashes[3:], 3, pin, "b"))
    room.scheduler.expire(room.clock.now())
    assert (pin.num_prefix_blocks, pin.num_blocks) == (2, 4)
    assert policy.lost == [(2, PinEnd.SUPERSEDED)]
    room.check_invariants()


def test_where_a_chunk_begins_a_model_of_chunks_needs_nothing() -> None:
    """A turn that ends at a chunk's start leaves nothing to pin, and the next turn computes only its new
    tokens."""
    policy = PinningPolicy()
    room = room_of(policy, kv_cache_groups=(KVCacheGroup((0,), attention_chunk=16),))
    room.add("a", list(range(28)), max_tokens=5)
    room.run()
    (pin,) = policy.pins()
    assert (pin.num_prefix_blocks, pin.num_blocks) == (8, 0)
    assert held_blocks(room) == 0
    policy.stale.append(StalePrefix(pin.block_hashes[7:], 7, pin, "b"))
    room.scheduler.expire(room.clock.now())
    assert not policy.pins()
    back = room.add("back", [*room.tokens["a"], 7, 8], max_tokens=1)
    room.step()
    assert back.num_cached_tokens == 32
    room.run()
    room.check_invariants()


def test_a_trace_tells_chunks() -> None:
    """A replay reconstructs the groups from the trace, and converts a pin's blocks to as many tokens."""
    room = room_of(kv_cache_groups=(*GROUPS, KVCacheGroup((2,), 8)))
    header = room.begin_trace(from_start=True)
    assert (header.kv_group_windows, header.kv_group_chunks) == ([0, 0, 8], [0, 16, 0])
    assert [each.attention_chunk for each in recorded_groups(header)] == [None, 16, None]
    assert [each.sliding_window for each in recorded_groups(header)] == [None, None, 8]
    context = PolicyContext(4, 100, kv_cache_groups=recorded_groups(header))
    held = [context.blocks_of_pin(n) for n in range(20)]
    for num_blocks in range(20):
        longest = max(n for n in range(20) if held[n] <= num_blocks)
        assert pinned_tokens(header, num_blocks) == 4 * longest


def test_at_100k_tokens_chunks_take_little() -> None:
    """With Llama 4 Scout's layers a request and its pin take a third of the blocks that full attention in all
    layers would: a quarter for the full layers, and a chunk of 8,192 for the others."""
    groups = groups_of([None] * 48, [8192, 8192, 8192, None] * 12)
    num_tokens, size = 100_000, 16
    all_full = len(groups) * num_tokens // size
    policy = PinningPolicy()

    def pin_all(request: Request, now: float) -> Pin:
        hashes = request.block_hashes[: request.num_computed_tokens // size]
        pin = policy.held[0] = Pin(0, "job", request.request_id, hashes, 1000.0)
        return pin

    policy.on_turn_end = pin_all  # type: ignore[method-assign]
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
    assert held <= 0.34 * all_full
    assert room.scheduler.kv.num_pinned_blocks <= 0.27 * all_full
    assert held_blocks(room) == room.scheduler.kv.num_pinned_blocks


def test_a_tip_at_the_end_of_a_chunk_needs_no_pin() -> None:
    """In a model with chunked layers only, the next turn reads no earlier block."""
    groups = (KVCacheGroup((0,), attention_chunk=8),)
    policy = ContinuumPolicyFactory()(PolicyContext(4, 16, kv_cache_groups=groups))
    room = EngineRoom(policy, block_size=4, num_blocks=17, kv_cache_groups=groups)
    room.add("r1", list(range(7)), max_tokens=2, job_id="a", tenant="t")
    room.run()
    assert list(policy.pins()) == []
    assert Pin(1, "a", "r1", [], 1.0, num_blocks=0).num_blocks == 0
    room.add("r2", list(range(7)), max_tokens=6, job_id="b", tenant="t")
    room.run()
    assert [pin.num_blocks for pin in policy.pins()] == [1]
