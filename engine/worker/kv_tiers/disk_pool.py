"""A file of KV blocks on disk, read and written by its own threads. Does not know which request uses which
block.

The file has no name, so the system deletes it however the process ends. Only this object holds the index, so
nothing survives a restart.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from engine.core.outputs import DiskReads
from engine.worker.kv_tiers.copy_streams import Event

logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""Number of threads: one at a time may write, the others serve reads."""
PROBE_BYTES = 64 * 2**20
MAX_PROBE_BLOCKS = 32


@dataclass(slots=True)
class TransferReports:
    """The transfers that ended since the last call, each reported once: ids of loads, and slots of writes."""

    finished_loads: list[int] = field(default_factory=list)
    failed_loads: list[int] = field(default_factory=list)
    finished_writes: list[int] = field(default_factory=list)
    failed_writes: list[int] = field(default_factory=list)
    released_leases: list[str] = field(default_factory=list)
    renewed_leases: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        loads = self.finished_loads or self.failed_loads
        writes = self.finished_writes or self.failed_writes
        return bool(loads or writes or self.released_leases or self.renewed_leases)


@dataclass(slots=True)
class _Load:
    """A load whose blocks are not all read yet."""

    num_left: int
    after: Sequence[Event]
    """Events to wait for: the end of device work that still reads or writes these blocks."""
    failed: bool = False


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """Measured seconds per block: for a single block, and for each of many."""

    first_s: float
    block_s: float


class KvDisk(Protocol):
    """The disk tier: slots for blocks evicted from host memory."""

    def read(self, load_id: int, reads: DiskReads, after: Sequence[Event] = ()) -> None:
        """Read into blocks of the device after these events."""

    def write(self, slot: int, content: memoryview, after: Sequence[Event] = ()) -> None:
        """Write a block's bytes, after all pending reads. They are valid after these events, and must not
        change until the write is reported."""

    def take_reports(self) -> TransferReports: ...

    def close(self) -> None:
        """Cancel pending transfers and drop all content. Repeatable."""


