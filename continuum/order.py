"""The order of the waiting queue: preempted turns, then warm ones, then by the rank of the job.

A job's rank is a time, later by a multiple of the work that it is forecast to have left: of two jobs that
came together the one that is sooner done goes first, and nobody is passed for ever.

Where KV that is lost must be computed again that time is the arrival of the job's first turn: the fewer jobs
are begun, the less is lost. Where it is loaded back from host memory it is the arrival of the turn, as in
``fcfs``: jobs differ widely in length, and more end soon if none has to wait for the long ones before it.
"""

from __future__ import annotations

from continuum.jobs import Turn
from engine.policy import WaitingKey
from engine.request import Request, RequestStatus

PREEMPTED, WARM, COLD = range(3)


def job_rank(turn: Turn, remaining_s: float, work_weight: float, *, has_host_tier: bool) -> float:
    """Of the turn's job, from now on. ``remaining_s``: seconds of service that it is forecast to need."""
    since_s = turn.request.arrival_time if has_host_tier else turn.job.first_arrival_s
    return since_s + work_weight * remaining_s


def waiting_key(request: Request, turn: Turn | None) -> WaitingKey:
    """Smaller first. A request without a job is a program of one turn."""
    rank = turn.job.rank if turn is not None else request.arrival_time
    if request.status is RequestStatus.PREEMPTED:
        return (PREEMPTED, rank)
    if turn is not None and turn.warm:
        return (WARM, rank)
    return (COLD, rank)
