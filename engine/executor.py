"""What the engine core asks of whoever runs the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from engine.core.offload.disk_tier import DiskLevel
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.errors import EngineError


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the core learns of the model once it is loaded and its KV pool allocated."""

    num_gpu_blocks: int
    """Blocks in the pool, null block included."""
    max_model_len: int
    vocab_size: int
    dtype: str
    num_host_blocks: int = 0
    """Slots of the host tier; 0 without one."""
    disk_level: DiskLevel | None = None
    """Behind the host tier; None: there is none."""


class PendingOutput(Protocol):
    """What a submitted step will have sampled; a ``concurrent.futures.Future`` is one."""

    def result(self) -> ModelRunnerOutput:
        """Wait for it. Raises what the step raised. Called once."""


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """A PendingOutput of a step that has run already."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


class Executor(Protocol):
    """Runs step plans. Made by an ``ExecutorFactory`` inside the core process."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def max_concurrent_batches(self) -> int:
        """Plans it takes before the first one's output was asked for: 1, or 2 if the host is to plan a step
        while the one before it runs."""

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Run one step and sample. Called once per plan, in order; steps run in that order, and outputs are
        asked for in it. Never samples what the plan's masks forbid.

        With more than one plan at a time it must not wait for the masks, which may come only after the output
        before was taken. A plan then names tokens that the step before it samples: the worker knows them.

        While loads are pending it is also called with plans of no tokens, about every millisecond, to hear of
        them; it must not wait for them.
        """

    def on_failure(self, told: Callable[[EngineError], None]) -> None:
        """``told`` is called once, on any thread, if the model can no longer be run, whether or not a step is
        running; such a step raises it, too."""

    def shutdown(self) -> None:
        """Free the model and its memory. Repeatable."""


class ExecutorFactory(Protocol):
    """Picklable; loads the model. Raises ModelLoadError or ConfigError with one sentence."""

    def __call__(self, config: EngineConfig) -> Executor: ...
