"""The order of the waiting queue: preempted turns, then warm ones, then by the rank of the job.

A job's rank is the arrival of its first turn, later by a multiple of the work that it is forecast to have
left: of two jobs that came together the one that is sooner done goes first, and nobody is passed for ever.
"""

from __future__ import annotations

from continuum.jobs import Turn
from engine.policy import WaitingKey
from engine.request import Request, RequestStatus

PREEMPTED, WARM, COLD = range(3)


def waiting_key(request: Request, turn: Turn | None) -> WaitingKey:
    """Smaller first. A request without a job is a program of one turn."""
    rank = turn.job.rank if turn is not None else request.arrival_time
    if request.status is RequestStatus.PREEMPTED:
        return (PREEMPTED, rank)
    if turn is not None and turn.warm:
        return (WARM, rank)
    return (COLD, rank)
