"""Copies that overlap steps: at whatever time each is made, a step reads the right memory, and a load and a
write to disk get the stored content. The plans are those of a real scheduler with too small a pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count, cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.kv_cache.block_hash import BlockHash
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request
from engine.frontend.llm import LLM
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from engine.worker import executor
from engine.worker.kv_tiers.device_host_pool import DeviceHostPool, select_host_pool
from engine.worker.kv_tiers.disk_pool import DiskPool, TransferReports
from engine.worker.kv_tiers.host_pool import HostTransfers
from engine.worker.kv_tiers.store_queue import StoreQueue
from tests.core.kv_memory import NONE_ACCEPTED, KvMemory, Reports, Work
from tests.core.offload.test_kv_loads import LAYOUTS, BusyDay
from tests.worker.conftest import ModelFolders
from tests.worker.gpu.late_streams import PICKS, LateStreams, StepsAtOnce, Wait
from tests.worker.kv_tiers.test_disk_tier import Jobs

BLOCK_SIZE = 4
BLOCK_BYTES = 2 * BLOCK_SIZE * 8


class Corrupted(AssertionError):
    """Memory had other content than was written."""


def number_of(content: BlockHash) -> int:
    """The number that fills a block of this content: a hash, and in models of several groups the group."""
    return int.from_bytes(content[:6] + content[32:], "little")


class LateMemory(KvMemory):
    """Executes plans on a late device. Tokens are known at once, so the host may be steps ahead."""

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        picks: Iterator[str],
        luck: Iterator[bool],
        forgotten: Collection[Wait] = (),
        groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP,
    ) -> None:
        super().__init__(BLOCK_SIZE, kv_cache_groups=groups)
        self._blocks = torch.zeros((num_blocks, 1, 2, BLOCK_SIZE, 1, 1), dtype=torch.int64)
        self._streams = LateStreams(picks, forgotten)
        self._disk = self._streams.disk_of(self._blocks, luck)
        self._pool = DeviceHostPool(
            self._blocks,
            num_host_blocks,
            self._streams,
            self._disk,
            num_groups=len(groups),
            slab_bytes=3 * BLOCK_BYTES,
            portion_bytes=2 * BLOCK_BYTES,
        )
        self._garbage = count(-1, -1)

    def take(
        self, plan: SchedulerOutput, requests: Mapping[str, Request], under_way: Sequence[Work] = ()
    ) -> Work:
        """Queues a plan."""
        work = super().take(plan, requests, under_way)
        self._pool.begin_step(plan)
        self._queue_step(work)
        self._pool.end_step(plan)
        return work

    def execute(self, work: Work, num_accepted: Mapping[str, int] = NONE_ACCEPTED) -> Reports:
        """Lets the device do some work, of this plan or another."""
        self._streams.run_some()
        if not work.spans:  # the host can only wait, but not for ever
            for _ in range(20):
                self._streams.run_each()
        reports = self._pool.take_reports()
        return Reports(
            reports.finished_loads,
            reports.failed_loads,
            reports.finished_writes,
            reports.failed_writes,
        )

    def after(self, under_way: Sequence[Work]) -> KvMemory:
        return self

    def _queue_step(self, work: Work) -> None:
        """All requests write, then each reads what its new tokens see and its new full blocks."""
        writes: list[tuple[int, int]] = []
        reads: list[tuple[int, int]] = []
        for span in work.spans:
            hashes = span.request.block_hashes[: span.end // BLOCK_SIZE]
            for block_id, index, group in span.read(self._layout):
                reads.append((block_id, number_of(self._layout.content(hashes[index], group))))
            for place, block_id in enumerate(span.written(self._layout)):
                index, group = divmod(place, self._layout.num_groups)
                index += span.start // BLOCK_SIZE
                if index < len(hashes):
                    number = number_of(self._layout.content(hashes[index], group))
                    reads.append((block_id, number))
                else:
                    number = next(self._garbage)
                writes.append((block_id, number))
        self._streams.steps.do(lambda: self._run_step(writes, reads))

    def _run_step(self, writes: list[tuple[int, int]], reads: list[tuple[int, int]]) -> None:
        for block_id, number in writes:
            self._blocks[block_id] = number
        for block_id, number in reads:
            self._check(self._blocks[block_id], number, f"a step reads block {block_id}")

    def _check(self, memory: torch.Tensor, number: int, what: str) -> None:
        if not bool((memory == number).all()):
            raise Corrupted(what)

    def check_claims(
        self,
        device: Mapping[int, BlockHash],
        host: Mapping[BlockHash, int],
        disk: Mapping[BlockHash, int],
    ) -> None:
        """Checks nothing between steps: see ``finish``."""

    def finish(self, day: BusyDay) -> None:
        """Lets the device finish; then every cached block on any tier must have its content."""
        self._streams.run_all()
        connector = day.room.connector
        assert connector is not None
        for block in day.room.scheduler.kv.pool.blocks:
            if block.block_hash is not None:
                self._check(self._blocks[block.block_id], number_of(block.block_hash), "a cached block")
        if connector.disk is not None:
            for block_hash, slot in connector.disk.tier.contents().items():
                content = bytearray(self._disk.contents[slot])
                kept = torch.frombuffer(content, dtype=torch.int64)
                self._check(kept, number_of(block_hash), f"slot {slot} of the disk")
        self._pool.close()
        self._pool.close()


def late_day(
    seed: int,
    picks: Iterator[str],
    num_events: int = 150,
    forgotten: Collection[Wait] = (),
    groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP,
) -> BusyDay:
    """Runs a busy day on a late device to its end. Raises Corrupted if any content was wrong."""
    day = BusyDay(seed, groups)
    assert day.room.connector is not None
    luck = Random(seed)
    memory = LateMemory(
        num_blocks=day.num_blocks,
        num_host_blocks=day.room.connector.tier.num_blocks,
        picks=picks,
        luck=iter(lambda: luck.random() < 0.9, None),
        forgotten=forgotten,
        groups=groups,
    )
    day.room.memory = memory
    day.run(num_events)
    memory.finish(day)
    return day


def random_picks(seed: int) -> Iterator[str]:
    """Picks by which sometimes one queue is ahead, sometimes another."""
    random = Random(seed)
    while True:
        weights = [random.choice([0.2, 1, 5]) for _ in PICKS]
        yield from random.choices(PICKS, weights, k=random.randrange(1, 60))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    picks=st.lists(st.sampled_from(PICKS), max_size=120),
    groups=st.sampled_from([ONE_FULL_GROUP, *LAYOUTS.values()]),
)
def test_whenever_a_copy_is_made_it_is_the_right_one(
    seed: int, picks: list[str], groups: tuple[KVCacheGroup, ...]
) -> None:
    """Stores, loads, disk reads and writes, and reused blocks and slots have the right content."""
    late_day(seed, cycle([*picks, "host"]), groups=groups)


@pytest.mark.parametrize("layout", ["full", "full and a window"])
def test_much_happens_on_such_a_day(layout: str) -> None:
    """The days of the test above have loads, disk reads, failures, writes and preemptions."""
    days = [late_day(seed, random_picks(seed), 300, groups=LAYOUTS[layout]) for seed in range(6)]
    for event in ("loaded", "read from disk", "failed reading from disk", "written", "preempted"):
        assert sum(day.seen[event] for day in days) > (5 if layout == "full" else 0), event


MUTANTS: dict[str, Collection[Wait]] = {
    "a load does not wait for steps": [("loads", "steps")],
    "a load does not wait for stores": [("loads", "stores")],
    "a store does not wait for its step": [("stores", "steps")],
    "a step does not wait for stores": [("steps", "stores")],
    "a read from disk does not wait for steps": [("disk reads", "steps")],
    "a read from disk does not wait for stores": [("disk reads", "stores")],
    "a write to disk does not wait for stores": [("disk writes", "stores")],
    "a load is reported before it is done": [("host", "loads")],
}


def is_found(corrupt: Callable[[int], object]) -> bool:
    """Whether one of a few days raises Corrupted."""
    for seed in range(60):
        try:
            corrupt(seed)
        except Corrupted:
            return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", MUTANTS.values(), ids=MUTANTS)
def test_no_wait_can_be_left_out(forgotten: Collection[Wait]) -> None:
    assert is_found(lambda seed: late_day(seed, random_picks(seed), forgotten=forgotten))


@pytest.mark.slow
def test_a_block_that_a_window_left_is_stored_before_it_is_written() -> None:
    """The very next plan may give the block to another request."""
    forgotten, groups = MUTANTS["a step does not wait for stores"], LAYOUTS["a window"]
    assert is_found(lambda seed: late_day(seed, random_picks(seed), forgotten=forgotten, groups=groups))


@pytest.mark.parametrize("who", ["reading", "writing"])
def test_stores_are_waited_for_by_block_and_by_slot(monkeypatch: pytest.MonkeyPatch, who: str) -> None:
    """A step waits before it overwrites a block being stored, a load before it reads a slot being written."""
    monkeypatch.setattr(StoreQueue, who, lambda *_: [])
    assert is_found(lambda seed: late_day(seed, random_picks(seed)))


class LatePool(DeviceHostPool):
    """A pool under a real model on a CPU whose copies are made during later steps."""

    def __init__(
        self, blocks: torch.Tensor, num_slots: int, disk: DiskPool | None, num_groups: int = 1
    ) -> None:
        self._late = StepsAtOnce(random_picks(0))
        slab_bytes = 3 * blocks[0].nbytes
        super().__init__(blocks, num_slots, self._late, disk, num_groups=num_groups, slab_bytes=slab_bytes)
        self.num_late_steps = 0

    def begin_step(self, plan: SchedulerOutput) -> None:
        self._late.run_some()
        super().begin_step(plan)

    def take_reports(self) -> TransferReports:
        reports = super().take_reports()
        self.num_late_steps += len(self._loads) > 0
        return reports


def check_turns(folder: Path, **options: Any) -> None:
    """Runs three jobs in a pool for little more than one: every later turn is loaded from another tier, and
    has transformers' tokens."""
    with LLM(
        str(folder),
        multiprocess=False,
        max_model_len=304,
        num_gpu_blocks_override=20,
        max_num_batched_tokens=64,
        **options,
    ) as llm:
        jobs = Jobs(llm, folder)
        assert jobs.turn() == 0
        assert jobs.turn() >= sum((150 + 10 * job) // 16 * 16 for job in range(3))
        assert jobs.turn() > 3 * 160
        assert llm.statistics().num_free_blocks == 19


def disk_in(folder: Path) -> dict[str, Any]:
    """Options: host memory for less than a job, and a disk for all."""
    return {
        "num_host_blocks_override": 8,
        "num_disk_blocks_override": 200,
        "kv_offloading_disk_path": str(folder),
        "kv_offloading_disk_min_tokens": 1,
    }


@pytest.mark.slow
@pytest.mark.parametrize("with_disk", [False, True])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_an_engine_whose_copies_are_late_gives_the_same_tokens(
    model_folders: ModelFolders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    with_disk: bool,
    async_scheduling: bool,
) -> None:
    """Loads from host memory and disk take several steps, with and without async scheduling."""
    pools: list[LatePool] = []

    def select(blocks: torch.Tensor, num_slots: int, disk: DiskPool | None, **_: bool) -> LatePool:
        pools.append(LatePool(blocks, num_slots, disk))
        return pools[-1]

    monkeypatch.setattr(executor, "select_host_pool", select)
    options = disk_in(tmp_path) if with_disk else {"num_host_blocks_override": 100}
    check_turns(model_folders("llama"), async_scheduling=async_scheduling, **options)
    assert pools[0].num_late_steps > 5


def test_an_engine_on_a_cpu_may_have_the_pool_of_a_device(
    model_folders: ModelFolders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the pool makes its copies when they are requested."""

    def select(
        blocks: torch.Tensor, num_slots: int, disk: DiskPool | None, **_: bool
    ) -> HostTransfers | None:
        return select_host_pool(blocks, num_slots, disk, during_steps=True)

    monkeypatch.setattr(executor, "select_host_pool", select)
    check_turns(model_folders("qwen3"), **disk_in(tmp_path))
