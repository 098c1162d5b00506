"""Ends requests that another one makes useless, as its policy says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.scheduler import Scheduler
from engine.core.traced_scheduler import TracedScheduler
from engine.core_process.core_part import CorePart
from engine.records.messages import EngineCoreRequest


class UselessRequests(CorePart):
    """Asks the policy once a request is queued."""

    def __init__(
        self, scheduler: Callable[[], Scheduler | TracedScheduler], abort: Callable[[Sequence[str]], None]
    ) -> None:
        """``abort`` ends the requests of these ids."""
        self._scheduler = scheduler
        self._abort = abort

    def opened(self, message: EngineCoreRequest) -> None:
        scheduler = self._scheduler()
        useless = list(scheduler.policy.made_useless(scheduler.requests[message.request_id]))
        if useless:
            self._abort(useless)
