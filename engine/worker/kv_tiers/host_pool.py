"""Host memory for offloaded KV blocks, and the interface that a runner uses. Makes the copies of a plan; does
not know which request uses which block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from engine.config.engine_config import CacheConfig
from engine.core.offload.disk_tier import MAX_DISK_WRITES
from engine.core.outputs import BlockCopies, DiskWrites, KVLoad, ModelRunnerOutput, SchedulerOutput
from engine.errors import ModelLoadError
from engine.worker.attention.kv_cache import KvCacheSpec
from engine.worker.kv_tiers.copy_streams import Event
from engine.worker.kv_tiers.disk_pool import DiskPool, TransferReports
from engine.worker.kv_tiers.slot_rows import SlotRows
from engine.worker.memory import as_gib, available_bytes
from engine.worker.parallel.group import ALONE, TensorParallelGroup

HOST = torch.device("cpu")


class HostTransfers(Protocol):
    """Runs a plan's copies between device, host memory and disk. For each step, the runner calls
    ``begin_step``, queues the step's tokens, and calls ``end_step``."""

    def begin_step(self, plan: SchedulerOutput) -> None:
        """Start the plan's disk writes, store the states that it evicts, and start its loads. Work queued
        from now on may overwrite the blocks that the plan allocates."""

    def end_step(self, plan: SchedulerOutput) -> None:
        """Store the blocks that the step, which is already queued, computes."""

    def take_reports(self) -> TransferReports:
        """Return the loads and disk writes that have ended. Does not wait."""

    def before_overwriting(self, block_ids: Sequence[int]) -> Sequence[Event]:
        """The events to wait for before others write to these blocks of the device."""

    def close(self) -> None:
        """Stop background transfers. Repeatable."""


def with_reports(result: ModelRunnerOutput, reports: TransferReports) -> ModelRunnerOutput:
    """Add the reports of ended transfers to a step's result."""
    if not reports:
        return result
    return replace(
        result,
        finished_loads=reports.finished_loads,
        failed_loads=reports.failed_loads,
        finished_disk_writes=reports.finished_writes,
        failed_disk_writes=reports.failed_writes,
        released_kv_leases=reports.released_leases,
        renewed_kv_leases=reports.renewed_leases,
    )


class HostPool:
    """Slots shaped like the device's blocks. Copies to and from the device are synchronous; transfers to and
    from a disk run in the background.

    When a slot is to be written to disk, the write takes over its memory, and the slot gets other memory
    immediately.
    """

    def __init__(
        self,
        device_pool: torch.Tensor,
        num_slots: int,
        disk: DiskPool | None = None,
        max_writes: int = MAX_DISK_WRITES,
    ) -> None:
        """``device_pool``: [num_blocks, ...], block-major. ``max_writes``: concurrent writes to disk."""
        self._rows = SlotRows(num_slots, 0 if disk is None else max_writes)
        num_rows = self._rows.num_rows
        self._device = device_pool
        self._host = torch.zeros((num_rows, *device_pool.shape[1:]), dtype=device_pool.dtype, device=HOST)
        self._bytes = self._host.view(num_rows, -1).view(torch.uint8).numpy()
        self._disk = disk
        self._finished_loads: list[int] = []

    def begin_step(self, plan: SchedulerOutput) -> None:
        self._write_to_disk(plan.kv_disk_writes)
        self._store(plan.state_stores)
        for load in plan.kv_loads:
            self._load(load)

    def end_step(self, plan: SchedulerOutput) -> None:
        self._store(plan.kv_stores)

    def take_reports(self) -> TransferReports:
        reports = TransferReports() if self._disk is None else self._disk.take_reports()
        self._rows.take_back(reports)
        reports.finished_loads += self._finished_loads
        self._finished_loads.clear()
        return reports

    def before_overwriting(self, block_ids: Sequence[int]) -> Sequence[Event]:
        return ()

    def _load(self, load: KVLoad) -> None:
        """Copy from host to device, and start reading blocks from disk."""
        if len(load.copies):
            blocks = torch.tensor(load.copies.block_ids, device=self._device.device)
            rows = torch.from_numpy(self._rows.of(load.copies.host_slots))
            self._device[blocks] = self._host[rows].to(self._device.device)
        if not load.reads:
            self._finished_loads.append(load.load_id)
        else:
            assert self._disk is not None, "there is no disk to read from"
            self._disk.read(load.load_id, load.reads)

    def _write_to_disk(self, writes: DiskWrites) -> None:
        """Write the current content of these slots; the slots may be reused when the call returns."""
        for host_slot, disk_slot in zip(writes.host_slots, writes.disk_slots, strict=True):
            assert self._disk is not None, "there is no disk to write to"
            row = self._rows.give_to_write(host_slot, disk_slot)
            self._disk.write(disk_slot, self._bytes[row].data)

    def _store(self, copies: BlockCopies) -> None:
        """Copy from device to host."""
        if len(copies):
            blocks = torch.tensor(copies.block_ids, device=self._device.device)
            rows = torch.from_numpy(self._rows.of(copies.host_slots))
            self._host[rows] = self._device[blocks].to(HOST)

    def close(self) -> None:
        if self._disk is not None:
            self._disk.close()


def choose_num_host_blocks(
    cache: CacheConfig,
    spec: KvCacheSpec,
    device: torch.device,
    num_device_blocks: int,
    group: TensorParallelGroup = ALONE,
    max_writes: int = MAX_DISK_WRITES,
) -> int:
    """The number of slots of the host pool, each split among the ranks; 0 for no host tier. ModelLoadError if
    the host has too little memory. If the device is the host, the KV pool's memory is not available."""
    num_slots = cache.num_host_blocks(spec.bytes_per_block * group.size * group.stage.size)
    if num_slots and group.stage.size > 1:  # stages may have one layer more or less
        num_slots = group.smallest(num_slots)
    num_rows = num_slots + (max_writes if cache.has_disk_tier else 0)
    needed = num_rows * spec.bytes_per_block
    taken = num_device_blocks * spec.bytes_per_block if device.type == "cpu" else 0
    available = max(0, available_bytes(HOST) // group.local_size - taken)
    if needed > available:
        raise ModelLoadError(
            f"The host tier of {num_slots} KV blocks needs {as_gib(needed)} of host memory, "
            f"but only {as_gib(available)} are available."
        )
    return num_slots
