"""Copies from the device to host memory, in order, with their dependencies. Does not know why a block is
stored, nor which request needs it next."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np
import torch

from engine.worker.kv_tiers.copy_streams import CopyStreams, Event
from engine.worker.kv_tiers.pinned_slabs import IntArray, PinnedSlabs

PORTION_BYTES = 32 * 2**20
"""Bytes copied per event: 0.7 ms at 48 GB/s."""


@dataclass(slots=True)
class _Portion:
    """A part of a step's stores, with one event."""

    block_ids: IntArray
    rows: IntArray
    computed: Event
    """The event after the step that fills these blocks."""
    copied: Event | None = None
    """The event after the copy; None if it is not on the stream yet."""


class StoreQueue:
    """A FIFO queue of stores: the event of a store comes after all stores before it.

    Others wait for a store only before they overwrite its block or read its row, so loads go first: while
    there are any, only one portion at a time is on the device's stream. A portion that another operation
    needs is submitted immediately, after those before it.
    """

    def __init__(
        self,
        blocks: torch.Tensor,
        slabs: PinnedSlabs,
        streams: CopyStreams,
        portion_bytes: int = PORTION_BYTES,
    ) -> None:
        """``blocks``: [num_blocks, ...], the device's pool."""
        self._blocks = blocks
        self._slabs = slabs
        self._streams = streams
        self._portion_blocks = max(1, portion_bytes // blocks[0].nbytes)
        self._portions: deque[_Portion] = deque()
        """Portions that may be incomplete, oldest first; the submitted ones come first."""
        self._num_submitted = 0
        """The number of ``_portions`` that are on the stream."""
        self._num_done = 0
        """The number of completed portions, which is the number of the first of ``_portions``."""
        self._readers = np.full(len(blocks), -1)
        self._writers = np.full(slabs.num_rows, -1)
        """``_readers``: the number of the last portion that reads each block; ``_writers``: that writes each
        row."""

    def add(self, block_ids: IntArray, rows: IntArray, computed: Event) -> None:
        """Queue copies of these blocks to these rows, to run after ``computed``."""
        for start in range(0, len(block_ids), self._portion_blocks):
            part = slice(start, start + self._portion_blocks)
            number = self._num_done + len(self._portions)
            self._readers[block_ids[part]] = number
            self._writers[rows[part]] = number
            self._portions.append(_Portion(block_ids[part], rows[part], computed))

    def advance(self, *, loads_first: bool) -> None:
        """Drop completed portions, and submit one more, or all."""
        while self._num_submitted and _is_done(self._portions[0]):
            self._portions.popleft()
            self._num_submitted -= 1
            self._num_done += 1
        if self._portions:
            self._submit(1 if loads_first else len(self._portions))

    def reading(self, block_ids: IntArray) -> list[Event]:
        """The events to wait for before these blocks are overwritten."""
        return self._last(self._readers[block_ids])

    def writing(self, rows: IntArray) -> list[Event]:
        """The events to wait for before these rows are read."""
        return self._last(self._writers[rows])

    def _last(self, numbers: IntArray) -> list[Event]:
        """The event of the last of these portions, which this submits; none if all are complete."""
        if not self._portions or not len(numbers):
            return []
        index = int(numbers.max()) - self._num_done
        if index < 0:
            return []
        self._submit(index + 1)
        copied = self._portions[index].copied
        assert copied is not None, "it was submitted"
        return [copied]

    def _submit(self, count: int) -> None:
        """Submit until at least ``count`` portions are on the stream."""
        stream = self._streams.stores
        while self._num_submitted < count:
            portion = self._portions[self._num_submitted]
            stream.wait_event(portion.computed)
            pairs = self._slabs.copy_pairs(self._blocks, portion.block_ids, portion.rows)
            stream.copy((row, block) for block, row in pairs)
            portion.copied = stream.record_event()
            self._num_submitted += 1


def _is_done(portion: _Portion) -> bool:
    return portion.copied is not None and portion.copied.query()
