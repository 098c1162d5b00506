"""The messages between the engine core and the ranks of a model: pickled, over one channel per rank.

A rank answers its start with RankReady, and each SEND_OUTPUT with the ModelRunnerOutput of its oldest
StepPlan; an EngineError in place of either is its final message. A closed channel means STOP.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from engine.config.engine_config import EngineConfig
from engine.config.parallel import cores_sharing_experts, is_loopback, ranks_per_core
from engine.core.outputs import SchedulerOutput
from engine.executor import ModelInfo
from engine.process.network import address_towards


@dataclass(frozen=True, slots=True)
class RankPlace:
    """A rank's place among the others."""

    rank: int
    size: int
    local_rank: int
    """Its number among the ranks on its machine."""
    local_size: int
    meeting_point: str
    """URL at which torch.distributed lets the ranks meet; the same for all of them."""
    address: str | None = None
    """The machine's address for the other ranks; None if all are on one machine."""
    num_stages: int = 1
    """Stages of the pipeline, each with the same number of ranks. The first ranks are the last stage, because
    rank 0 samples."""
    core: int = 0
    num_cores: int = 1
    """The engine core, among those that share experts."""

    @property
    def num_in_stage(self) -> int:
        """The number of tensor-parallel ranks per stage."""
        return self.size // self.num_stages

    @property
    def stage(self) -> int:
        """The number of its stage: 0 has the first layers."""
        return self.num_stages - 1 - self.rank // self.num_in_stage


def rank_places(config: EngineConfig, meeting_point: str) -> list[RankPlace]:
    """The places of a core's ranks, if all are on its machine.

    ``meeting_point``: where they meet; unused if they meet the ranks of cores with which they share experts.
    """
    size = ranks_per_core(config)
    num_cores = cores_sharing_experts(config)
    address = None
    if num_cores > 1:
        head = config.parallel.data_parallel_address
        meeting_point = config.parallel.meeting_point
        address = None if is_loopback(head) else address_towards(head)
    return [
        RankPlace(
            rank,
            size,
            rank,
            size,
            meeting_point,
            address,
            config.model.pipeline_parallel_size,
            config.parallel.data_parallel_rank if num_cores > 1 else 0,
            num_cores,
        )
        for rank in range(size)
    ]


@dataclass(frozen=True, slots=True)
class CoreAddress:
    """The address at which a rank on another machine connects to the engine core."""

    host: str
    port: int
    token: bytes
    """Proves that it is one of the core's ranks."""


@dataclass(frozen=True, slots=True)
class RankStart:
    """Everything that a rank's process needs to start, sent over its standard input."""

    config: EngineConfig
    place: RankPlace
    channel: int | CoreAddress
    """File descriptor of its channel to the core, or the address to connect to."""
    parent_pid: int
    log_level: int
    folder: str | None = None
    """Private folder with the ranks' rendezvous file; any process that exits removes it."""

    @property
    def rank(self) -> int:
        return self.place.rank


@dataclass(frozen=True, slots=True)
class RankReady:
    """Reports that a rank has loaded its part of the model."""

    info: ModelInfo
    max_concurrent_batches: int


@dataclass(frozen=True, slots=True)
class WaveBegun:
    """Sent by the first rank at any time: another core has begun this wave of steps."""

    number: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step's plan, the same bytes for all ranks."""

    plan: SchedulerOutput
    """The plan without its masks, which may not be ready yet."""
    has_masks: bool
    """Whether masks follow as TokenMasks. Only those for the first rank have content. The others wait for
    theirs, too: a device that waits for the first rank's tokens may block its host, and the masks may depend
    on that host."""


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A call of ``Executor.call_worker``, the same bytes for all ranks; each answers with a WorkerAnswer."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """A rank's answer to a WorkerCall, in the order of the calls."""

    result: Any = None
    error: Exception | None = None


class RankOrder(Enum):
    """Requests to a rank other than plans."""

    SEND_OUTPUT = auto()
    STOP = auto()
