"""Reports on jobs, for metrics, the trace, and lists of jobs."""

from __future__ import annotations

from collections.abc import Sequence

from continuum.jobs.job import Job
from continuum.jobs.registry import JobRegistry
from continuum.learning.gap_learner import GapLearner
from continuum.queueing.admission import WorkingSet
from continuum.reports.job_metrics import JobMetrics
from continuum.reports.job_status import job_status, tip_status
from continuum.reports.turn_history import TurnHistory
from engine.records.capacity import Capacity
from engine.records.messages import JobStatus, PastTurn
from engine.records.reported_stats import JobStats


class JobReports:
    """Implements ``engine.core.policy.JobDirectory``."""

    def __init__(
        self,
        jobs: JobRegistry,
        working_set: WorkingSet,
        gaps: GapLearner,
        tally: JobMetrics,
        log: TurnHistory,
        block_size: int,
    ) -> None:
        self._jobs = jobs
        self._working_set = working_set
        self._gaps = gaps
        self._tally = tally
        self._log = log
        self._block_size = block_size

    def take_job_stats(self) -> JobStats:
        return self._tally.take(self._jobs.num_established, self._working_set.num_that_fit)

    def capacity(self) -> Capacity:
        return self._working_set.capacity()

    def jobs(self, limit: int, now: float, owner: str | None) -> Sequence[JobStatus]:
        return [self._status(job, now) for job in self._jobs.newest(limit, owner)]

    def job(self, job_id: str, now: float) -> JobStatus | None:
        job = self._jobs.get(job_id)
        return None if job is None else self._status(job, now)

    def past_turns(self, job_id: str, now: float) -> Sequence[PastTurn]:
        return self._log.of_job(job_id, now)

    def _status(self, job: Job, now: float) -> JobStatus:
        tips = [tip_status(tip, self._gaps.expected(tip, now), self._block_size, now) for tip in job.tips]
        return job_status(job, tips, job.kind, now)