class DiskPool:
    """A KvDisk in a file. The caller must not read or write a slot that is being written, nor write one that
    is being read. No call waits for the disk."""

    def __init__(self, folder: Path, device_pool: torch.Tensor) -> None:
        """``device_pool``: [num_blocks, ...], block-major. Raises OSError if no file can be created in
        ``folder``."""
        self._device = device_pool
        self._block_bytes = device_pool[0].numel() * device_pool.element_size()
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._checksums: dict[int, int] = {}
        """Checksums by slot, for slots that were written."""
        self._loads: dict[int, _Load] = {}
        self._reads: deque[tuple[int, int, int]] = deque()
        """Pending reads: load id, block id, slot."""
        self._writes: deque[tuple[int, memoryview, Sequence[Event]]] = deque()
        self._writing = False
        self._reports = TransferReports()
        self._has_logged_failure = False
        self._changed = threading.Condition()
        self._closing = False
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(_Lane(device_pool, self._block_bytes),),
                name=f"kv-disk-{number}",
                daemon=True,
            )
            for number in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    # ---- called by the worker ----

    def read(self, load_id: int, reads: DiskReads, after: Sequence[Event] = ()) -> None:
        with self._changed:
            self._loads[load_id] = _Load(len(reads), after)
            self._reads.extend(
                (load_id, block_id, slot)
                for block_id, slot in zip(reads.block_ids, reads.disk_slots, strict=True)
            )
            self._changed.notify_all()

    def write(self, slot: int, content: memoryview, after: Sequence[Event] = ()) -> None:
        with self._changed:
            self._writes.append((slot, content, after))
            self._changed.notify()

    def take_reports(self) -> TransferReports:
        with self._changed:
            reports = self._reports
            self._reports = TransferReports()
        return reports

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._file.close()

    # ---- the threads ----

    def _work(self, lane: _Lane) -> None:
        while (job := self._next_job()) is not None:
            job(lane)

    def _next_job(self) -> Callable[[_Lane], None] | None:
        """Return the next transfer, reads first because a request waits for each; None when closed."""
        with self._changed:
            while not self._closing:
                if self._reads:
                    load_id, block_id, slot = self._reads.popleft()
                    return lambda lane: self._read_block(lane, load_id, block_id, slot)
                if self._writes and not self._writing:
                    self._writing = True
                    slot, content, after = self._writes.popleft()
                    return lambda lane: self._write_block(slot, content, after)
                self._changed.wait()
        return None

    def _read_block(self, lane: _Lane, load_id: int, block_id: int, slot: int) -> None:
        load = self._loads[load_id]
        worked = not load.failed and self._attempt(
            "read", lambda: self._fetch(lane, block_id, slot, load.after)
        )
        with self._changed:
            load.num_left -= 1
            load.failed |= not worked
            if not load.num_left:
                del self._loads[load_id]
                reports = self._reports
                (reports.failed_loads if load.failed else reports.finished_loads).append(load_id)
                self._changed.notify_all()

    def _fetch(self, lane: _Lane, block_id: int, slot: int, after: Sequence[Event]) -> None:
        num_read = os.preadv(self._file.fileno(), [lane.buffer], slot * self._block_bytes)
        if num_read != self._block_bytes:
            raise OSError(f"only {num_read} of {self._block_bytes} bytes could be read")
        if zlib.crc32(lane.buffer) != self._checksums[slot]:
            raise OSError("the content differs from what was written")
        _wait_for(after)
        lane.copy_to(block_id)

    def _write_block(self, slot: int, content: memoryview, after: Sequence[Event]) -> None:
        worked = self._attempt("write", lambda: self._keep(slot, content, after))
        with self._changed:
            self._writing = False
            (self._reports.finished_writes if worked else self._reports.failed_writes).append(slot)
            self._changed.notify()

    def _keep(self, slot: int, content: memoryview, after: Sequence[Event] = ()) -> None:
        _wait_for(after)
        num_written = os.pwrite(self._file.fileno(), content, slot * self._block_bytes)
        if num_written != self._block_bytes:
            raise OSError(f"only {num_written} of {self._block_bytes} bytes could be written")
        self._checksums[slot] = zlib.crc32(content)

    def _attempt(self, what: str, transfer: Callable[[], None]) -> bool:
        """Run a transfer and return whether it succeeded. A failure only costs recomputing, so only the first
        one is logged."""
        try:
            transfer()
        except Exception as error:
            if not self._has_logged_failure:
                self._has_logged_failure = True
                logger.warning(
                    "KV blocks could not be %s disk (%s): recomputing; see continuum:disk_kv_* in /metrics.",
                    "read from" if what == "read" else "written to",
                    error,
                )
            return False
        return True

    # ---- at the start ----

    def measure(self, num_slots: int) -> ReadSpeed | None:
        """Measure how fast blocks that are not in the page cache are read to the device; None if no block can
        be written. Call it before any other read or write, and before the device pool is used."""
        num_blocks = min(
            num_slots, MAX_PROBE_BLOCKS, len(self._device) - 1, max(1, PROBE_BYTES // self._block_bytes)
        )
        content = np.random.default_rng(0).integers(0, 256, self._block_bytes, dtype=np.uint8).data
        for slot in range(num_blocks):
            if not self._attempt("write", lambda slot=slot: self._keep(slot, content)):  # type: ignore[misc]
                num_blocks = slot
                break
        if not num_blocks:
            return None
        self._timed_read(1)  # starts all threads
        first_s = self._timed_read(1)
        all_s = self._timed_read(num_blocks)
        self._device[1 : num_blocks + 1] = 0
        return ReadSpeed(first_s, all_s / num_blocks)

    def _timed_read(self, num_blocks: int) -> float:
        self._drop_page_cache()
        started_s = time.perf_counter()
        self.read(0, DiskReads(range(1, num_blocks + 1), range(num_blocks)))
        with self._changed:
            self._changed.wait_for(lambda: self._reports.finished_loads or self._reports.failed_loads)
        if self.take_reports().failed_loads:
            raise OSError("what was just written there cannot be read")
        return time.perf_counter() - started_s

    def _drop_page_cache(self) -> None:
        """Drop the file from the system's page cache if possible: a cached read does not measure the disk."""
        with suppress(OSError, AttributeError):
            os.fdatasync(self._file.fileno())
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _wait_for(events: Sequence[Event]) -> None:
    for event in events:
        event.synchronize()


class _Lane:
    """A thread's path from disk to device: a buffer and, on an accelerator, a stream."""

    def __init__(self, device_pool: torch.Tensor, block_bytes: int) -> None:
        self._device = device_pool
        on_cuda = device_pool.device.type == "cuda"
        staging = torch.empty(block_bytes, dtype=torch.uint8, pin_memory=on_cuda)
        self.buffer: memoryview = staging.numpy().data
        self._block = staging.view(device_pool.dtype).view(device_pool.shape[1:])
        self._stream = torch.cuda.Stream(device_pool.device) if on_cuda else None  # type: ignore[no-untyped-call]

    def copy_to(self, block_id: int) -> None:
        """Copy the buffer to a block of the device; returns when the copy is complete."""
        if self._stream is None:
            self._device[block_id].copy_(self._block)
            return
        with torch.cuda.stream(self._stream):
            self._device[block_id].copy_(self._block, non_blocking=True)
        self._stream.synchronize()
