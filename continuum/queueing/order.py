"""The order of the waiting queue: by priority, then preempted turns, then warm ones, then by the job's rank.

A job's rank is a time: the arrival of its turn, earlier by a share of the job's age, later by a multiple of
what jobs of its kind are more work than usual ones, or earlier by what they are less. Turns of jobs that
began earlier could pass a request for as long as they come back: so who has waited for too long goes before
all others, whatever their priority, in the order in which they came.

The age counts in full where evicted KV must be recomputed: the fewer jobs are begun, the less is
lost. Where it is loaded back from host memory, age counts as far as it tells who is sooner done: among jobs
of like length the older is, but where most are short and a few are long, more end soon if turns are served
as they come. And it counts where even host memory loses what the jobs begun need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from continuum.jobs.job import Turn
from continuum.learning.program_stats import Memoryfulness, RecomputedShare
from continuum.learning.work_forecast import WorkForecast
from continuum.tuning import Tuning
from engine.core.policy import WaitingKey
from engine.core.request import Request, RequestStatus

OVERDUE, IN_TIME = range(2)
PREEMPTED, WARM, COLD, PARKED = range(4)
BY_CHANCE = 0.2
"""Of what is called thrashing: so much counts nothing, as a turn may come back after an hour."""
RANKED_PER_STEP = 64
"""Waiting turns whose ranks follow what was learned: of thousands no step waits for all."""


def age_weight(lengths: Memoryfulness, recomputed_share: float, tuning: Tuning) -> float:
    """Share of a job's age that its turns are ranked earlier by, with a host tier; in [0, 1]."""
    if lengths.num_jobs >= tuning.min_ended_jobs and lengths.value > tuning.telling:
        return 1.0
    thrashing = recomputed_share / tuning.thrashing_share
    return min(1.0, max(0.0, (thrashing - BY_CHANCE) / (1 - BY_CHANCE)))


def job_rank(turn: Turn, age_weight: float, work_s: float) -> float:
    """Of the turn's job, from now on. ``work_s``: what the forecast of its work weighs."""
    first_s = turn.job.first_arrival_s
    return first_s + (1.0 - age_weight) * (turn.waits_since_s - first_s) + work_s


def waiting_key(
    request: Request, turn: Turn | None, *, is_overdue: bool = False, is_parked: bool = False
) -> WaitingKey:
    """Smaller first. A request without a job is a program of one turn."""
    if is_overdue:
        return (OVERDUE, request.arrival_time if turn is None else turn.waits_since_s)
    rank = turn.job.rank if turn is not None else request.arrival_time
    if request.status is RequestStatus.PREEMPTED:
        standing = PREEMPTED
    elif turn is not None and turn.stands_warm:
        standing = WARM
    else:
        standing = PARKED if is_parked else COLD
    return (IN_TIME, request.priority, standing, rank)


class JobRanks:
    """Ranks the jobs of turns: when they arrive, and again when more is known of what jobs are like."""

    def __init__(
        self,
        tuning: Tuning,
        forecast: WorkForecast,
        recomputed: RecomputedShare,
        work_s: Callable[[Turn], float],
        *,
        work_weight: float,
        has_host_tier: bool,
    ) -> None:
        """``work_s``: seconds of service that a turn's job is predicted to need beyond what jobs usually
        do."""
        self._tuning = tuning
        self._forecast = forecast
        self._recomputed = recomputed
        self._work_s = work_s
        self._work_weight = work_weight
        self._has_host_tier = has_host_tier
        self._again = IncrementalRerank()

    def rank(self, turn: Turn) -> None:
        turn.job.rank = job_rank(turn, self._age_weight(), self._work_weight * self._work_s(turn))

    def rank_again(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        """Those of the open turns that are due, ranked."""
        for turn in self._again.take(self._forecast.num_lessons, turns):
            self.rank(turn)
            yield turn

    def _age_weight(self) -> float:
        """How much of a job's age counts beside a turn's own arrival; all of it where lost KV is
        recomputed."""
        if not self._has_host_tier:
            return 1.0
        return age_weight(self._forecast.lengths, self._recomputed.value, self._tuning)


class IncrementalRerank:
    """Goes through the turns that wait whenever the forecast has learned, some in each step."""

    def __init__(self) -> None:
        self._num_lessons = 0
        self._turns: Iterator[Turn] = iter(())

    def take(self, num_lessons: int, turns: Iterable[Turn]) -> Iterator[Turn]:
        """Those that are due. ``turns``: all that are open, in order of arrival."""
        if num_lessons != self._num_lessons:
            self._num_lessons = num_lessons
            self._turns = iter(list(turns))
        return (turn for turn in islice(self._turns, RANKED_PER_STEP) if turn.num_cached_tokens is None)
