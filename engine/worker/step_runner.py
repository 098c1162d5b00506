"""Who runs the steps of a plan, and a thread in which they can be run. Knows no model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.executor import FinishedOutput, PendingOutput


class StepRunner(Protocol):
    """Takes plans one after the other."""

    def launch(self, plan: SchedulerOutput) -> PendingOutput:
        """See Executor.submit."""

    def close(self) -> None:
        """End what goes on beside the steps."""


class SyncRunner(Protocol):
    """Runs a step while its caller waits."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput: ...

    def close(self) -> None: ...


class InlineRunner:
    """A StepRunner whose steps are done when they are launched."""

    def __init__(self, runner: SyncRunner) -> None:
        self._runner = runner

    def launch(self, plan: SchedulerOutput) -> PendingOutput:
        return FinishedOutput(self._runner.execute_model(plan))

    def close(self) -> None:
        self._runner.close()


class ThreadedRunner:
    """A StepRunner for a host that plans meanwhile."""

    def __init__(self, runner: SyncRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "model-steps")

    def launch(self, plan: SchedulerOutput) -> PendingOutput:
        return self._thread.submit(self._runner.execute_model, plan)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._runner.close()
