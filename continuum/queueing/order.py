"""The order of the waiting queue: by priority, then preempted turns, then warm ones, then by the job's rank.

A job's rank is a time: the arrival of its turn, minus a share of the job's age, plus a weight times the work
by which jobs of its kind exceed usual jobs (negative if they are less work). A job that another one waits
for is as old as that. Turns of jobs that began earlier
could keep passing a request. So requests that have waited for too long go before all others, whatever the
priority, in the order of their arrival.

The age counts in full where evicted KV must be recomputed: the fewer jobs have begun, the less is lost. Where
KV is loaded back from host memory, age counts only if it predicts which job ends sooner: among jobs of
similar length the older one does, but where most are short and a few are long, more jobs end soon if turns
are served in order of arrival. Age also counts where even host memory loses KV that the begun jobs need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from continuum.jobs.job import Turn
from continuum.learning.learners import Learners
from continuum.learning.program_stats import Memoryfulness
from continuum.tuning import Tuning
from engine.core.policy import WaitingKey
from engine.core.request import Request, RequestStatus

OVERDUE, IN_TIME = range(2)
PREEMPTED, WARM, COLD, PARKED = range(4)
BY_CHANCE = 0.2
"""A recomputed share below this part of the thrashing share is ignored, as a turn may return after an
hour."""
RANKED_PER_STEP = 64
"""Maximum number of waiting turns that are ranked again in one step, so that no step ranks thousands."""


def age_weight(lengths: Memoryfulness, recomputed_share: float, tuning: Tuning) -> float:
    """Share of a job's age by which its turns are ranked earlier, with a host tier; in [0, 1]."""
    if lengths.num_jobs >= tuning.min_ended_jobs and lengths.value > tuning.min_memoryfulness:
        return 1.0
    thrashing = recomputed_share / tuning.thrashing_share
    return min(1.0, max(0.0, (thrashing - BY_CHANCE) / (1 - BY_CHANCE)))


def job_rank(turn: Turn, age_weight: float, work_s: float) -> float:
    """Returns the new rank of the turn's job. ``work_s`` is the weighted forecast of its work in seconds."""
    first_s = turn.job.begun_s
    return first_s + (1.0 - age_weight) * (turn.waits_since_s - first_s) + work_s


def waiting_key(
    request: Request,
    turn: Turn | None,
    *,
    is_overdue: bool = False,
    is_parked: bool = False,
    stands_warm: bool = False,
) -> WaitingKey:
    """Returns the sort key, smaller first. A request without a job counts as a job of one turn."""
    if is_overdue:
        return (OVERDUE, request.arrival_time if turn is None else turn.waits_since_s)
    rank = turn.job.rank if turn is not None else request.arrival_time
    if request.status is RequestStatus.PREEMPTED:
        standing = PREEMPTED
    elif stands_warm or (turn is not None and turn.stands_warm):
        standing = WARM
    else:
        standing = PARKED if is_parked else COLD
    return (IN_TIME, request.priority, standing, rank)


class JobRanks:
    """Ranks the jobs of turns when the turns arrive, and again when the forecasts change."""

    def __init__(
        self,
        tuning: Tuning,
        learners: Learners,
        work_s: Callable[[Turn], float],
        *,
        work_weight: float,
        has_host_tier: bool,
    ) -> None:
        """``work_s`` gives the seconds of service that a turn's job is predicted to need beyond
        usual jobs."""
        self._tuning = tuning
        self._work = learners.work
        self._recomputed = learners.recomputed_share
        self._work_s = work_s
        self._work_weight = work_weight
        self._has_host_tier = has_host_tier
        self._again = IncrementalRerank()

    def rank(self, turn: Turn) -> None:
        turn.job.rank = job_rank(turn, self._age_weight(), self._work_weight * self._work_s(turn))

    def rank_again(self, turns: Iterable[Turn]) -> Iterator[Turn]:
        """Ranks those open turns again that are due, and yields them."""
        for turn in self._again.take(self._work.num_lessons, turns):
            self.rank(turn)
            yield turn

    def _age_weight(self) -> float:
        """Share of a job's age by which its turns are ranked earlier; 1 if evicted KV is recomputed."""
        if not self._has_host_tier:
            return 1.0
        return age_weight(self._work.forecast.lengths, self._recomputed.value, self._tuning)


class IncrementalRerank:
    """Iterates over the waiting turns whenever the forecast has learned, some in each step."""

    def __init__(self) -> None:
        self._num_lessons = 0
        self._turns: Iterator[Turn] = iter(())

    def take(self, num_lessons: int, turns: Iterable[Turn]) -> Iterator[Turn]:
        """The turns that are due. ``turns`` are all open ones, in order of arrival."""
        if num_lessons != self._num_lessons:
            self._num_lessons = num_lessons
            self._turns = iter(list(turns))
        return (turn for turn in islice(self._turns, RANKED_PER_STEP) if turn.num_cached_tokens is None)
