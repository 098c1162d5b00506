"""Whatever happens to a scheduler, a reader that applies its events in order knows what is cached and
pinned."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis.stateful import invariant

from engine.core.kv_cache.kv_event_recorder import KVEventRecorder
from engine.core.pin_recorder import PinRecorder
from engine.records.kv_cache_groups import KVCacheGroup
from engine.records.kv_events import BlockRemoved, BlockStored
from tests.core.engine_room import EngineRoom
from tests.core.event_reader import EventReader, PinReader, contents_of
from tests.core.test_scheduler_machine import BLOCK_SIZE, SchedulerMachine

AHEAD_S = 1e6
"""Seconds by which the wall clock is ahead of the scheduler's."""


class Reading:
    """A room whose events are recorded and read."""

    def __init__(self, room: EngineRoom) -> None:
        self.room = room
        scheduler = room.scheduler
        groups = scheduler.kv.kv_cache_groups
        has_full = any(group.is_full for group in groups)
        self.reader, self.pin_reader = EventReader(parents_first=has_full), PinReader()
        self.recorder = KVEventRecorder(BLOCK_SIZE, groups, scheduler.requests)
        self.recorder.attach(scheduler.kv)
        scheduler.loads.record(self.recorder.host)
        scheduler.pins.recorder = self.pin_recorder = PinRecorder(BLOCK_SIZE, AHEAD_S)

    def check(self) -> None:
        """Reads new events and compares the result with the scheduler."""
        self.reader.apply(self.recorder.take())
        self.pin_reader.apply(self.pin_recorder.take())
        connector = self.room.connector
        host = connector.tier.contents() if connector is not None else {}
        assert self.reader.contents == contents_of(self.room.scheduler.kv, host)
        held = {
            pin.pin_id: (
                pin.num_prefix_blocks * BLOCK_SIZE,
                pin.num_blocks,
                pin.deadline_s + AHEAD_S if math.isfinite(pin.deadline_s) else None,
            )
            for pin in self.room.scheduler.policy.pins()
        }
        assert self.pin_reader.pins == held


class EventMachine(SchedulerMachine):
    """The scheduler's machine with a reader of its events."""

    def on_start(self, policy: str, bits: list[bool]) -> None:
        self.reading = Reading(self.room)

    @invariant()
    def the_reader_knows_what_is_cached(self) -> None:
        if hasattr(self, "reading"):
            if self.policy == "oracle":  # A baseline that moves deadlines without a signal.
                self.reading.pin_recorder.compare_deadlines()
            self.reading.check()


TestEvents = EventMachine.TestCase
TestEvents.settings = settings(max_examples=500, stateful_step_count=40)


def test_blocks_of_a_prompt_are_one_event_with_its_tokens() -> None:
    """The next turn's blocks begin where the first one's end, and have those as their parent."""
    reading = Reading(room := EngineRoom(block_size=4))
    room.add("first", list(range(10)), max_tokens=1, job_id="job")
    room.run()
    (first,) = reading.recorder.take()
    assert isinstance(first, BlockStored)
    assert (first.parent_block_hash, first.token_ids) == (None, list(range(8)))
    assert (first.block_size, first.medium, first.group_idx) == (4, "GPU", 0)
    assert (first.kv_cache_spec_kind, first.session_id, first.extra_keys) == (
        "full_attention",
        "job",
        [None, None],
    )
    room.add("second", list(range(14)), max_tokens=1)
    room.run()
    (second,) = reading.recorder.take()
    assert isinstance(second, BlockStored)
    assert (second.parent_block_hash, second.token_ids) == (first.block_hashes[-1], [8, 9, 10, 11])
    assert second.session_id is None


def test_what_two_requests_compute_side_by_side_is_told_once() -> None:
    """Blocks that two requests compute concurrently are stored once, and removed with the last copy."""
    reading = Reading(room := EngineRoom(block_size=4, num_blocks=9))
    for name in ("one", "other"):
        room.add(name, list(range(8)), max_tokens=1)  # Its last block is computed even if it is cached.
    room.run()
    assert room.scheduler.kv.pool.num_cached_blocks == 3
    stored = [event for event in reading.recorder.take() if isinstance(event, BlockStored)]
    assert [len(event.block_hashes) for event in stored] == [2]
    room.add("large", [7] * 31, max_tokens=1)
    room.run()
    removed = [event for event in reading.recorder.take() if isinstance(event, BlockRemoved)]
    assert sorted(h for event in removed for h in event.block_hashes) == sorted(stored[0].block_hashes)


def test_a_salt_is_told_with_the_first_block_alone() -> None:
    reading = Reading(room := EngineRoom(block_size=4))
    room.add("salted", list(range(9)), max_tokens=1, cache_salt="secret")
    room.run()
    (stored,) = reading.recorder.take()
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == [["secret"], None]
    reading.reader.apply([stored])


def test_groups_are_told_apart() -> None:
    """A window's events have only the blocks that are still cached; full attention comes first."""
    groups = (KVCacheGroup((0,)), KVCacheGroup((0,), sliding_window=8))
    reading = Reading(room := EngineRoom(block_size=4, num_blocks=40, kv_cache_groups=groups))
    room.add("long", list(range(40)), max_tokens=1)
    room.run()
    events = reading.recorder.take()
    stored = [event for event in events if isinstance(event, BlockStored)]
    kinds = [(e.group_idx, e.kv_cache_spec_kind, e.kv_cache_spec_sliding_window) for e in stored]
    assert kinds[:2] == [(0, "full_attention", None), (1, "sliding_window", 8)]
