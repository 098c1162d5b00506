"""Which adapters requests have: those of a step, at most ``max_loras`` at once, and all there are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from engine.core.request import Request
from engine.reported_stats import LoRAStats

MAX_SET_ASIDE = 256
"""Waiting requests that are passed over in a step because of their adapters, or of pictures."""
MAX_WAIT_S = 10.0
"""After which a request that is set aside is overdue."""


class AdapterSlots:
    """The adapters of running requests, while waiting ones are admitted.

    Requests of further adapters are set aside, and those behind them go first. Once one that is set
    aside is overdue, only requests without an adapter go first: those that run end, and make room.
    """

    def __init__(self, max_loras: int | None, running: Iterable[Request], now: float) -> None:
        """``max_loras``: None if there are no adapters."""
        self._max_loras = max_loras
        self._active: set[str] = set()
        if max_loras is not None:
            self._active = {request.adapter for request in running if request.adapter is not None}
        self._now = now
        self._one_is_overdue = False
        self._num_set_aside = 0

    @property
    def may_go_on(self) -> bool:
        """Whether to look behind a request that was set aside."""
        return self._num_set_aside < MAX_SET_ASIDE

    def sets_aside(self, request: Request, *, pictures_wait: bool = False) -> bool:
        """Whether the request may not be admitted now: because of its adapter, or since a picture before it
        waits for the encoder (``pictures_wait``). Those without take nothing that the picture waits for."""
        if pictures_wait and request.media:
            self._num_set_aside += 1
            return True
        if self._max_loras is None or (adapter := request.adapter) is None:
            return False
        is_active = adapter in self._active
        if not self._one_is_overdue and (is_active or len(self._active) < self._max_loras):
            return False
        waited_s = self._now - request.arrival_time
        self._one_is_overdue |= not is_active and waited_s > MAX_WAIT_S
        self._num_set_aside += 1
        return True

    def admitted(self, request: Request) -> None:
        if request.adapter is not None:
            self._active.add(request.adapter)


class AdapterCounts:
    """Which adapters the requests have that run, and those that wait.

    Counted as they come and go, so that a report costs nothing for those that wait.
    """

    def __init__(self, max_loras: int | None) -> None:
        """``max_loras``: None if there are no adapters."""
        self._max_loras = max_loras
        self._requests: Counter[str] = Counter()
        """Requests by the key of their adapter."""

    def arrived(self, request: Request) -> None:
        if request.adapter is not None:
            self._requests[request.adapter] += 1

    def gone(self, request: Request) -> None:
        if request.adapter is None:
            return
        self._requests[request.adapter] -= 1
        if not self._requests[request.adapter]:
            del self._requests[request.adapter]

    def stats(self, running: Iterable[Request]) -> LoRAStats | None:
        """None if there are no adapters."""
        if self._max_loras is None:
            return None
        at_work = Counter(request.adapter for request in running if request.adapter is not None)
        waiting = [adapter for adapter, number in self._requests.items() if number > at_work[adapter]]
        return LoRAStats(self._max_loras, sorted(at_work), sorted(waiting))
