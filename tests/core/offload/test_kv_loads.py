"""A scheduler with a host tier: evicted KV is loaded back, and nothing is lost, whatever happens to a load.
Every step runs on a fake memory that fails if a request would read another one's KV."""

from __future__ import annotations

from collections import Counter
from itertools import count
from random import Random
from typing import Any

import pytest

from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.offload.disk_tier import DiskLevel
from engine.core.policy import FcfsPolicy, PriorityPolicy
from engine.core.request import RequestStatus
from engine.core.scheduler_report import PauseState
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from tests.core.engine_room import EngineRoom
from tests.core.kv_memory import LoadFate
from tests.core.test_scheduler_machine import ChaosPolicy


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def ends(*fates: tuple[int, bool]) -> LoadFate:
    """The fates of successive loads: steps and success."""
    stream = iter(fates)
    return lambda: next(stream)


def evicted(load_fate: LoadFate, **options: Any) -> EngineRoom:
    """A room where 'a' has run and 'b' has reused its blocks (8 of 12 for prompt and output)."""
    room = EngineRoom(FcfsPolicy(), num_blocks=13, num_host_blocks=40, load_fate=load_fate, **options)
    hashes = room.add("a", tokens(0, 32), max_tokens=1).block_hashes
    room.run()
    room.add("b", tokens(100, 46), max_tokens=1)
    room.run()
    assert not any(block.block_hash in hashes for block in room.scheduler.kv.pool.blocks)
    return room


def test_a_returning_turn_is_loaded_instead_of_computed() -> None:
    """After eviction from the device, all but the last token are loaded, and count as cached."""
    room = evicted(ends((0, True)))
    request = room.add("again", tokens(0, 32), max_tokens=1)
    plan = room.step()
    assert not plan.num_scheduled_tokens
    assert [len(load.copies) for load in plan.kv_loads] == [7]
    assert room.step().num_scheduled_tokens == {"again": 4}
    assert room.finished["again"].num_cached_tokens == 28
    assert request.num_external_computed_tokens == 28
    stats = room.scheduler.make_stats()
    assert (stats.loaded_tokens, stats.failed_loads, stats.num_host_blocks) == (28, 0, 40)
    assert stats.num_used_host_blocks == 8 + 11
    assert stats.prefix_cache_hits == 0


def test_others_run_while_a_load_is_under_way() -> None:
    """Other requests run during a load of several steps; the loading request waits with its blocks."""
    room = evicted(ends((3, True)))
    request = room.add("again", tokens(0, 32), max_tokens=1)
    room.add("other", tokens(300, 8), max_tokens=6)
    assert set(room.step().num_scheduled_tokens) == {"other"}
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert room.scheduler.statistics().num_loading == room.scheduler.num_pending_loads == 1
    for _ in range(3):
        assert set(room.step().num_scheduled_tokens) == {"other"}
        room.check_invariants()
    assert room.scheduler.num_pending_loads == 0
    assert room.step().num_scheduled_tokens == {"other": 1, "again": 4}


def test_a_failed_load_is_computed() -> None:
    """None of it counts as cached, its copies are not offered again, and its tokens are stored again."""
    room = evicted(ends((1, False)))
    room.add("again", tokens(0, 32), max_tokens=1)
    while not room.scheduler.num_pending_loads:
        room.step()
    while room.scheduler.num_pending_loads:
        room.step()
    assert room.scheduler.statistics().num_used_host_blocks == 8 + 11 - 7
    room.run()
    assert room.finished["again"].num_cached_tokens == 0
    stats = room.scheduler.make_stats()
    assert (stats.loaded_tokens, stats.failed_loads) == (0, 1)
    assert stats.num_used_host_blocks == 8 + 11
    room.check_invariants()


def test_a_load_goes_on_behind_what_the_device_still_has() -> None:
    """The device's hit is kept, the host provides the following blocks, the rest is computed."""
    room = EngineRoom(num_blocks=13, num_host_blocks=40)
    room.add("a", tokens(0, 32), max_tokens=1)
    room.run()
    room.add("b", tokens(100, 32), max_tokens=1)  # Takes the tail of a's blocks.
    room.run()
    room.add("again", tokens(0, 32) + tokens(500, 5), max_tokens=1)
    plan = room.step()
    assert [len(load.copies) for load in plan.kv_loads] == [4]
    room.run()
    assert room.finished["again"].num_cached_tokens == 32
    room.check_invariants()


