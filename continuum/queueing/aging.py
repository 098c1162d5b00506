"""Aging: once a request has waited for too long, none that came later starts before it.

It knows nothing of jobs or memory. A request costs O(log n), however many wait.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

from engine.core.request import Request, RequestStatus


class _Wait(NamedTuple):
    """One request that has not ended."""

    since_s: float
    max_wait_s: float
    number: int


class Aging:
    """Requests in the order in which their time is up, each until it ends or its time has come."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        self._in_time: list[tuple[float, int, Request]] = []
        """Requests that wait and that run: a running one may be preempted, and wait again. An entry
        whose number is out of date is dropped when it surfaces."""
        self._numbers = count()
        self._overdue: set[str] = set()
        """The ones that wait."""

    @property
    def is_exceeded(self) -> bool:
        """Whether any waiting request is overdue."""
        return bool(self._overdue)

    def arrived(self, request: Request, max_wait_s: float, since_s: float | None = None) -> None:
        """It waits since then: its arrival, unless another time is given. If given again, the last
        one counts."""
        since_s = request.arrival_time if since_s is None else since_s
        wait = self._waits[request.request_id] = _Wait(since_s, max_wait_s, next(self._numbers))
        heapq.heappush(self._in_time, (since_s + max_wait_s, wait.number, request))

    def since_s(self, request: Request) -> float:
        """Since when it has waited; the request has not ended."""
        return self._waits[request.request_id].since_s

    def max_wait_s(self, request: Request) -> float:
        """Its maximum wait in seconds; the request has not ended."""
        return self._waits[request.request_id].max_wait_s

    def is_exhausted(self, request: Request, now: float) -> bool:
        """Whether it is known here, and its maximum wait is over."""
        wait = self._waits.get(request.request_id)
        return wait is not None and now - wait.since_s >= wait.max_wait_s

    def queued(self, request: Request, now: float) -> bool:
        """It waits from now on, or still does. Returns whether it is overdue."""
        wait = self._waits[request.request_id]
        if now - wait.since_s < wait.max_wait_s:
            return False
        self._overdue.add(request.request_id)
        return True

    def is_overdue(self, request: Request) -> bool:
        """Whether this waiting request is overdue."""
        return request.request_id in self._overdue

    def admitted(self, request: Request) -> None:
        self._overdue.discard(request.request_id)

    def gone(self, request: Request) -> None:
        self._waits.pop(request.request_id, None)
        self._overdue.discard(request.request_id)

    def newly_overdue(self, now: float) -> Iterator[Request]:
        """Waiting requests whose time was up since the last call."""
        in_time = self._in_time
        while in_time:
            _, number, request = in_time[0]
            wait = self._waits.get(request.request_id)
            is_stale = wait is None or wait.number != number
            if wait is not None and not is_stale and now - wait.since_s < wait.max_wait_s:
                return
            heapq.heappop(in_time)
            if not is_stale and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                yield request
