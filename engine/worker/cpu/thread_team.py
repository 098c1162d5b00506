"""Chooses how many threads run a step: all, or one fewer if another process occupies a core.

The threads of a step synchronize many times. If another process, such as an API server process, keeps one off
its core, all others wait for it; without that thread they may finish sooner.
"""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_KEPT_WAITING = 0.3
"""If the first thread spends a larger share of a step than this without a core, or waiting for a thread that
has none, a team with fewer threads is tried."""
MIN_STEP_S = 0.005
"""In shorter steps, waking a thread takes so much of the time that it looks like contention."""
MIN_STEPS_BETWEEN_TRIALS = 8
MAX_STEPS_BETWEEN_TRIALS = 128
"""Steps between trials of the other number of threads; doubled after each trial in which it is slower."""
KNOWN_FOR_S = 1.0
"""Measurements are dropped this long after the last step of their size, as other processes start and end."""
WEIGHT_OF_LAST = 0.25
"""Weight of the latest measurement in the moving averages."""
LESS_THAN_CHANCE = 0.9
"""Fewer threads are chosen only if they take less than this share of the time."""


class _Timings:
    """Timings of steps of about the same size, by the full team and by the smaller one."""

    def __init__(self) -> None:
        self.last_used = 0.0
        self._waiting = 0.0
        self._smaller_is_chosen = False
        self._seconds: dict[bool, float] = {}
        """Seconds per token, by whether the team was the smaller one."""
        self._until_trial = 0
        self._between_trials = MIN_STEPS_BETWEEN_TRIALS

    def takes_smaller(self) -> bool:
        """Whether the smaller team should run the next step."""
        return self._smaller_is_chosen != (self._is_contended() and self._until_trial <= 0)

    def note(self, by_smaller: bool, seconds: float, waiting: float) -> None:
        """Record a step's seconds per token; ``waiting``: the share of the step that its first thread
        waits."""
        self._seconds[by_smaller] = _average(self._seconds.get(by_smaller), seconds)
        if not by_smaller:
            self._waiting = _average(self._waiting, waiting)
        if by_smaller == self._smaller_is_chosen:
            self._until_trial -= 1
        else:
            self._choose_team()

    def _is_contended(self) -> bool:
        return self._smaller_is_chosen or self._waiting > MAX_KEPT_WAITING

    def _choose_team(self) -> None:
        """Choose a team after a trial of the other one."""
        is_smaller_faster = self._seconds[True] < LESS_THAN_CHANCE * self._seconds[False]
        if is_smaller_faster == self._smaller_is_chosen:
            self._between_trials = min(2 * self._between_trials, MAX_STEPS_BETWEEN_TRIALS)
        else:
            self._between_trials = MIN_STEPS_BETWEEN_TRIALS
        self._smaller_is_chosen = is_smaller_faster
        self._until_trial = self._between_trials


def _average(before: float | None, last: float) -> float:
    return last if before is None else before + WEIGHT_OF_LAST * (last - before)


class ThreadTeam:
    """Runs steps with the number of threads that measures fastest."""

    def __init__(
        self,
        size: int,
        clock: Callable[[], float] = time.perf_counter,
        busy_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """``size``: threads of the full team. The clocks return seconds; ``busy_clock`` counts only time in
        which the calling thread, the first of the team, had a core."""
        self._size = size
        self._clock = clock
        self._busy_clock = busy_clock
        self._timings: dict[int, _Timings] = {}

    def compute(self, num_tokens: int, step: Callable[[int], None]) -> None:
        """Run ``step(number of threads)``; ``num_tokens``: the size of the step."""
        if self._size == 1 or not num_tokens:
            step(self._size)
            return
        began = self._clock()
        began_busy = self._busy_clock()
        pace = self._pace(num_tokens.bit_length(), began)
        by_smaller = pace.takes_smaller()
        step(self._size - by_smaller)
        pace.last_used = self._clock()
        seconds = pace.last_used - began
        busy = self._busy_clock() - began_busy
        waiting = 1 - busy / seconds if seconds >= MIN_STEP_S else 0.0
        pace.note(by_smaller, seconds / num_tokens, waiting)

    def _pace(self, size_class: int, now: float) -> _Timings:
        pace = self._timings.get(size_class)
        if pace is None or now - pace.last_used > KNOWN_FOR_S:
            pace = self._timings[size_class] = _Timings()
        return pace
