"""The order of the waiting queue: preempted turns, then warm ones, then by the age of the program."""

from __future__ import annotations

from continuum.jobs import Turn
from engine.policy import WaitingKey
from engine.request import Request, RequestStatus

PREEMPTED, WARM, COLD = range(3)


def waiting_key(request: Request, turn: Turn | None) -> WaitingKey:
    """Smaller first. A request without a job is a program of one turn."""
    arrival_s = turn.job.first_arrival_s if turn is not None else request.arrival_time
    if request.status is RequestStatus.PREEMPTED:
        return (PREEMPTED, arrival_s)
    if turn is not None and turn.warm:
        return (WARM, arrival_s)
    return (COLD, arrival_s)
