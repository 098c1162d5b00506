"""What features do in the worker's steps: each is a part, and all parts are called at the same moments.

Like ``engine.core.parts``. The parts of a CPU's runner, and their order, are in ``engine.worker.cpu.parts``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.parts import busy_at
from engine.worker.cpu.input_batch import StepInputs


class StepPart:
    """What one feature does in a step. A part overrides what it needs."""

    def update(self, plan: SchedulerOutput) -> None:
        """Apply the deltas of a plan, with or without tokens."""

    def begin(self, plan: SchedulerOutput, step: StepInputs) -> None:
        """Prepare the forward pass of a step with tokens; may change its positions."""

    def settle(self, accepted: Mapping[int, int]) -> None:
        """Called for a step with drafts: the number of accepted drafts, by sequence."""

    def end(self, plan: SchedulerOutput, step: StepInputs, result: ModelRunnerOutput) -> None:
        """Add to the result of a step with tokens."""


class StepParts:
    """The parts of one runner, in the order in which they are called."""

    def __init__(self, parts: Iterable[StepPart] = ()) -> None:
        self.all = tuple(parts)
        self._updating = busy_at("update", self.all, StepPart)
        self._beginning = busy_at("begin", self.all, StepPart)
        self._settling = busy_at("settle", self.all, StepPart)
        self._ending = busy_at("end", self.all, StepPart)

    def update(self, plan: SchedulerOutput) -> None:
        for part in self._updating:
            part.update(plan)

    def begin(self, plan: SchedulerOutput, step: StepInputs) -> None:
        for part in self._beginning:
            part.begin(plan, step)

    @property
    def settles(self) -> bool:
        """Whether any part wants to know which drafts were accepted."""
        return bool(self._settling)

    def settle(self, accepted: Mapping[int, int]) -> None:
        for part in self._settling:
            part.settle(accepted)

    def end(self, plan: SchedulerOutput, step: StepInputs, result: ModelRunnerOutput) -> None:
        for part in self._ending:
            part.end(plan, step, result)
