"""How often a process that ends may be started again."""

from __future__ import annotations

import time
from collections import deque

MAX_RESTARTS = 10
RESTART_WINDOW_S = 60.0
"""More ends than ``MAX_RESTARTS`` within the window: restarts would not help."""


class RestartLimit:
    """Counts the ends of processes."""

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque()

    def count(self) -> bool:
        """A process has ended; False if no more are to be started."""
        now = time.monotonic()
        self._ended_at.append(now)
        while self._ended_at[0] < now - RESTART_WINDOW_S:
            self._ended_at.popleft()
        return self.allows_more

    @property
    def allows_more(self) -> bool:
        """Whether another one is to be started."""
        return len(self._ended_at) <= MAX_RESTARTS

    @property
    def num_ended(self) -> int:
        """How many have ended within the window."""
        return len(self._ended_at)
