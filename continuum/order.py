"""The order of the waiting queue: preempted turns, then warm ones, then by the rank of the job.

A job's rank is a time: the arrival of its turn, earlier by a share of the job's age, later by a multiple of
the work that it is forecast to have left. Turns of jobs that began earlier could pass a request for as long
as they come back: so who has waited for too long goes before all others, in the order in which they came.

The age counts in full where KV that is lost must be computed again: the fewer jobs are begun, the less is
lost. Where it is loaded back from host memory, age counts as far as it tells who is sooner done: among jobs
of like length the older is, but where most are short and a few are long, more end soon if turns are served
as they come. And it counts where even host memory loses what the jobs begun need.
"""

from __future__ import annotations

from continuum.jobs import Turn
from continuum.tuning import Tuning
from engine.policy import WaitingKey
from engine.request import Request, RequestStatus

OVERDUE, PREEMPTED, WARM, COLD, PARKED = range(5)


def age_weight(memoryfulness: float, recomputed_share: float, tuning: Tuning) -> float:
    """Share of a job's age that its turns are ranked earlier by, with a host tier; in [0, 1]."""
    if memoryfulness > tuning.telling:
        return 1.0
    return min(1.0, recomputed_share / tuning.thrashing_share)


def job_rank(turn: Turn, age_weight: float, work_s: float) -> float:
    """Of the turn's job, from now on. ``work_s``: what the forecast of its remaining work weighs."""
    first_s = turn.job.first_arrival_s
    return first_s + (1.0 - age_weight) * (turn.request.arrival_time - first_s) + work_s


def waiting_key(
    request: Request, turn: Turn | None, *, is_overdue: bool = False, is_parked: bool = False
) -> WaitingKey:
    """Smaller first. A request without a job is a program of one turn."""
    if is_overdue:
        return (OVERDUE, request.arrival_time)
    rank = turn.job.rank if turn is not None else request.arrival_time
    if request.status is RequestStatus.PREEMPTED:
        return (PREEMPTED, rank)
    if turn is not None and turn.warm:
        return (WARM, rank)
    return (PARKED if is_parked else COLD, rank)
