"""The host tier of a GPU: offloads and loads KV blocks while steps run. Does not know which request uses
which block.

No call waits for the device. Where a copy would read a block that another still writes, or overwrite one that
another still reads, events on the device's streams order copies and steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.core.offload.disk_tier import MAX_DISK_WRITES
from engine.core.outputs import BlockCopies, DiskWrites, KVLoad, SchedulerOutput
from engine.worker.kv_tiers.copy_streams import CopyStreams, Event, copy_streams_of
from engine.worker.kv_tiers.disk_pool import DiskPool, KvDisk, TransferReports
from engine.worker.kv_tiers.host_pool import HostPool, HostTransfers
from engine.worker.kv_tiers.pinned_slabs import SLAB_BYTES, PinnedSlabs
from engine.worker.kv_tiers.slot_rows import SlotRows
from engine.worker.kv_tiers.store_queue import PORTION_BYTES, StoreQueue


@dataclass(slots=True)
class _Load:
    """A load in flight. It is over when both of its parts have ended, successfully or not."""

    copied: Event | None
    """The event after its copies from host memory; None if it has none."""
    is_read: bool
    """Whether its reads from disk have ended; true if it has none."""
    failed: bool = False

    def is_over(self) -> bool:
        return self.is_read and (self.copied is None or self.copied.query())


class DeviceHostPool:
    """HostTransfers whose copies run concurrently with steps. Call it on one thread only.

    - A load waits for all steps queued before, which may still use its blocks, for the stores that still read
      them, and for the stores into its slots. Steps need not wait for it: its blocks are used only after it
      was reported as finished.
    - A store waits for the step that computes its blocks.
    - A step that gets a newly allocated block waits for the stores that still read it.
    - A state is stored when its slot is reassigned, after the steps queued before; the step waits for that.
    - A write to disk waits for the store into its slot. The slot gets other memory, so nothing waits for the
      write.
    - Nothing is stored into a slot that a load reads from: the scheduler does not reuse it until the load is
      reported.
    """

    def __init__(
        self,
        device_pool: torch.Tensor,
        num_slots: int,
        streams: CopyStreams,
        disk: KvDisk | None = None,
        *,
        num_groups: int = 1,
        max_writes: int = MAX_DISK_WRITES,
        slab_bytes: int = SLAB_BYTES,
        portion_bytes: int = PORTION_BYTES,
    ) -> None:
        """``device_pool``: [num_blocks, num_slots, 2, block_size, num_kv_heads, head_dim]. ``num_groups``:
        block tables per request. ``max_writes``: concurrent writes to disk."""
        self._block_size = device_pool.shape[3]
        self._num_groups = num_groups
        self._blocks = device_pool
        self._rows = SlotRows(num_slots, 0 if disk is None else max_writes)
        self._slabs = PinnedSlabs(
            self._rows.num_rows, device_pool.shape[1:], device_pool.dtype, streams, slab_bytes
        )
        self._stores = StoreQueue(device_pool, self._slabs, streams, portion_bytes)
        self._streams = streams
        self._disk = disk
        self._loads: dict[int, _Load] = {}

    def begin_step(self, plan: SchedulerOutput) -> None:
        self._write_to_disk(plan.kv_disk_writes)
        if len(plan.state_stores):
            self._store_states(plan.state_stores)
        if plan.kv_loads:
            self._start(plan.kv_loads)
        if given := _blocks_given(plan, self._block_size, self._num_groups):
            for copied in self._stores.reading(np.array(given)):
                self._streams.steps.wait_event(copied)

    def end_step(self, plan: SchedulerOutput) -> None:
        stores = plan.kv_stores
        if len(stores):
            computed = self._streams.steps.record_event()
            self._stores.add(np.array(stores.block_ids), self._rows.of(stores.host_slots), computed)
        self._stores.advance(loads_first=bool(self._loads))

    def take_reports(self) -> TransferReports:
        reports = self._take_disk_reports()
        for load_id, load in list(self._loads.items()):
            if load.is_over():
                del self._loads[load_id]
                (reports.failed_loads if load.failed else reports.finished_loads).append(load_id)
        return reports

    def before_overwriting(self, block_ids: Sequence[int]) -> Sequence[Event]:
        return [self._streams.steps.record_event(), *self._stores.reading(np.array(block_ids))]

    def close(self) -> None:
        """Finish the copies on the streams, and drop stores that are not queued there yet."""
        self._streams.loads.synchronize()
        self._streams.stores.synchronize()
        if self._disk is not None:
            self._disk.close()
        self._slabs.close()

    def _start(self, loads: Sequence[KVLoad]) -> None:
        """Start loads after all queued steps, which may still use their blocks for a request that was aborted
        or has ended."""
        before = self._streams.steps.record_event()
        for load in loads:
            copied = self._copy(load.copies, before) if len(load.copies) else None
            self._loads[load.load_id] = _Load(copied, is_read=not load.reads)
            if load.reads:
                assert self._disk is not None, "there is no disk to read from"
                free = [before, *self._stores.reading(np.array(load.reads.block_ids))]
                self._disk.read(load.load_id, load.reads, free)

    def _copy(self, copies: BlockCopies, before: Event) -> Event:
        """Copy from host to device."""
        block_ids = np.array(copies.block_ids)
        rows = self._rows.of(copies.host_slots)
        stream = self._streams.loads
        for event in (before, *self._stores.reading(block_ids), *self._stores.writing(rows)):
            stream.wait_event(event)
        stream.copy(self._slabs.copy_pairs(self._blocks, block_ids, rows))
        return stream.record_event()

    def _store_states(self, stores: BlockCopies) -> None:
        """Store states before the step, which may write other states into their slots."""
        block_ids = np.array(stores.block_ids)
        self._stores.add(block_ids, self._rows.of(stores.host_slots), self._streams.steps.record_event())
        for copied in self._stores.reading(block_ids):
            self._streams.steps.wait_event(copied)

    def _write_to_disk(self, writes: DiskWrites) -> None:
        """Write the content of these slots after the stores into them."""
        for host_slot, disk_slot in zip(writes.host_slots, writes.disk_slots, strict=True):
            assert self._disk is not None, "there is no disk to write to"
            row = self._rows.give_to_write(host_slot, disk_slot)
            stored = self._stores.writing(np.array([row]))
            content = self._slabs.row(row).view(-1).view(torch.uint8)
            self._disk.write(disk_slot, content.numpy().data, stored)

    def _take_disk_reports(self) -> TransferReports:
        """Return the reports of disk writes, and record the ends of disk reads in ``_loads``."""
        if self._disk is None:
            return TransferReports()
        reports = self._disk.take_reports()
        self._rows.take_back(reports)
        for load_ids, failed in ((reports.finished_loads, False), (reports.failed_loads, True)):
            for load_id in load_ids:
                self._loads[load_id].is_read = True
                self._loads[load_id].failed = failed
        return TransferReports(finished_writes=reports.finished_writes, failed_writes=reports.failed_writes)


def select_host_pool(
    device_pool: torch.Tensor,
    num_slots: int,
    disk: DiskPool | None,
    *,
    during_steps: bool,
    num_groups: int = 1,
    max_writes: int = MAX_DISK_WRITES,
) -> HostTransfers | None:
    """Return the host pool; None if no host tier is configured. ``during_steps``: steps are queued on the
    device and still run when the call returns, so copies must run concurrently."""
    if not num_slots:
        return None
    if not during_steps:
        return HostPool(device_pool, num_slots, disk, max_writes)
    streams = copy_streams_of(device_pool.device)
    return DeviceHostPool(device_pool, num_slots, streams, disk, num_groups=num_groups, max_writes=max_writes)


def _blocks_given(plan: SchedulerOutput, block_size: int, num_groups: int) -> list[int]:
    """Blocks that this plan's requests are the first to write, in this step or a later one. Blocks that
    already hold their tokens are only read."""
    given: list[int] = []
    for new in plan.scheduled_new_reqs:
        given += new.block_ids[new.num_computed_tokens // block_size * num_groups :]
    cached = plan.scheduled_cached_reqs
    for req_id, block_ids, num_computed_tokens in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        if block_ids:
            is_resumed = req_id in cached.resumed_req_ids
            start = num_computed_tokens // block_size * num_groups if is_resumed else 0
            given += block_ids[start:]
    return given
