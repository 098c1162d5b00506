"""Maps each slot of a host pool to its row of host memory. Knows only numbers of rows and slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.worker.kv_tiers.disk_pool import TransferReports


class SlotRows:
    """The row of each slot. When a slot is to be written to disk, the write takes over its row, and the slot
    gets a spare one immediately. The old row becomes spare when the write has ended."""

    def __init__(self, num_slots: int, max_writes: int) -> None:
        """``max_writes``: concurrent writes to disk, each of which takes a row; 0 without a disk."""
        self.num_rows = num_slots + max_writes
        self._rows: NDArray[np.int64] = np.arange(num_slots)
        self._spare = list(range(num_slots, self.num_rows))
        self._being_written: dict[int, int] = {}
        """Rows that are being written, by disk slot."""

    def of(self, host_slots: Sequence[int]) -> NDArray[np.int64]:
        return self._rows.take(host_slots)

    def give_to_write(self, host_slot: int, disk_slot: int) -> int:
        """Hand the slot's row over to a disk write, give the slot a spare row, and return the old one."""
        row = int(self._rows[host_slot])
        self._rows[host_slot] = self._spare.pop()
        self._being_written[disk_slot] = row
        return row

    def take_back(self, reports: TransferReports) -> None:
        """Reclaim the rows of writes that have ended, successfully or not."""
        for disk_slots in (reports.finished_writes, reports.failed_writes):
            self._spare += [self._being_written.pop(slot) for slot in disk_slots]
