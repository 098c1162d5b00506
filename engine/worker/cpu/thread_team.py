"""How many threads compute a step: all, or one fewer where other work has the core of one of them.

The threads of a step wait for each other many times. One that is kept from its core by other work, as the
front end's, keeps all others waiting; without it they may be done sooner."""

from __future__ import annotations

import time
from collections.abc import Callable

MAX_KEPT_WAITING = 0.3
"""Of a step's time, the share in which its first thread has no core or waits for one that has none. Where it
is more it is seen whether fewer threads take less time."""
MIN_STEP_S = 0.005
"""In shorter steps to wake a thread takes a good part of the time, which looks as if it were kept from its
core."""
MIN_STEPS_BETWEEN_TRIALS, MAX_STEPS_BETWEEN_TRIALS = 8, 128
"""Trials of the other number of threads come less and less often while it is the slower one."""
KNOWN_FOR_S = 1.0
"""What was measured is of no more use so long after the last step of its size: other work comes and goes."""
WEIGHT_OF_LAST = 0.25
"""Of what is measured, in the averages of what was."""
LESS_THAN_CHANCE = 0.9
"""Fewer threads have to be faster by a tenth."""


class _Pace:
    """Of steps of about the same size: how long they take by the full team and by a smaller one."""

    def __init__(self) -> None:
        self.last_used = 0.0
        self._waiting = 0.0
        self._smaller_is_chosen = False
        self._seconds: dict[bool, float] = {}
        """Of a token, by whether the team was the smaller one."""
        self._until_trial = 0
        self._between_trials = MIN_STEPS_BETWEEN_TRIALS

    def takes_smaller(self) -> bool:
        """Whether the next step is the smaller team's."""
        return self._smaller_is_chosen != (self._is_contended() and self._until_trial <= 0)

    def note(self, by_smaller: bool, seconds: float, waiting: float) -> None:
        """A step has taken so long a token; ``waiting``: the share of it in which its first thread waited."""
        self._seconds[by_smaller] = _average(self._seconds.get(by_smaller), seconds)
        if not by_smaller:
            self._waiting = _average(self._waiting, waiting)
        if by_smaller == self._smaller_is_chosen:
            self._until_trial -= 1
        else:
            self._judge()

    def _is_contended(self) -> bool:
        return self._smaller_is_chosen or self._waiting > MAX_KEPT_WAITING

    def _judge(self) -> None:
        """The other team has been tried."""
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
    """Lets steps be computed by so many threads as take the least time, as measured."""

    def __init__(
        self,
        size: int,
        clock: Callable[[], float] = time.perf_counter,
        busy_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """``size``: of the full team; the clocks give seconds, ``busy_clock`` those in which the calling
        thread, which is the team's first, has had a core."""
        self._size = size
        self._clock = clock
        self._busy_clock = busy_clock
        self._paces: dict[int, _Pace] = {}

    def compute(self, num_tokens: int, step: Callable[[int], None]) -> None:
        """``step(number of threads)``; ``num_tokens``: its size."""
        if self._size == 1 or not num_tokens:
            step(self._size)
            return
        began, began_busy = self._clock(), self._busy_clock()
        pace = self._pace(num_tokens.bit_length(), began)
        by_smaller = pace.takes_smaller()
        step(self._size - by_smaller)
        pace.last_used = self._clock()
        seconds, busy = pace.last_used - began, self._busy_clock() - began_busy
        waiting = 1 - busy / seconds if seconds >= MIN_STEP_S else 0.0
        pace.note(by_smaller, seconds / num_tokens, waiting)

    def _pace(self, size_class: int, now: float) -> _Pace:
        pace = self._paces.get(size_class)
        if pace is None or now - pace.last_used > KNOWN_FOR_S:
            pace = self._paces[size_class] = _Pace()
        return pace
