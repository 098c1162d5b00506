"""Who has waited for too long: from then on nobody who came later starts before them.

Knows nothing of jobs or memory. A request costs the same however many wait.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from engine.request import Request, RequestStatus


class WaitBound:
    """Requests in the order in which they came, each until it ends or its time is up."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._in_time: OrderedDict[str, Request] = OrderedDict()
        """Waiting or running: one that runs may be preempted, and wait again."""
        self._overdue: set[str] = set()
        """Of those that wait."""

    @property
    def is_exceeded(self) -> bool:
        """Whether anybody waits who is overdue."""
        return bool(self._overdue)

    def arrived(self, request: Request) -> None:
        self._in_time[request.request_id] = request

    def queued(self, request: Request, now: float) -> bool:
        """It waits from now on, or still does: whether it is overdue."""
        if now - request.arrival_time < self._max_wait_s:
            return False
        self._overdue.add(request.request_id)
        return True

    def is_overdue(self, request: Request) -> bool:
        """Of one that waits."""
        return request.request_id in self._overdue

    def admitted(self, request: Request) -> None:
        self._overdue.discard(request.request_id)

    def gone(self, request: Request) -> None:
        self._in_time.pop(request.request_id, None)
        self._overdue.discard(request.request_id)

    def newly_overdue(self, now: float) -> Iterator[Request]:
        """Those that wait and whose time was up since the last call."""
        while self._in_time:
            request = next(iter(self._in_time.values()))
            if now - request.arrival_time < self._max_wait_s:
                return
            del self._in_time[request.request_id]
            if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                yield request
