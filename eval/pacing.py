"""When jobs are let in: by a rate, as recorded, or all at once; how many at a time; which are not counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from eval.errors import WorkloadError
from eval.workloads.job import Job


class ArrivalKind(StrEnum):
    """How jobs arrive."""

    POISSON = "poisson"
    RECORDED = "recorded"
    AT_ONCE = "at-once"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pacing:
    """When jobs start. Sub-agents start when their parent says so, whatever this says."""

    kind: ArrivalKind = ArrivalKind.AT_ONCE
    jobs_per_s: float | None = None
    """Mean rate."""
    concurrency: int | None = None
    """Most jobs at once, their sub-agents not counted; None means all."""
    warmup_jobs: int = 0
    """The first so many jobs are not counted."""
    warmup_s: float = 0.0
    """Jobs that start before this are not counted."""

    def arrivals_s(self, jobs: Sequence[Job], seed: int) -> list[float]:
        """Seconds from the start, for each job; WorkloadError where none were recorded."""
        if self.kind is ArrivalKind.RECORDED:
            recorded = [job.arrival_s for job in jobs if job.arrival_s is not None]
            if len(recorded) < len(jobs):
                raise WorkloadError("--arrivals recorded: the workload has jobs without a recorded arrival.")
            return [arrival_s - min(recorded) for arrival_s in recorded]
        if self.kind is ArrivalKind.AT_ONCE or self.jobs_per_s is None:
            return [0.0] * len(jobs)
        rng = random.Random(seed)
        times, now = [], 0.0
        for _ in jobs:
            times.append(now)
            now += rng.expovariate(self.jobs_per_s)
        return times

    def describe(self) -> str:
        """One line for the report."""
        if self.kind is ArrivalKind.RECORDED:
            return "as recorded"
        if self.kind is ArrivalKind.AT_ONCE or self.jobs_per_s is None:
            return "ASSUMED, all at the start"
        return f"ASSUMED, Poisson with {self.jobs_per_s:g} per s"
