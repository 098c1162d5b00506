"""What the KV blocks of both tiers hold, by what the plans did to them: a worker that keeps hashes for KV."""

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
    steps_left: int
    succeeds: bool


class KvMemory:
    """Executes the plans' reads, writes and copies; fails where one would find something it must not."""

    def __init__(self, block_size: int, load_fate: LoadFate = at_once) -> None:
        self._block_size = block_size
        self._load_fate = load_fate
        self.device: dict[int, BlockHash | None] = {}
        """Block id to the hash of what it holds; None: nothing whole."""
        self.host: dict[int, BlockHash] = {}
        self._tables: dict[str, list[int]] = {}
        self._copying: list[_Copying] = []

    def execute(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> tuple[list[int], list[int]]:
        """Run one plan: loads start, tokens are computed, blocks are stored, loads end. Ids of those that
        finished and of those that failed."""
        self._take_in(plan)
        for load in plan.kv_loads:
            self._begin(load)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._write(requests[request_id], num_tokens)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._read(requests[request_id], num_tokens)
        self._store(plan)
        return self._end()

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
        slots, blocks = load.copies.host_slots, load.copies.block_ids
        assert len(slots) == len(blocks) > 0
        assert not self._blocks_in_copies() & set(blocks), "two loads write one block"
        self.device.update(dict.fromkeys(blocks))
        steps, succeeds = self._load_fate()
        self._copying.append(_Copying(load, [self.host[slot] for slot in slots], steps, succeeds))

    def _blocks_in_copies(self) -> set[int]:
        return {block for copying in self._copying for block in copying.load.copies.block_ids}

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
            assert [self.host[slot] for slot in load.copies.host_slots] == copying.contents
            if copying.succeeds:
                self.device.update(zip(load.copies.block_ids, copying.contents, strict=True))
            (finished if copying.succeeds else failed).append(load.load_id)
        self._copying = going_on
        return finished, failed

    def check_claims(self, device: Mapping[int, BlockHash], host: Mapping[BlockHash, int]) -> None:
        """Raise AssertionError unless every block and slot holds what the scheduler thinks it does."""
        for block_id, block_hash in device.items():
            assert self.device[block_id] == block_hash, f"block {block_id} is found and holds something else"
        for block_hash, slot in host.items():
            assert self.host[slot] == block_hash, f"slot {slot} is found and holds something else"
