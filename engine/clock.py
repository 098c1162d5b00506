"""Sources of time. Only the outermost loop reads a clock; everything inside gets the time as an argument."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that never run backwards and are comparable between processes of one machine."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's monotonic clock: immune to wall-clock jumps."""

    def now(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only on request: for tests, the simulator and the replay of a trace."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now = start_s

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"a clock cannot go back by {-seconds} s")
        self._now += seconds