def test_few_tokens_are_computed_rather_than_loaded() -> None:
    """A load shorter than ``min_load_tokens`` does not justify its fixed cost."""
    for min_load_tokens, loads in ((28, True), (29, False)):
        room = evicted(ends((0, True)), min_load_tokens=min_load_tokens)
        room.add("again", tokens(0, 32), max_tokens=1)
        assert bool(room.step().kv_loads) is loads


@pytest.mark.parametrize("status", [RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED])
@pytest.mark.parametrize("succeeds", [True, False])
def test_a_request_may_end_while_it_is_loaded(status: RequestStatus, succeeds: bool) -> None:
    """The request ends at once; its blocks are freed when the load has ended. Its id may be reused."""
    room = evicted(ends((4, succeeds), (1, True)))
    room.add("again", tokens(0, 28), max_tokens=1)
    room.step()
    (output,) = room.scheduler.finish_requests(["again"], status, room.clock.now())
    assert output.finish_reason is status.finish_reason
    assert not room.scheduler.has_unfinished_requests()
    assert room.scheduler.kv.num_free_blocks == 12 - 6
    assert not room.scheduler.reset_prefix_cache(room.clock.now())
    room.add("again", tokens(0, 24), max_tokens=1)
    room.step()
    assert room.scheduler.num_pending_loads == 2
    while room.scheduler.num_pending_loads:
        room.step()
        room.check_invariants()
    room.run()
    assert room.scheduler.kv.num_free_blocks == 12
    assert room.scheduler.reset_prefix_cache(room.clock.now())
    assert room.scheduler.statistics().num_used_host_blocks == 0


def test_a_preempted_request_is_loaded_back() -> None:
    """The computed blocks are on the host by then, so the request resumes without recomputing."""
    room = EngineRoom(num_blocks=9, max_num_seqs=2, num_host_blocks=40, max_num_batched_tokens=40)
    room.add("a", tokens(0, 14), max_tokens=12)
    room.add("b", tokens(100, 14), max_tokens=12)
    while not (plan := room.step()).preempted_req_ids:
        pass
    assert plan.preempted_req_ids == {"b"}
    while "b" not in plan.num_scheduled_tokens:
        plan = room.step()
    assert plan.scheduled_cached_reqs.resumed_req_ids == {"b"}
    assert plan.num_scheduled_tokens["b"] <= 4
    assert room.scheduler.make_stats().loaded_tokens >= 12
    room.run()
    assert set(room.finished) == {"a", "b"}


def test_a_loaded_request_needs_nothing_but_its_turn() -> None:
    """A loading request has its slot and blocks from the start, so that later requests cannot take them."""
    room = evicted(ends((3, True)), max_num_seqs=2)
    room.add("again", tokens(0, 32), max_tokens=1)
    for i in range(6):
        room.add(f"other-{i}", tokens(400 + 50 * i, 3), max_tokens=1)
    for i in range(4):
        assert set(room.step().num_scheduled_tokens) == {f"other-{i}"}
        room.check_invariants()
    assert set(room.step().num_scheduled_tokens) == {"again", "other-4"}
    room.run()


def test_what_was_loaded_is_found_by_others_at_once() -> None:
    """Loaded blocks can be hit even before the request that they were loaded for runs."""
    room = evicted(ends((0, True)))
    room.add("again", tokens(0, 32), max_tokens=1)
    room.step()
    room.scheduler.set_pause_state(PauseState.PAUSED_NEW, room.clock.now())
    twin = room.add("twin", tokens(0, 30), max_tokens=1)
    _, num_hit_tokens = room.scheduler.kv.get_computed_blocks(twin)
    assert num_hit_tokens == 28


def test_what_the_host_gave_up_is_stored_again_when_it_is_used() -> None:
    """If the host evicted blocks that the device still has, the next request that hits them stores them
    again."""
    room = EngineRoom(num_blocks=41, num_host_blocks=8)
    for start in (0, 100):
        room.add(f"from-{start}", tokens(start, 32), max_tokens=1)
        room.run()
    room.add("again", tokens(0, 32), max_tokens=1)
    plan = room.step()
    assert plan.num_scheduled_tokens == {"again": 4}
    assert len(plan.kv_stores) == 8
    room.check_invariants()


