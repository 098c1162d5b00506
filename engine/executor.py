"""What the engine core asks of whoever runs the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from engine.core.disk_tier import DiskLevel
from engine.outputs import ModelRunnerOutput, SchedulerOutput


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


class Executor(Protocol):
    """Runs step plans. Made by an ``ExecutorFactory`` inside the core process."""

    @property
    def info(self) -> ModelInfo: ...

    def execute_model(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step and sample. Called once per plan, in order. Never samples what its masks forbid.

        While loads are pending it is also called with plans of no tokens, about every millisecond, to hear of
        them; it must not wait for them.
        """

    def shutdown(self) -> None:
        """Free the model and its memory."""


class ExecutorFactory(Protocol):
    """Picklable; loads the model. Raises ModelLoadError or ConfigError with one sentence."""

    def __call__(self, config: EngineConfig) -> Executor: ...
