"""A disk tier below the host tier: contents that host memory drops are written, found again, and read if that
pays. Every step runs on a fake memory that fails if a slot is read while it is written, or holds a wrong
content."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.core.offload.disk_tier import DiskLevel, DiskTier, DiskWriteCounts
from engine.core.outputs import SchedulerOutput
from tests.core.engine_room import EngineRoom
from tests.core.kv_memory import LoadFate, at_once

NUM_SLOTS = 4
MAX_WRITES = 2

HASHES = st.integers(0, 8).map(lambda number: f"{number}".encode())


class DiskTierMachine(RuleBasedStateMachine):
    """The host drops contents, which are written or not, and read; a dict records the content of each
    slot."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = DiskTier(DiskLevel(num_blocks=NUM_SLOTS, max_writes=MAX_WRITES))
        self.writing: dict[int, bytes | None] = {}
        self.held: dict[int, bytes] = {}
        self.reads: list[dict[bytes, int]] = []
        """The contents of each read in flight, and their slots."""

    @property
    def being_read(self) -> Counter[bytes]:
        return Counter(block_hash for read in self.reads for block_hash in read)

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=3))
    def write(self, hashes: list[bytes]) -> None:
        """Each write has a slot that no transfer uses, and no content is written twice."""
        for block_hash in hashes:
            self.disk.write(block_hash, 7)
        writes = self.disk.take_writes()
        read_from = {slot for read in self.reads for slot in read.values()}
        for slot in writes.disk_slots:
            assert slot not in self.writing
            assert slot not in read_from
            self.held.pop(slot, None)
        new = list(dict.fromkeys(h for h in hashes if h in self.disk._contents_written))
        new = [h for h in new if h not in self.writing.values()]
        assert len(new) == len(writes)
        self.writing.update(zip(writes.disk_slots, new, strict=True))

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), works=st.sampled_from([True, True, True, False]))
    def end_write(self, data: st.DataObject, works: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.writing)))
        content = self.writing.pop(slot)
        self.disk.end_writes([slot] if works else [], [] if works else [slot])
        if works and content is not None:
            self.held[slot] = content
            assert content in self.disk.tier

    @rule(hashes=st.lists(HASHES, min_size=1, max_size=3, unique=True))
    def read(self, hashes: list[bytes]) -> None:
        """A found content is where it was written, and its write has ended."""
        found = hashes[: self.disk.tier.count_held(hashes)]
        if found:
            slots = self.disk.tier.acquire(found)
            assert [self.held[slot] for slot in slots] == found
            self.reads.append(dict(zip(found, slots, strict=True)))

    @precondition(lambda self: self.reads)
    @rule(failed=st.booleans())
    def end_read(self, failed: bool) -> None:
        hashes = list(self.reads.pop())
        self.disk.tier.release(hashes)
        if failed:
            self.disk.tier.discard(hashes)

    @rule()
    def reset(self) -> None:
        """Contents of writes in flight are forgotten."""
        assert self.disk.reset() is not bool(self.reads)
        if not self.reads:
            self.writing = dict.fromkeys(self.writing)

    @invariant()
    def slots_are_accounted_for(self) -> None:
        self.disk.check_invariants(dict(self.being_read))
        contents = self.disk.tier.contents()
        assert all(self.held[slot] == block_hash for block_hash, slot in contents.items())
        assert len(self.writing) <= MAX_WRITES