def test_no_pin_is_broken_as_a_last_resort_while_a_load_is_pending() -> None:
    """A request that does not fit waits for a pending load before pins are broken."""
    policy = ChaosPolicy([])  # Pins every turn; pins break only as a last resort.
    room = EngineRoom(policy, num_blocks=13, num_host_blocks=40, load_fate=ends((3, True), (0, True)))
    room.add("a", tokens(0, 16), max_tokens=1)
    room.run()
    room.add("b", tokens(100, 46), max_tokens=1)
    room.run()
    room.add("again", tokens(0, 16), max_tokens=1)
    room.step()
    num_pinned = room.scheduler.statistics().num_pinned_blocks
    room.add("c", tokens(200, 40), max_tokens=1)
    while room.scheduler.num_pending_loads:
        assert room.scheduler.statistics().num_pinned_blocks == num_pinned > 0
        room.step()
    room.run()
    assert set(room.finished) == {"a", "b", "again", "c"}


def test_without_chunked_prefill_a_loaded_request_gets_the_next_whole_budget() -> None:
    """The prompt is not cut, and no later request takes the budget that it waits for."""
    room = evicted(ends((0, True)), enable_chunked_prefill=False, max_num_batched_tokens=46)
    room.add("again", tokens(0, 28) + tokens(700, 10), max_tokens=1)
    room.step()
    room.scheduler.set_pause_state(PauseState.PAUSED_NEW, room.clock.now())
    room.add("other", tokens(800, 4), max_tokens=1)
    assert not room.step().num_scheduled_tokens
    room.scheduler.set_pause_state(PauseState.UNPAUSED, room.clock.now())
    assert list(room.step().num_scheduled_tokens) == ["again", "other"]


LAYOUTS = {
    "full": ONE_FULL_GROUP,
    "full and a window": (KVCacheGroup((0,)), KVCacheGroup((1,), 9)),
    "two windows and full": (KVCacheGroup((0,), 7), KVCacheGroup((1,)), KVCacheGroup((2,), 12)),
    "a window": (KVCacheGroup((0,), 6),),
    "full and chunks": (KVCacheGroup((0,)), KVCacheGroup((1,), attention_chunk=16)),
}
"""KV cache groups of several models; blocks have 4 tokens."""


