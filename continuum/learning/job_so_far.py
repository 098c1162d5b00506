"""What learned models know about one job, and their last predictions of its remaining work."""

from __future__ import annotations

from typing import NamedTuple

from estimator.learned.call_history import CallHistory
from estimator.learned.job_history import JobHistory
from estimator.learned.work_model import WorkModel


class Forecast(NamedTuple):
    """A prediction made when a turn arrived."""

    model: WorkModel
    predicted: float
    """Logarithm of the remaining work."""
    num_turns: int
    """Number of turns of the job before that one."""
    work_before: float


class JobSoFar:
    """A job's turns, and the last prediction of its remaining work."""

    __slots__ = ("calls", "excess", "forecasts", "history", "model", "request_id")

    def __init__(self) -> None:
        self.history = JobHistory()
        self.calls: CallHistory | None = None
        """None until a call is predicted or collected."""
        self.forecasts: list[Forecast] = []
        """Made at turns 1, 2, 4, 8 and so on: few, however long a job is."""
        self.model: WorkModel | None = None
        """The model that last predicted its remaining work."""
        self.request_id = ""
        """The request for which it predicted that."""
        self.excess = 0.0
        """Predicted remaining work beyond the usual, in generated tokens."""
