"""The core's utility calls: statistics, jobs, reset of the prefix cache, and operators' changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from engine.clock import Clock
from engine.core.policy import JobDirectory
from engine.core.scheduler import Scheduler
from engine.core.scheduler_report import SchedulerStatistics
from engine.core.traced_scheduler import TracedScheduler
from engine.core_process.core_operations import CoreOperations
from engine.executor import Executor
from engine.records.capacity import Capacity
from engine.records.lessons import Lesson
from engine.records.messages import JobStatus, PastTurn


class CoreUtilities:
    """Thread-safe; may be called while a step is running."""

    def __init__(
        self,
        scheduler: Callable[[], Scheduler | TracedScheduler],
        clock: Clock,
        lock: threading.Condition,
        executor: Executor,
    ) -> None:
        """``lock`` is the core's: the scheduler is read and changed only under it."""
        self._scheduler = scheduler
        self._jobs: JobDirectory = scheduler().policy
        self._policy = scheduler().policy
        self._clock = clock
        self._lock = lock
        self.operations = CoreOperations(scheduler, executor, clock, lock)

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """All utilities by the name under which another process calls them."""
        utilities = (
            *(self.reset_prefix_cache, self.statistics, self.check_invariants),
            *(self.capacity, self.jobs, self.job, self.past_turns, self.reset_encoder_cache),
        )
        return {utility.__name__: utility for utility in utilities} | self.operations.by_name()

    def reset_prefix_cache(self) -> bool:
        with self._lock:
            return self._scheduler().reset_prefix_cache(self._clock.now())

    def reset_encoder_cache(self) -> None:
        with self._lock:
            self._scheduler().reset_encoder_cache(self._clock.now())

    def statistics(self) -> SchedulerStatistics:
        with self._lock:
            return self._scheduler().statistics()

    def adapters_in_use(self) -> set[str | None]:
        """The keys of the adapters of all requests that have not ended, and None."""
        with self._lock:
            return {request.adapter for request in self._scheduler().requests.values()}

    def take_lesson(self) -> Lesson | None:
        with self._lock:
            return self._policy.take_lesson()

    def capacity(self) -> Capacity | None:
        with self._lock:
            return self._jobs.capacity()

    def jobs(self, limit: int, owner: str | None = None) -> list[JobStatus]:
        with self._lock:
            return list(self._jobs.jobs(limit, self._clock.now(), owner))

    def job(self, job_id: str) -> JobStatus | None:
        with self._lock:
            return self._jobs.job(job_id, self._clock.now())

    def past_turns(self, job_id: str) -> list[PastTurn]:
        with self._lock:
            return list(self._jobs.past_turns(job_id, self._clock.now()))

    def check_invariants(self) -> None:
        with self._lock:
            self._scheduler().check_invariants()
