"""plas: the least served program goes first (Autellix, arXiv 2502.13965). No pins."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from continuum.jobs.job import Job
from engine.core.policy import Pin, PolicyContext, PolicyDescription, WaitingKey
from engine.core.request import Request
from eval.baselines.program import ProgramPolicy

PROMOTE_AT = 10.0
"""The paper's β: a program that waited this many times as long as it was served goes to the front; the paper
names no value."""


@dataclass(slots=True)
class _Service:
    """The service that a program has received."""

    served_s: float = 0.0
    waited_s: float = 0.0


class PlasPolicy(ProgramPolicy):
    """Orders by the time that the program's earlier turns ran, least first; preempts the most served.

    Against starvation a program is promoted to the front once waiting / service reaches β. Each program has
    its own priority instead of a level of a multi-level queue: a running turn is preempted only when blocks
    run out.
    """

    name = "plas"
    wants_signals = False

    def __init__(self, context: PolicyContext, promote_at: float = PROMOTE_AT) -> None:
        super().__init__(context)
        self._promote_at = promote_at
        self._services: dict[str, _Service] = {}
        self._promotions: list[tuple[float, str]] = []
        self._promoted: set[str] = set()
        self._waiting: dict[str, Request] = {}

    def describe(self) -> PolicyDescription:
        return PolicyDescription(self.name, {"promote_at": self._promote_at})

    def on_arrival(self, request: Request, now: float) -> None:
        super().on_arrival(request, now)
        self._waiting[request.request_id] = request
        service = self._service_of(request)
        patience_s = max(0.0, self._promote_at * service.served_s - service.waited_s)
        heapq.heappush(self._promotions, (request.arrival_time + patience_s, request.request_id))

    def _service_of(self, request: Request) -> _Service:
        turn = self._turns.get(request.request_id)
        return _Service() if turn is None else self._services.setdefault(turn.job.job_id, _Service())

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        promoted = request.request_id in self._promoted
        return (0.0 if promoted else self._service_of(request).served_s, self.program_arrival_s(request))

    def changed_keys(self, now: float) -> Iterable[Request]:
        """Promotes the requests that have waited too long."""
        while self._promotions and self._promotions[0][0] <= now:
            request = self._waiting.get(heapq.heappop(self._promotions)[1])
            if request is not None:
                self._promoted.add(request.request_id)
                self._changed.append(request)
        return super().changed_keys(now)

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        return max(reversed(running), key=lambda r: self.waiting_key(r, now))

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        if self._waiting.pop(request.request_id, None) is not None:
            self._service_of(request).waited_s += now - request.arrival_time
        return super().on_admitted(request, now)

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        self._count(request, now)
        return super().on_turn_end(request, now)

    def on_request_gone(self, request: Request, now: float) -> None:
        self._count(request, now)
        super().on_request_gone(request, now)

    def _count(self, request: Request, now: float) -> None:
        self._waiting.pop(request.request_id, None)
        self._promoted.discard(request.request_id)
        if request.first_scheduled_time is not None:
            self._service_of(request).served_s += now - request.first_scheduled_time

    def program_gone(self, job: Job) -> None:
        self._services.pop(job.job_id, None)