TestDiskTier = DiskTierMachine.TestCase
TestDiskTier.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def tokens(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


LARGE = DiskLevel(num_blocks=100, max_writes=100)


def gone_from_memory(
    level: DiskLevel = LARGE, load_fate: LoadFate = at_once, write_fate: LoadFate = at_once
) -> EngineRoom:
    """A room where 'a' has run, and its 8 blocks were reused on the device and in host memory."""
    room = EngineRoom(
        num_blocks=13, num_host_blocks=12, disk_level=level, load_fate=load_fate, write_fate=write_fate
    )
    room.add("a", tokens(0, 32), max_tokens=1)
    room.run()
    for number in (1, 2):
        room.add(f"b{number}", tokens(100 * number, 46), max_tokens=1)
        room.run()
    room.check_invariants()
    return room


def step_again(room: EngineRoom) -> SchedulerOutput:
    """Runs the step in which 'a' returns."""
    room.add("again", tokens(0, 32), max_tokens=1)
    return room.step()


def test_a_returning_turn_is_read_from_disk() -> None:
    """All but the last token are loaded, and counted as read from disk."""
    room = gone_from_memory()
    written = room.scheduler.make_stats()
    assert (written.disk_written_blocks, written.num_used_disk_blocks) == (8 + 11 + 11 - 12,) * 2
    (load,) = step_again(room).kv_loads
    assert (len(load.copies), len(load.reads)) == (0, 7)
    room.run()
    assert room.finished["again"].num_cached_tokens == 28
    stats = room.scheduler.make_stats()
    assert (stats.loaded_tokens, stats.disk_loaded_tokens, stats.disk_failed_loads) == (28, 28, 0)
    room.check_invariants()


def test_what_was_read_is_in_host_memory_again_and_on_disk_still() -> None:
    """The next return needs no read, and the content may be dropped again without a write."""
    room = gone_from_memory()
    step_again(room)
    room.run()
    assert room.connector is not None
    assert room.connector.disk is not None
    hashes = room.add("once more", tokens(0, 32), max_tokens=1).block_hashes
    assert all(h in room.connector.tier for h in hashes[:7])
    assert all(h in room.connector.disk.tier for h in hashes[:7])


def test_one_load_may_come_from_memory_and_disk() -> None:
    """One load takes the tail from host memory and the head from disk, or the other way round."""
    room = EngineRoom(num_blocks=13, num_host_blocks=15, disk_level=LARGE)
    room.add("a", tokens(0, 32), max_tokens=1)
    room.run()
    room.add("b", tokens(100, 46), max_tokens=1)
    room.run()
    (load,) = step_again(room).kv_loads
    assert (len(load.copies), len(load.reads)) == (4, 3)
    room.run()
    assert room.finished["again"].num_cached_tokens == 28
    assert room.scheduler.make_stats().disk_loaded_tokens == 12


def test_a_read_that_fails_costs_only_the_time_to_compute() -> None:
    """A request continues after a failed read; its blocks are not read again."""
    fates = iter([(2, False)])
    room = gone_from_memory(load_fate=lambda: next(fates))
    assert step_again(room).kv_loads
    room.run()
    assert room.finished["again"].num_cached_tokens == 0
    stats = room.scheduler.make_stats()
    assert (stats.failed_loads, stats.disk_failed_loads, stats.loaded_tokens) == (1, 1, 0)
    assert room.connector is not None
    assert room.connector.disk is not None
    assert not any(h in room.connector.disk.tier for h in room.add("x", tokens(0, 32)).block_hashes[:7])
    room.run()
    room.check_invariants()


def test_what_is_still_being_written_is_not_read() -> None:
    """A block still being written is recomputed, and found once the write is reported."""
    room = gone_from_memory(write_fate=lambda: (50, True))
    assert not step_again(room).kv_loads
    room.run()
    for number in range(60):
        room.add(f"c{number}", tokens(900, 8), max_tokens=1)
        room.step()
    room.run()
    assert room.scheduler.make_stats().disk_written_blocks >= 8
    room.check_invariants()


def test_a_disk_that_takes_nothing_more_costs_nothing_but_its_use() -> None:
    """If every write fails, no request waits, each slot is tried once, and a reset retries them."""
    level = DiskLevel(num_blocks=10, max_writes=100)
    room = gone_from_memory(level, write_fate=lambda: (0, False))
    stats = room.scheduler.make_stats()
    assert (stats.disk_written_blocks, stats.disk_failed_writes, stats.disk_dropped_writes) == (0, 10, 8)
    assert not step_again(room).kv_loads
    room.run()
    assert room.scheduler.reset_prefix_cache(room.clock.now())
    for start in (300, 400):
        room.add(f"from-{start}", tokens(start, 46), max_tokens=1)
        room.run()
    assert room.scheduler.make_stats().disk_failed_writes == 10
    room.check_invariants()


def test_a_slow_disk_drops_what_it_cannot_take() -> None:
    """At most ``max_writes`` writes are in flight; the other contents are dropped and counted."""
    room = gone_from_memory(DiskLevel(num_blocks=100, max_writes=3), write_fate=lambda: (500, True))
    stats = room.scheduler.make_stats()
    assert (stats.disk_written_blocks, stats.disk_dropped_writes) == (0, 18 - 3)


@pytest.mark.parametrize(
    ("fixed_tokens", "read_share", "reads"),
    [(0, 0.0, True), (28, 0.0, True), (29, 0.0, False), (0, 0.9, True), (5, 0.9, False), (0, 1.1, False)],
)
def test_what_is_computed_sooner_is_not_read(fixed_tokens: int, read_share: float, reads: bool) -> None:
    """28 tokens are read only if recomputing them takes longer than the read with its fixed cost."""
    level = DiskLevel(num_blocks=100, max_writes=100, fixed_tokens=fixed_tokens, read_share=read_share)
    assert bool(step_again(gone_from_memory(level)).kv_loads) is reads


def test_behind_other_reads_it_takes_longer() -> None:
    """Of two returning turns the second is recomputed, as its read would wait for the first."""
    level = DiskLevel(num_blocks=100, max_writes=100, read_share=0.6)
    room = EngineRoom(
        num_blocks=20, num_host_blocks=12, disk_level=level, load_fate=lambda: (9, True), max_num_seqs=2
    )
    for name, start in (("a", 0), ("b", 100), ("c", 200), ("d", 300), ("e", 400)):
        room.add(name, tokens(start, 32), max_tokens=1)
        room.run()
    room.add("a again", tokens(0, 32), max_tokens=1)
    room.add("b again", tokens(100, 32), max_tokens=1)
    plan = room.step()
    assert [load.request_id for load in plan.kv_loads] == ["a again"]
    assert "b again" in plan.num_scheduled_tokens
    room.run()


def test_counts_are_told_once() -> None:
    disk = DiskTier(DiskLevel(num_blocks=1, max_writes=1))
    disk.write(b"a", 0)
    disk.write(b"b", 1)
    disk.end_writes(disk.take_writes().disk_slots, [])
    assert disk.take_counts() == DiskWriteCounts(num_written=1, num_dropped=1)
    assert disk.take_counts() == DiskWriteCounts()
