"""Draws the pool's blocks as a map: each block's kind and owner, with several blocks per cell in large pools.

It works in two parts, so that a step waits only for the first: copying who holds which blocks, then painting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.watch.view import SHARED, BlockMap

MAX_CELLS = 2048
FIRST_JOB = SHARED + 1
MAX_JOBS = 256 - FIRST_JOB
"""The number of jobs that fit in one byte."""
SLICE_BLOCKS = 4096
"""Blocks examined at a time: another thread may run in between."""

_FREE, _CACHED, _PINNED, _RUNNING = range(4)


@dataclass(frozen=True, slots=True)
class Retention:
    """Blocks that a request or a pin held when the state was read."""

    job_id: str | None
    is_pin: bool
    blocks: list[KVCacheBlock]


class BlockPainter:
    """Paints one map of a pool."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._blocks = kv.pool.blocks
        num_blocks = len(self._blocks)
        self._kinds = np.zeros(num_blocks, np.uint8)
        self._owners = np.zeros(num_blocks, np.uint8)
        self._held = np.zeros(num_blocks, np.bool_)
        """Blocks that a pin retains, whether or not requests use them."""
        self._jobs: dict[str, int] = {}

    def paint(self, holdings: Sequence[Retention]) -> BlockMap:
        """Returns the map. Blocks in ``holdings`` count as held even if they have been released since."""
        self._paint_cached()
        for holding in sorted(holdings, key=lambda holding: not holding.is_pin):
            self._paint_holding(holding)
        return self._in_cells()

    def _paint_cached(self) -> None:
        blocks = iter(self._blocks)
        for start in range(0, len(self._blocks), SLICE_BLOCKS):
            found = [block.block_hash is not None for block in islice(blocks, SLICE_BLOCKS)]
            self._kinds[start : start + len(found)] = found  # True is _CACHED

    def _paint_holding(self, holding: Retention) -> None:
        ids = np.fromiter((block.block_id for block in holding.blocks), np.intp, len(holding.blocks))
        self._kinds[ids] = _PINNED if holding.is_pin else _RUNNING
        self._held[ids] |= holding.is_pin
        if holding.job_id is None:
            return
        owner = self._number(holding.job_id)
        before = self._owners[ids]
        self._owners[ids] = np.where((before == 0) | (before == owner), owner, SHARED)

    def _number(self, job_id: str) -> int:
        if job_id in self._jobs:
            return self._jobs[job_id]
        if len(self._jobs) == MAX_JOBS:
            return SHARED
        number = self._jobs[job_id] = FIRST_JOB + len(self._jobs)
        return number

    def _in_cells(self) -> BlockMap:
        # without the null block
        kinds = self._kinds[1:]
        owners = self._owners[1:]
        per_cell = -(-len(kinds) // MAX_CELLS)
        starts = np.arange(0, len(kinds), per_cell)
        sizes = np.diff(np.append(starts, len(kinds)))

        def share(kind: int) -> bytes:
            counts = np.add.reduceat(kinds == kind, starts, dtype=np.int64)
            return bytes((counts * 255 // sizes).astype(np.uint8))

        return BlockMap(
            num_blocks=len(kinds),
            blocks_per_cell=per_cell,
            running=share(_RUNNING),
            pinned=share(_PINNED),
            cached=share(_CACHED),
            owners=bytes(np.maximum.reduceat(owners, starts)),
            num_running=int((kinds == _RUNNING).sum()),
            num_pinned=int((kinds == _PINNED).sum()),
            num_cached=int((kinds == _CACHED).sum()),
            num_held=int(self._held.sum()),
            jobs=list(self._jobs),
        )
