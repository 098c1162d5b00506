"""Limits a step to ``max_loras`` adapters, and counts the adapters of running and waiting requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain

from engine.core.parts import Batch, ChunkLimit, Left, SchedulerPart
from engine.core.request import Request
from engine.core.step import Step
from engine.records.reported_stats import LoRAStats, SchedulerStats

MAX_WAIT_S = 10.0
"""Wait after which a request that was set aside is overdue."""


class AdapterSlots(ChunkLimit):
    """Limits the adapters of one step while waiting requests are admitted.

    Requests for further adapters are set aside, and later requests are tried. Once one that is set aside is
    overdue, only requests without an adapter are admitted, until running ones end and free a place.
    """

    def __init__(self, max_loras: int, batch: Batch, now: float) -> None:
        self._max_loras = max_loras
        self._batch = batch
        self._known: set[str] | None = None
        self._now = now
        self._one_is_overdue = False

    @property
    def _active(self) -> set[str]:
        """Adapters of the requests that run when the first waiting request is tried, and of those admitted
        since."""
        if self._known is None:
            at_work = chain(self._batch.running, self._batch.loads.requests)
            self._known = {request.adapter for request in at_work if request.adapter is not None}
        return self._known

    def sets_aside(self, request: Request) -> bool:
        adapter = request.adapter
        active = self._active
        if adapter is None:
            return False
        is_active = adapter in active
        if not self._one_is_overdue and (is_active or len(active) < self._max_loras):
            return False
        waited_s = self._now - request.arrival_time
        self._one_is_overdue |= not is_active and waited_s > MAX_WAIT_S
        return True

    def admitted(self, request: Request) -> None:
        if request.adapter is not None:
            self._active.add(request.adapter)


class AdapterCounts(SchedulerPart):
    """Counts open requests by adapter, so that a report need not walk the waiting queue."""

    def __init__(self, max_loras: int) -> None:
        self._max_loras = max_loras
        self._requests: Counter[str] = Counter()
        """Open requests, by the key of their adapter."""

    def arrived(self, request: Request, now: float) -> None:
        if request.adapter is not None:
            self._requests[request.adapter] += 1

    def left(self, request: Request, how: Left, now: float) -> None:
        if request.adapter is None or how is Left.PREEMPTED:
            return
        self._requests[request.adapter] -= 1
        if not self._requests[request.adapter]:
            del self._requests[request.adapter]

    def limit(self, step: Step, batch: Batch, inner: tuple[ChunkLimit, ...]) -> ChunkLimit:
        return AdapterSlots(self._max_loras, batch, step.now)

    def fill_stats(self, stats: SchedulerStats, running: Sequence[Request]) -> None:
        at_work = Counter(request.adapter for request in running if request.adapter is not None)
        waiting = [adapter for adapter, number in self._requests.items() if number > at_work[adapter]]
        stats.lora = LoRAStats(self._max_loras, sorted(at_work), sorted(waiting))
