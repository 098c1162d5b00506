"""Metrics of jobs: which jobs ended since the last reading, and the error of the expected gaps."""

from __future__ import annotations

from collections import deque

from continuum.jobs.branches import BranchListener
from continuum.jobs.job import BranchTip, Job, Turn
from engine.records.reported_stats import JobEnd, JobStats

MAX_KEPT = 4096
"""Maximum number of entries kept of each kind, in case the metrics are not read."""
FINISHED = "finished"
"""The job's client announced its end, or its last turn did."""
FORGOTTEN = "forgotten"
"""The job was idle for too long, or was the longest idle one beyond the maximum number."""


class JobMetrics(BranchListener):
    """Counts each job once, when it is no longer remembered; a single-turn request without an id is not a
    job."""

    def __init__(self) -> None:
        self._ended: deque[JobEnd] = deque(maxlen=MAX_KEPT)
        self._gap_errors_s: deque[float] = deque(maxlen=MAX_KEPT)

    def on_job_gone(self, job: Job, now: float) -> None:
        if job.is_established:
            outcome = FINISHED if job.is_finished else FORGOTTEN
            duration_s = max(0.0, job.last_active_s - job.first_arrival_s)
            self._ended.append(JobEnd(outcome, duration_s, job.queued_s, job.num_turns))

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        """Compares the gap of a turn that returned with the last expectation. A repeated turn ends no gap."""
        receipt = tip.receipt
        if turn.repeats is not None or turn.gap_s is None:
            return
        if receipt is not None and receipt.expected_tool_s is not None:
            self._gap_errors_s.append(abs(turn.gap_s - receipt.expected_tool_s))

    def take(self, num_jobs: int, num_that_fit: int | None) -> JobStats:
        """Returns everything since the last call. ``num_jobs``: known jobs; ``num_that_fit``: further jobs
        that may begin."""
        stats = JobStats(num_jobs, list(self._ended), list(self._gap_errors_s), num_that_fit)
        self._ended.clear()
        self._gap_errors_s.clear()
        return stats