class BusyDay:
    """Jobs return, overlap, are aborted and paused, for a long time, in a pool that is too small."""

    def __init__(self, seed: int, groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP) -> None:
        self.random = Random(f"busy day {seed}")
        self.num_blocks = 1 + sum(24 if group.is_full else 17 for group in groups)
        policy = [FcfsPolicy(), PriorityPolicy(), ChaosPolicy(self.coins(400))][seed % 3]
        self.seen: Counter[str] = Counter()
        self.room = EngineRoom(
            policy,
            num_blocks=self.num_blocks,
            kv_cache_groups=groups,
            num_host_blocks=self.random.choice([4, 30, 100]),
            load_fate=lambda: (self.random.choice([0, 1, 2, 7]), self.random.random() < 0.8),
            disk_level=self.disk(),
            write_fate=lambda: (self.random.choice([0, 1, 2, 9]), self.random.random() < 0.97),
            scheduler_reserve_full_isl=self.random.random() < 0.5,
            enable_chunked_prefill=self.random.random() < 0.7,
            max_num_batched_tokens=64,
        )
        self.histories = [[start] * 12 for start in range(6)]
        self.ids = count()

    def disk(self) -> DiskLevel | None:
        """The disk level of this day: none, or one that is small, slow, or both."""
        level = DiskLevel(
            num_blocks=self.random.choice([3, 20, 200]),
            max_writes=self.random.choice([2, 50]),
            fixed_tokens=self.random.choice([0.0, 9.0]),
            read_share=self.random.choice([0.0, 0.5]),
        )
        return level if self.random.random() < 0.7 else None

    def coins(self, number: int) -> list[bool]:
        return [self.random.random() < 0.3 for _ in range(number)]

    def run(self, num_events: int) -> None:
        for _ in range(num_events):
            event = self.random.choices(
                [self.turn, self.end_one, self.fail_one, self.pause, self.reset, self.step],
                [30, 4, 2, 2, 1, 63],
            )[0]
            event()
            self.room.check_invariants()
        self.room.scheduler.set_pause_state(PauseState.UNPAUSED, self.room.clock.now())
        self.room.run()
        assert len(self.room.finished) == next(self.ids), "a request is lost"
        self.room.check_invariants()

    def turn(self) -> None:
        """Continues a job from its last turn, or from an earlier point of it."""
        if len(self.room.scheduler.requests) > 8:
            return
        place = self.random.randrange(len(self.histories))
        history = self.histories[place]
        if len(history) > 50:
            history = history[: self.random.choice([8, 20])]
        more = [self.random.randrange(1000) for _ in range(self.random.randrange(1, 9))]
        request_id = f"r{next(self.ids)}"
        self.room.add(request_id, history + more, max_tokens=self.random.randrange(1, 5))
        self.histories[place] = self.room.tokens[request_id]

    def end_one(self) -> None:
        scheduler = self.room.scheduler
        if scheduler.requests:
            request_id = self.random.choice(list(scheduler.requests))
            self.seen[f"ended in {scheduler.requests[request_id].status.name}"] += 1
            status = self.random.choice([RequestStatus.FINISHED_ABORTED, RequestStatus.FINISHED_STOPPED])
            (self.room.finished[request_id],) = scheduler.finish_requests(
                [request_id], status, self.room.clock.now()
            )

    def fail_one(self) -> None:
        """Makes a request's next logits invalid; if it fails, none of its blocks stays cached."""
        if self.room.scheduler.running:
            request_id = self.random.choice(self.room.scheduler.running).request_id
            held = self.full_blocks_of(request_id)
            self.room.failing = {request_id}
            self.step()
            if request_id in self.room.finished:
                assert not any(block.block_hash for block in held)
                self.seen["logits were no numbers"] += 1
            self.room.failing.clear()

    def full_blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        """Its full-attention blocks; blocks of a window may leave it in its last step."""
        kv = self.room.scheduler.kv
        table, groups = kv.block_ids(request_id), kv.kv_cache_groups
        full = [table[i :: len(groups)] for i, group in enumerate(groups) if group.is_full]
        return [kv.pool.blocks[block_id] for part in full for block_id in part]

    def pause(self) -> None:
        self.room.scheduler.set_pause_state(self.random.choice(list(PauseState)), self.room.clock.now())
        self.step()
        self.room.scheduler.set_pause_state(PauseState.UNPAUSED, self.room.clock.now())

    def reset(self) -> None:
        self.seen[f"reset {self.room.scheduler.reset_prefix_cache(self.room.clock.now())}"] += 1

    def step(self) -> None:
        self.room.step(self.random.choice([0.01, 0.3]))
        stats = self.room.scheduler.make_stats()
        self.seen["loaded"] += stats.loaded_tokens
        self.seen["failed"] += stats.failed_loads
        self.seen["read from disk"] += stats.disk_loaded_tokens
        self.seen["failed reading from disk"] += stats.disk_failed_loads
        self.seen["written"] += stats.disk_written_blocks
        self.seen["not written"] += stats.disk_failed_writes
        self.seen["dropped"] += stats.disk_dropped_writes
        self.seen["preempted"] += stats.num_preemptions
        self.seen["waited"] += not stats.step_tokens and bool(self.room.scheduler.num_pending_loads)


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_a_busy_day(groups: tuple[KVCacheGroup, ...]) -> None:
    """Late or failed loads, aborts, preemptions, pauses and resets: each request ends once, each block and
    slot holds what it is found for, and at the end all are free."""
    seen: Counter[str] = Counter()
    for seed in range(16):
        day = BusyDay(seed, groups)
        day.run(500)
        seen.update(day.seen)
        assert day.room.scheduler.reset_prefix_cache(day.room.clock.now())
        assert day.room.scheduler.kv.num_free_blocks == day.num_blocks - 1
        statistics = day.room.scheduler.statistics()
        assert statistics.num_used_host_blocks == statistics.num_used_disk_blocks == 0
    happened = (
        *("loaded", "failed", "preempted", "waited", "ended in WAITING_FOR_REMOTE_KVS", "reset False"),
        *("read from disk", "failed reading from disk", "written", "not written", "dropped"),
        "logits were no numbers",
    )
    assert all(seen[event] > (5 if groups == ONE_FULL_GROUP else 0) for event in happened), seen
