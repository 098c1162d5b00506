"""Simulated time: a heap of things to do and a clock that jumps from one to the next. Knows no engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventHeap:
    """Runs actions in order of their time; those of one time in the order in which they were added."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_added = 0
        self._now = 0.0

    def __len__(self) -> int:
        return len(self._heap)

    @property
    def now(self) -> float:
        """Seconds since the simulation began."""
        return self._now

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something at a time, which must not lie in the past."""
        assert time_s >= self._now, "time runs forward"
        heapq.heappush(self._heap, (time_s, self._num_added, action))
        self._num_added += 1

    def stop(self) -> None:
        """Leave undone what is left."""
        self._heap.clear()

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._heap:
            self._now, _, action = heapq.heappop(self._heap)
            action()
