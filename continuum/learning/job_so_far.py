"""What learned models see of one job, and what that of remaining work said."""

from __future__ import annotations

from typing import NamedTuple

from estimator.learned.call_history import CallHistory
from estimator.learned.job_history import JobHistory
from estimator.learned.work_model import WorkModel


class Forecast(NamedTuple):
    """What was predicted when a turn arrived."""

    model: WorkModel
    predicted: float
    """Logarithm of the remaining work."""
    num_turns: int
    """Turns of the job before that one."""
    work_before: float


class JobSoFar:
    """A job's turns, and the last prediction of what is left of it."""

    __slots__ = ("calls", "excess", "forecasts", "history", "model", "request_id")

    def __init__(self) -> None:
        self.history = JobHistory()
        self.calls: CallHistory | None = None
        """None until a call is predicted or collected."""
        self.forecasts: list[Forecast] = []
        """At turns 1, 2, 4, 8 and so on: few, however long a job is."""
        self.model: WorkModel | None = None
        """Model that last predicted its remaining work."""
        self.request_id = ""
        """Request for which it did."""
        self.excess = 0.0
        """Remaining work beyond the usual as of then, in generated tokens."""
