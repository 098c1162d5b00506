"""Limits how often a process that has ended is started again."""

from __future__ import annotations

import time
from collections import deque

MAX_RESTARTS = 10
RESTART_WINDOW_S = 60.0
"""If more than ``MAX_RESTARTS`` processes end within this window, restarts do not help."""


class RestartLimit:
    """Counts processes that have ended."""

    def __init__(self) -> None:
        self._ended_at: deque[float] = deque()

    def count(self) -> bool:
        """Counts an ended process; returns False if no other may be started."""
        now = time.monotonic()
        self._ended_at.append(now)
        while self._ended_at[0] < now - RESTART_WINDOW_S:
            self._ended_at.popleft()
        return self.allows_more

    @property
    def allows_more(self) -> bool:
        """Whether another process may be started."""
        return len(self._ended_at) <= MAX_RESTARTS

    @property
    def num_ended(self) -> int:
        """How many processes have ended within the window before the last end."""
        return len(self._ended_at)
