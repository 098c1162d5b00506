"""gittins: first the job that is likeliest to end per second of service, by jobs that have ended. No pins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from continuum.jobs.job import Job
from engine.core.policy import Pin, PolicyContext, WaitingKey
from engine.core.request import Request
from eval.baselines.gittins_index import Stage, gittins_indices
from eval.baselines.program import ProgramPolicy

REFRESH_S = 1.0
"""Least interval between computations of the indices, each of which reorders the whole queue."""


class GittinsPolicy(ProgramPolicy):
    """Orders by Gittins' index of multistage jobs (Aalto and Scully, Queueing Systems 2022), each turn a
    stage, the greatest first; ``gittins_index`` has the formula. It knows only how many turns of a job were
    served.

    Ties are ordered by the age of the program, as are all jobs until one has ended. Nothing bounds a wait.
    """

    name = "gittins"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._stages: list[Stage] = []
        self._over: dict[str, Stage] = {}
        """The last stage of each job that has ended."""
        self._indices: list[float] = []
        self._is_outdated = False
        self._refreshed_s = -REFRESH_S
        """Whether turns have ended since the indices were computed, and when that was."""
        self._waiting: dict[str, Request] = {}

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        self._waiting[request.request_id] = request
        return self._key(request)

    def _key(self, request: Request) -> tuple[float, float]:
        turn = self._turns.get(request.request_id)
        num_served = 0 if turn is None else turn.number - 1
        index = self._indices[min(num_served, len(self._indices) - 1)] if self._indices else 0.0
        return (-index, self.program_arrival_s(request))

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        return max(reversed(running), key=self._key)

    def changed_keys(self, now: float) -> Iterable[Request]:
        if self._is_outdated and now - self._refreshed_s >= REFRESH_S:
            self._is_outdated = False
            self._refreshed_s = now
            self._indices = gittins_indices(self._stages)
            self._changed.extend(self._waiting.values())
        return super().changed_keys(now)

    def on_arrival(self, request: Request, now: float) -> None:
        super().on_arrival(request, now)
        turn = self._turns.get(request.request_id)
        if turn is not None:
            self._goes_on(turn.job)

    def _goes_on(self, job: Job) -> None:
        if (stage := self._over.pop(job.job_id, None)) is not None:
            stage.num_last -= 1

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        self._waiting.pop(request.request_id, None)
        return super().on_admitted(request, now)

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        self._waiting.pop(request.request_id, None)
        turn = self._turns.get(request.request_id)
        stage = self._stage(1 if turn is None else turn.number)
        stage.num_served += 1
        if request.first_scheduled_time is not None:
            stage.served_s += now - request.first_scheduled_time
        stage.num_last += turn is None
        self._is_outdated = True
        return super().on_turn_end(request, now)

    def on_request_gone(self, request: Request, now: float) -> None:
        self._waiting.pop(request.request_id, None)
        super().on_request_gone(request, now)

    def _stage(self, number: int) -> Stage:
        while len(self._stages) < number:
            self._stages.append(Stage())
        return self._stages[number - 1]

    def program_over(self, job: Job, now: float) -> None:
        self._goes_on(job)
        num_served = job.num_turns - len(job.turns)
        if num_served:
            stage = self._over[job.job_id] = self._stage(num_served)
            stage.num_last += 1
            self._is_outdated = True

    def program_gone(self, job: Job) -> None:
        self._over.pop(job.job_id, None)
