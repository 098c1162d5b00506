"""Host memory in slabs: pinned after the first use, in any order of rows; neighbors are one copy."""

from __future__ import annotations

import logging
import threading
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.kv_tiers.copy_streams import HostCopyStreams
from engine.worker.kv_tiers.pinned_slabs import PinnedSlabs
from engine.worker.kv_tiers.store_queue import StoreQueue
from tests.worker.gpu.late_streams import LateStreams

ROW_BYTES = 8 * 4


class Pinning(HostCopyStreams):
    """Records pinned memory by its first byte."""

    def __init__(self, limit: int = 1000) -> None:
        super().__init__()
        self.pinned: list[int] = []
        self.unpinned: list[int] = []
        self.num_asked = 0
        self._limit = limit
        self._one_more = threading.Semaphore(0)

    def pin(self, memory: torch.Tensor) -> bool:
        self.num_asked += 1
        if len(self.pinned) == self._limit:
            return False
        self.pinned.append(memory.data_ptr())
        self._one_more.release()
        return True

    def unpin(self, memory: torch.Tensor) -> None:
        self.unpinned.append(memory.data_ptr())

    def wait_for(self, count: int) -> None:
        """Waits until this many more are pinned."""
        for _ in range(count):
            assert self._one_more.acquire(timeout=30)


def slabs_of(num_rows: int, streams: HostCopyStreams, rows_per_slab: int = 4) -> PinnedSlabs:
    return PinnedSlabs(num_rows, (2, 4), torch.float32, streams, slab_bytes=rows_per_slab * ROW_BYTES)


def test_nothing_is_pinned_before_a_row_is_wanted_and_then_that_row_first() -> None:
    """The others follow in order, while the caller of the first row goes on. All are unpinned at the end."""
    streams = Pinning()
    slabs = slabs_of(38, streams)
    assert not streams.pinned
    row = slabs.row(29)
    assert streams.pinned[0] == row.data_ptr() - 1 * ROW_BYTES
    streams.wait_for(10)
    starts = [slabs.row(first).data_ptr() for first in range(0, 38, 4)]
    assert streams.pinned == [starts[7], *starts[:7], *starts[8:]]
    assert not any(slabs.row(number).any() for number in range(38))
    slabs.close()
    slabs.close()
    assert sorted(streams.unpinned) == sorted(starts)


def test_the_end_does_not_wait_for_all_to_be_pinned() -> None:
    """``close`` unpins what was pinned by then."""
    streams = Pinning()
    slabs = slabs_of(4000, streams)
    slabs.row(0)
    slabs.close()
    assert sorted(streams.unpinned) == sorted(streams.pinned)


def test_memory_that_cannot_be_pinned_is_used_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    """Pinning is not tried again, and one log line says so."""
    streams = Pinning(limit=2)
    slabs = slabs_of(40, streams)
    with caplog.at_level(logging.WARNING):
        for number in range(40):
            slabs.row(number).fill_(number)
    assert [float(slabs.row(number).mean()) for number in range(40)] == list(range(40))
    assert streams.num_asked == 3
    assert len(caplog.records) == 1
    slabs.close()
    assert sorted(streams.unpinned) == sorted(streams.pinned)


@given(st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), min_size=1, max_size=20))
def test_each_block_goes_with_its_row_in_as_few_copies_as_may_be(pairs: list[tuple[int, int]]) -> None:
    """A copy continues while both block ids and rows are consecutive, within a slab."""
    block_ids, rows = np.array(pairs).T
    blocks = torch.arange(20.0)[:, None, None].expand(20, 2, 4).contiguous()
    slabs = slabs_of(20, HostCopyStreams(), rows_per_slab=7)
    for number in range(20):
        slabs.row(number).fill_(number)
    copies = list(slabs.copy_pairs(blocks, block_ids, rows))
    found = [(int(block[0, 0]), int(row[0, 0])) for part in copies for block, row in zip(*part, strict=True)]
    assert found == pairs
    goes_on = [
        (block + 1, row + 1) == following and (row + 1) % 7 > 0 for (block, row), following in pairwise(pairs)
    ]
    assert len(copies) == len(pairs) - sum(goes_on)
    slabs.close()


def test_loads_go_before_stores_but_not_before_one_that_is_waited_for() -> None:
    """During loads one portion of stores is under way at a time; a caller that needs a block or a row moves
    its stores and all earlier ones forward."""
    streams = LateStreams(iter(()))
    blocks = torch.arange(1.0, 21.0)[:, None, None].expand(20, 2, 4).contiguous()
    slabs = slabs_of(20, HostCopyStreams())
    queue = StoreQueue(blocks, slabs, streams, portion_bytes=2 * ROW_BYTES)

    def num_stored() -> int:
        streams.run_all()
        return sum(bool(slabs.row(number).any()) for number in range(20))

    everything = np.arange(20)
    queue.add(everything, everything, streams.steps.record_event())
    assert num_stored() == 0
    for expected in (2, 4):
        queue.advance(loads_first=True)
        queue.advance(loads_first=True)
        assert num_stored() == expected
    (event,) = queue.reading(np.array([9, 3]))
    assert not event.query()
    assert num_stored() == 10
    assert event.query()
    (event,) = queue.writing(np.array([12]))
    assert num_stored() == 14
    queue.advance(loads_first=False)
    assert num_stored() == 20
    queue.advance(loads_first=False)
    assert queue.reading(everything) == queue.writing(everything) == []
