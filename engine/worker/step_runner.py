"""Protocols for running step plans, inline or on a thread. Knows no model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.executor import FinishedOutput, PendingOutput


class StepRunner(Protocol):
    """Runs step plans in order."""

    def launch(self, plan: SchedulerOutput) -> PendingOutput:
        """See ``Executor.submit``."""

    def close(self) -> None:
        """Stop background transfers."""


class SyncRunner(Protocol):
    """Runs a step synchronously."""

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput: ...

    def close(self) -> None: ...


class InlineRunner:
    """A StepRunner that runs each step inside ``launch``."""

    def __init__(self, runner: SyncRunner) -> None:
        self._runner = runner

    def launch(self, plan: SchedulerOutput) -> PendingOutput:
        return FinishedOutput(self._runner.execute_model(plan))

    def close(self) -> None:
        self._runner.close()


class ThreadedRunner:
    """A StepRunner that runs steps on a thread, so that the scheduler can plan the next one meanwhile."""

    def __init__(self, runner: SyncRunner) -> None:
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, "model-steps")

    def launch(self, plan: SchedulerOutput) -> PendingOutput:
        return self._thread.submit(self._runner.execute_model, plan)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._runner.close()
