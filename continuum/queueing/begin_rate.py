"""How long a new job will wait until it may begin, from how often jobs that wait began of late."""

from __future__ import annotations

MEMORY = 0.95
"""What an interval counts for after the next one."""
MIN_INTERVALS = 5
"""Nothing is predicted from fewer intervals."""


class BeginRate:
    """The time between two beginnings of jobs that had to wait. The time until the first one begins does not
    count: it is what memory took to fill up."""

    def __init__(self) -> None:
        self._num_intervals = 0
        self._weight = 0.0
        self._sum_s = 0.0
        self._since_s: float | None = None

    def wait_began(self) -> None:
        """Called when a job has to wait while no other one does."""
        self._since_s = None

    def begun(self, now: float) -> None:
        """Called when a job begins that has waited."""
        if self._since_s is not None:
            self._num_intervals += 1
            self._weight = MEMORY * self._weight + 1
            self._sum_s = MEMORY * self._sum_s + max(0.0, now - self._since_s)
        self._since_s = now

    def wait_s(self, num_before: int) -> float | None:
        """Expected seconds until a job begins before which ``num_before`` others begin; None if too little is
        known."""
        if self._num_intervals < MIN_INTERVALS:
            return None
        return (num_before + 1) * self._sum_s / self._weight
