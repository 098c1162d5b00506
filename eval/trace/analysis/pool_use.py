"""The use of the KV pool and the length of the queue, over a whole trace. Knows nothing of jobs."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from eval.trace.analysis.distribution import Level
from eval.trace.analysis.pool import PoolState, StepLife, stretches


class PoolShares(msgspec.Struct, frozen=True, kw_only=True):
    """Mean shares of the KV pool's blocks over time, by use."""

    running: float
    pinned: float
    """Pinned blocks, including those that a turn uses meanwhile."""
    cached: float | None
    """Free blocks that are cached; None: the trace does not distinguish them from empty ones."""
    free: float
    """Free blocks that are empty; both kinds of free, if cached is None."""
    most_pinned: float

    @property
    def in_use(self) -> float:
        """Running or pinned."""
        return self.running + self.pinned


class PoolUse:
    """Takes steps in order; memory does not grow with them."""

    def __init__(self) -> None:
        self._before: StepLife | None = None
        self._waiting: defaultdict[int, float] = defaultdict(float)
        self._running: defaultdict[int, float] = defaultdict(float)
        """Seconds, by number of requests."""
        self._block_s = [0.0] * 4
        """Blocks times seconds: running, pinned, cached, free."""
        self._most_pinned = 0
        self._total_blocks = 0
        self._tells_cached = True

    def add(self, step: StepLife) -> None:
        if self._before is not None:
            self._take(self._before, step)
        self._before = step
        self._total_blocks = max(self._total_blocks, step.total_blocks)
        self._tells_cached &= step.empty_blocks is not None
        self._most_pinned = max(self._most_pinned, step.state.pinned)

    def close(self) -> None:
        """Called after the last step."""
        if self._before is not None:
            self._take(self._before, None)
        self._before = None

    def _take(self, step: StepLife, following: StepLife | None) -> None:
        for state, from_s, until_s in stretches(step, following):
            if until_s > from_s:
                self._lasted(state, until_s - from_s)

    def _lasted(self, state: PoolState, seconds: float) -> None:
        self._waiting[state.num_waiting] += seconds
        self._running[state.num_running] += seconds
        for place, blocks in enumerate((state.running, state.pinned, state.cached, state.free)):
            self._block_s[place] += blocks * seconds

    @property
    def waiting(self) -> Level | None:
        """Requests in the queue; None without any time."""
        return Level.of(self._waiting)

    @property
    def running(self) -> Level | None:
        return Level.of(self._running)

    @property
    def shares(self) -> PoolShares | None:
        """Returns None without any time or without a pool."""
        whole = sum(self._block_s)
        if not whole:
            return None
        running, pinned, cached, free = (block_s / whole for block_s in self._block_s)
        return PoolShares(
            running=running,
            pinned=pinned,
            cached=cached if self._tells_cached else None,
            free=free if self._tells_cached else cached + free,
            most_pinned=self._most_pinned / self._total_blocks,
        )
