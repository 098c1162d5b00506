"""Aging: once a request has waited for too long, no later one starts before it.

It does not know jobs or memory. A request costs O(log n), however many wait.
"""

from __future__ import annotations

import heapq
import math
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
    """Requests in the order of their deadlines, each until it ends or its deadline passes."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        self._in_time: list[tuple[float, int, Request]] = []
        """Waiting and running requests: a running one may be preempted and wait again. An entry with an
        outdated number is dropped when it surfaces."""
        self._numbers = count()
        self._overdue: set[str] = set()
        """Ids of overdue requests that wait."""

    @property
    def is_exceeded(self) -> bool:
        """Whether any waiting request is overdue."""
        return bool(self._overdue)

    def arrived(self, request: Request, max_wait_s: float, since_s: float | None = None) -> None:
        """Records that the request waits since its arrival, or since ``since_s`` if given. A later call
        replaces an earlier one."""
        since_s = request.arrival_time if since_s is None else since_s
        wait = self._waits[request.request_id] = _Wait(since_s, max_wait_s, next(self._numbers))
        if max_wait_s < math.inf:  # an entry is dropped at its deadline
            heapq.heappush(self._in_time, (since_s + max_wait_s, wait.number, request))

    def since_s(self, request: Request) -> float:
        """The time since which the request has waited; it must not have ended."""
        return self._waits[request.request_id].since_s

    def max_wait_s(self, request: Request) -> float:
        """The request's maximum wait in seconds; it must not have ended."""
        return self._waits[request.request_id].max_wait_s

    def is_exhausted(self, request: Request, now: float) -> bool:
        """Whether the request is known here, and its maximum wait is over."""
        wait = self._waits.get(request.request_id)
        return wait is not None and now - wait.since_s >= wait.max_wait_s

    def queued(self, request: Request, now: float) -> bool:
        """Records that the request waits now, and returns whether it is overdue."""
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
        """Yields the waiting requests that became overdue since the last call."""
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
