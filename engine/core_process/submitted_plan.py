"""A plan that the executor has."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.executor import PendingOutput


@dataclass(frozen=True, slots=True)
class SubmittedPlan:
    """A plan that was handed to the executor."""

    plan: SchedulerOutput
    pending: PendingOutput
    at: float

    def output(self) -> ModelRunnerOutput:
        """Wait for it."""
        output = self.pending.result()
        if self.plan.masks is not None:
            self.plan.masks.result()  # the executor may not have needed them
        return output
