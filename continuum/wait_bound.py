"""Who has waited for too long: from then on nobody who came later starts before them.

Knows nothing of jobs or memory. A request costs the same however many wait.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator

from engine.request import Request, RequestStatus


class WaitBound:
    """Requests of each bound in the order in which they came, each until it ends or its time is up."""

    def __init__(self) -> None:
        self._max_wait_s: dict[str, float] = {}
        """Of each that has not gone."""
        self._in_time: defaultdict[float, OrderedDict[str, Request]] = defaultdict(OrderedDict)
        """By bound. Waiting or running: one that runs may be preempted, and wait again."""
        self._overdue: set[str] = set()
        """Of those that wait."""

    @property
    def is_exceeded(self) -> bool:
        """Whether anybody waits who is overdue."""
        return bool(self._overdue)

    def arrived(self, request: Request, max_wait_s: float) -> None:
        """There are few different bounds."""
        self._max_wait_s[request.request_id] = max_wait_s
        self._in_time[max_wait_s][request.request_id] = request

    def queued(self, request: Request, now: float) -> bool:
        """It waits from now on, or still does: whether it is overdue."""
        if now - request.arrival_time < self._max_wait_s[request.request_id]:
            return False
        self._overdue.add(request.request_id)
        return True

    def is_overdue(self, request: Request) -> bool:
        """Of one that waits."""
        return request.request_id in self._overdue

    def admitted(self, request: Request) -> None:
        self._overdue.discard(request.request_id)

    def gone(self, request: Request) -> None:
        max_wait_s = self._max_wait_s.pop(request.request_id, None)
        if max_wait_s is not None:
            self._in_time[max_wait_s].pop(request.request_id, None)
        self._overdue.discard(request.request_id)

    def newly_overdue(self, now: float) -> Iterator[Request]:
        """Those that wait and whose time was up since the last call."""
        for max_wait_s, in_time in self._in_time.items():
            while in_time:
                request = next(iter(in_time.values()))
                if now - request.arrival_time < max_wait_s:
                    break
                del in_time[request.request_id]
                if request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                    yield request
