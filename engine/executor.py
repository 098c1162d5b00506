"""The interface of an executor, which runs the model for the engine core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.config.engine_config import EngineConfig
from engine.core.offload.disk_tier import DiskLevel
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.errors import EngineError
from engine.process.start_phases import Phases
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from engine.records.media import MediaModels
from engine.records.pooling import PoolingModel
from engine.records.routed_experts import RoutedExpertsSpec


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model's properties, known once it is loaded and its KV pool is allocated."""

    num_gpu_blocks: int
    """Number of KV blocks in the pool, including the null block."""
    max_model_len: int
    vocab_size: int
    dtype: str
    num_host_blocks: int = 0
    """Number of blocks of the host tier; 0 without one."""
    disk_level: DiskLevel | None = None
    """The disk tier below the host tier; None without one."""
    kv_cache_groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP
    """Layers that share a block table. A block of the pool may belong to any group."""
    num_states: int = 0
    """Number of state slots, including slot 0, which is never handed out; 0 if no layer has a state."""
    prompt_logprobs: bool = True
    """Whether it returns log-probabilities of prompts."""
    routed_experts: RoutedExpertsSpec | None = None
    """The sizes of the experts in outputs; None if outputs have none."""
    saved_kv: Path | None = None
    """The first rank's folder of KV that servers share; None without one."""
    pooling: PoolingModel | None = None
    """Properties of a pooling model; None: the model generates."""
    media: MediaModels | None = None
    """How the model reads pictures and audio; None: it reads text only."""
    start_phases: Phases = field(default=(), compare=False)
    """How long the first rank took to load what it needs: measured, so no part of an equal model."""


class PendingOutput(Protocol):
    """The future output of a submitted step, for example a ``concurrent.futures.Future``."""

    def result(self) -> ModelRunnerOutput:
        """Wait for the output; raises the step's error. Called once."""


@dataclass(frozen=True, slots=True)
class FinishedOutput:
    """A ``PendingOutput`` of a step that has already run."""

    output: ModelRunnerOutput

    def result(self) -> ModelRunnerOutput:
        return self.output


class Executor(Protocol):
    """Runs the scheduler's plans. Made by an ``ExecutorFactory`` in the core process."""

    @property
    def info(self) -> ModelInfo: ...

    @property
    def max_concurrent_batches(self) -> int:
        """How many plans may be submitted before the first output is awaited: 2 with async scheduling."""

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Run one step and sample. Called once per plan; steps run, and outputs are awaited, in the order of
        the calls. Never samples a token that the plan's masks forbid.

        With more than one plan in flight it must not wait for the masks, which may be filled only after the
        previous output was processed. Such a plan refers to tokens that the previous step samples; the worker
        knows them.

        While loads are pending it is also called with plans without tokens, about every millisecond, so that
        it can report them; it must not wait for the loads.
        """

    def on_failure(self, callback: Callable[[EngineError], None]) -> None:
        """Register a callback. It is called once, on any thread, if the model can no longer be run, even
        while no step is running; a running step raises the error, too."""

    def on_wave(self, callback: Callable[[int], None]) -> None:
        """Register a callback, if cores share experts. It is called on any thread with the number of each
        wave of steps that another core has begun: that core waits for this one."""

    def call_worker(self, method: str, *args: Any) -> Any:
        """Call a method of the worker by name, on all ranks; returns the first one's answer. Called on any
        thread, also while steps run: between two of them, or during one where that is safe. Raises the error
        of a rank, which does not end the engine; RequestError if there is no such method."""

    def shutdown(self) -> None:
        """Free the model and its memory. May be called again."""


class ExecutorFactory(Protocol):
    """Loads the model and returns an executor for it. Picklable; raises ModelLoadError or ConfigError."""

    def __call__(self, config: EngineConfig) -> Executor: ...
