"""Simulated time: a heap of actions and a clock that jumps from one to the next. Knows no engine."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class EventHeap:
    """Runs actions in order of time; those at the same time in the order in which they were added."""

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
        """Schedules an action at a time, which must not be in the past."""
        assert time_s >= self._now, "time runs forward"
        heapq.heappush(self._heap, (time_s, self._num_added, action))
        self._num_added += 1

    def stop(self) -> None:
        """Drops all remaining actions."""
        self._heap.clear()

    def run(self) -> None:
        """Runs until no action remains."""
        while self._heap:
            self._now, _, action = heapq.heappop(self._heap)
            action()
