"""Host memory for rows of one shape, in slabs that are pinned in the background. Does not know what a row
holds.

Pinning 500 GiB takes a minute or more, and the start should not wait for it. Slabs are pinned in order,
except that a slab needed earlier is pinned next.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from engine.worker.kv_tiers.copy_streams import CopyStreams
from engine.worker.memory import untouched_zeros

logger = logging.getLogger(__name__)

IntArray = npt.NDArray[np.int64]

SLAB_BYTES = 256 * 2**20


class PinnedSlabs:
    """Zero-initialized rows. Neighbors in a slab are contiguous."""

    def __init__(
        self,
        num_rows: int,
        row_shape: Sequence[int],
        dtype: torch.dtype,
        streams: CopyStreams,
        slab_bytes: int = SLAB_BYTES,
    ) -> None:
        """Pinning starts when a row is first used, not now, as CUDA graphs are captured during the start."""
        self.num_rows = num_rows
        self._streams = streams
        row_bytes = int(np.prod(row_shape)) * dtype.itemsize
        self._rows_per_slab = max(1, slab_bytes // row_bytes)
        self._slabs = [
            untouched_zeros((min(self._rows_per_slab, num_rows - first), *row_shape), dtype)
            for first in range(0, num_rows, self._rows_per_slab)
        ]
        self._is_ready = [False] * len(self._slabs)
        """For each slab, whether it is pinned or cannot be."""
        self._pinned: list[torch.Tensor] = []
        self._wanted: deque[int] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    def row(self, row: int) -> torch.Tensor:
        """Return a row: [1, *row_shape]."""
        return self._part(row, 1)

    def copy_pairs(
        self, blocks: torch.Tensor, block_ids: IntArray, rows: IntArray
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields pairs of these blocks [num_blocks, *row_shape] and their rows, in as few pairs as possible:
        consecutive block ids with consecutive rows are one copy."""
        slabs = rows // self._rows_per_slab
        breaks = (np.diff(block_ids) != 1) | (np.diff(rows) != 1) | (np.diff(slabs) != 0)
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(rows)]
        for start, end in pairwise(bounds):
            block = int(block_ids[start])
            count = end - start
            yield blocks[block : block + count], self._part(int(rows[start]), count)

    def close(self) -> None:
        """Unpin and free the memory; call it when no copy is in flight. Repeatable."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        while self._pinned:
            self._streams.unpin(self._pinned.pop())

    def _part(self, first: int, count: int) -> torch.Tensor:
        """Return rows [count, *row_shape] of one slab, after it is pinned or pinning has failed."""
        slab, row = divmod(first, self._rows_per_slab)
        if not self._is_ready[slab]:
            self._make_ready(slab)
        return self._slabs[slab][row : row + count]

    def _make_ready(self, slab: int) -> None:
        with self._changed:
            self._wanted.append(slab)
            if self._thread is None:
                self._thread = threading.Thread(target=self._pin_all, name="kv-pin", daemon=True)
                self._thread.start()
            self._changed.wait_for(lambda: self._is_ready[slab] or self._closing)

    # ---- the thread ----

    def _pin_all(self) -> None:
        can_pin = True
        for slab in self._turns():
            can_pin = can_pin and self._pin(self._slabs[slab])
            with self._changed:
                self._is_ready[slab] = True
                self._changed.notify_all()

    def _turns(self) -> Iterator[int]:
        """Iterate over the slabs that are not ready, until none is left or the pool is closed."""
        in_order = iter(range(len(self._slabs)))
        while not self._closing:
            slab = self._wanted.popleft() if self._wanted else next(in_order, None)
            if slab is None:
                return
            if not self._is_ready[slab]:
                yield slab

    def _pin(self, slab: torch.Tensor) -> bool:
        """Pin a slab. If that fails, copies still work, but synchronously."""
        try:
            pinned = self._streams.pin(slab)
        except RuntimeError as error:
            logger.warning("Cannot pin host memory for KV offloading (%s): copies will block steps.", error)
            return False
        if pinned:
            self._pinned.append(slab)
        else:
            logger.warning("Cannot pin host memory for KV offloading: copies will block steps.")
        return pinned
