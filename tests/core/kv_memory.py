"""What the KV blocks of all tiers hold, by what the plans did to them: a worker that keeps hashes for KV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from engine.core.block_hash import BlockHash
from engine.outputs import KVLoad, SchedulerOutput
from engine.request import Request

LoadFate = Callable[[], tuple[int, bool]]
"""In how many steps a load ends (0: in its own), and whether it succeeds."""


def at_once() -> tuple[int, bool]:
    return 0, True


@dataclass(slots=True)
class _Copying:
    """A load in flight."""

    load: KVLoad
    contents: list[BlockHash]
    on_disk: list[BlockHash]
    steps_left: int
    succeeds: bool


@dataclass(slots=True)
class _Writing:
    """A write to disk in flight."""

    content: BlockHash
    steps_left: int
    succeeds: bool


@dataclass(frozen=True, slots=True)
class Reports:
    """Of transfers that have ended: ids of loads, and slots of the disk."""

    finished_loads: list[int]
    failed_loads: list[int]
    finished_disk_writes: list[int]
    failed_disk_writes: list[int]


class KvMemory:
    """Executes the plans' reads, writes and copies; fails where one would find something it must not."""

    def __init__(
        self, block_size: int, load_fate: LoadFate = at_once, write_fate: LoadFate = at_once
    ) -> None:
        self._block_size = block_size
        self._load_fate = load_fate
        self._write_fate = write_fate
        self.device: dict[int, BlockHash | None] = {}
        """Block id to the hash of what it holds; None: nothing whole."""
        self.host: dict[int, BlockHash] = {}
        self.disk: dict[int, BlockHash] = {}
        self._writing: dict[int, _Writing] = {}
        """By disk slot."""
        self._tables: dict[str, list[int]] = {}
        self._copying: list[_Copying] = []

    def execute(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> Reports:
        """Run one plan: loads and writes start, tokens are computed, blocks are stored, transfers end."""
        self._take_in(plan)
        for load in plan.kv_loads:
            self._begin(load)
        self._begin_writes(plan)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._write(requests[request_id], num_tokens)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._read(requests[request_id], num_tokens)
        self._store(plan)
        return Reports(*self._end(), *self._end_writes())

    def _take_in(self, plan: SchedulerOutput) -> None:
        for request_id in plan.finished_req_ids | plan.preempted_req_ids:
            self._tables.pop(request_id, None)
        for new in plan.scheduled_new_reqs:
            self._tables[new.req_id] = list(new.block_ids)
        cached = plan.scheduled_cached_reqs
        for request_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if request_id in cached.resumed_req_ids:
                self._tables[request_id] = []
            self._tables[request_id] += block_ids

    def _begin(self, load: KVLoad) -> None:
        slots, blocks = load.copies.host_slots, [*load.copies.block_ids, *load.reads.block_ids]
        assert len(blocks) == load.num_blocks == len(slots) + len(load.reads.disk_slots) > 0
        assert not set(load.reads.disk_slots) & self._writing.keys(), "read while it is written"
        assert not self._blocks_in_copies() & set(blocks), "two loads write one block"
        self.device.update(dict.fromkeys(blocks))
        steps, succeeds = self._load_fate()
        contents, on_disk = self._sources(load)
        self._copying.append(_Copying(load, contents, on_disk, steps, succeeds))

    def _sources(self, load: KVLoad) -> tuple[list[BlockHash], list[BlockHash]]:
        """What lies in the slots of the host and of the disk that it reads."""
        return [self.host[slot] for slot in load.copies.host_slots], [
            self.disk[slot] for slot in load.reads.disk_slots
        ]

    def _begin_writes(self, plan: SchedulerOutput) -> None:
        writes = plan.kv_disk_writes
        being_read = {slot for copying in self._copying for slot in copying.load.reads.disk_slots}
        for host_slot, slot in zip(writes.host_slots, writes.disk_slots, strict=True):
            assert slot not in being_read, "written while it is read"
            assert slot not in self._writing, "written twice at once"
            self.disk.pop(slot, None)
            self._writing[slot] = _Writing(self.host[host_slot], *self._write_fate())

    def _blocks_in_copies(self) -> set[int]:
        loads = [copying.load for copying in self._copying]
        return {block for load in loads for block in (*load.copies.block_ids, *load.reads.block_ids)}

    def _write(self, request: Request, num_tokens: int) -> None:
        """The step fills blocks; the last one perhaps not to the end."""
        table, size, computed = (
            self._tables[request.request_id],
            self._block_size,
            request.num_computed_tokens,
        )
        for index in range((computed - num_tokens) // size, -(-computed // size)):
            assert table[index] not in self._blocks_in_copies(), "computed into a block that is being loaded"
            is_full = (index + 1) * size <= computed and index < len(request.block_hashes)
            self.device[table[index]] = request.block_hashes[index] if is_full else None

    def _read(self, request: Request, num_tokens: int) -> None:
        """The step attends to all full blocks before it."""
        table = self._tables[request.request_id]
        num_full = (request.num_computed_tokens - num_tokens) // self._block_size
        for block_id, block_hash in zip(table[:num_full], request.block_hashes, strict=False):
            assert self.device[block_id] == block_hash, f"{request} would read what is not its own"

    def _store(self, plan: SchedulerOutput) -> None:
        stores = plan.kv_stores
        assert len(set(stores.host_slots)) == len(stores.host_slots) == len(stores.block_ids)
        being_read = {slot for copying in self._copying for slot in copying.load.copies.host_slots}
        for block_id, slot in zip(stores.block_ids, stores.host_slots, strict=True):
            content = self.device[block_id]
            assert content is not None, "stored before it was full"
            assert slot not in being_read, "stored into a slot that is being loaded from"
            self.host[slot] = content

    def _end(self) -> tuple[list[int], list[int]]:
        finished: list[int] = []
        failed: list[int] = []
        going_on: list[_Copying] = []
        for copying in self._copying:
            copying.steps_left -= 1
            if copying.steps_left >= 0:
                going_on.append(copying)
                continue
            load = copying.load
            assert self._sources(load) == (copying.contents, copying.on_disk)
            if copying.succeeds:
                self.device.update(zip(load.copies.block_ids, copying.contents, strict=True))
                self.device.update(zip(load.reads.block_ids, copying.on_disk, strict=True))
            (finished if copying.succeeds else failed).append(load.load_id)
        self._copying = going_on
        return finished, failed

    def _end_writes(self) -> tuple[list[int], list[int]]:
        finished: list[int] = []
        failed: list[int] = []
        for slot, writing in list(self._writing.items()):
            writing.steps_left -= 1
            if writing.steps_left < 0:
                del self._writing[slot]
                (finished if writing.succeeds else failed).append(slot)
                if writing.succeeds:
                    self.disk[slot] = writing.content
        return finished, failed

    def check_claims(
        self,
        device: Mapping[int, BlockHash],
        host: Mapping[BlockHash, int],
        disk: Mapping[BlockHash, int],
    ) -> None:
        """Raise AssertionError unless every block and slot holds what the scheduler thinks it does."""
        for block_id, block_hash in device.items():
            assert self.device[block_id] == block_hash, f"block {block_id} is found and holds something else"
        for block_hash, slot in host.items():
            assert self.host[slot] == block_hash, f"slot {slot} is found and holds something else"
        for block_hash, slot in disk.items():
            assert self.disk[slot] == block_hash, f"disk slot {slot} is found and holds something else"
