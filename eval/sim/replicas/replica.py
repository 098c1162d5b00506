"""The interface of a simulation's engines: their configuration, methods and counters."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

from engine.config.engine_config import SchedulerConfig
from engine.core.kv_cache.block_hash import BlockHash
from engine.core_process.engine_core import STALLED_RETRY_S
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from engine.records.lessons import Lesson
from engine.records.messages import Signal, TurnReceipt
from engine.records.reported_stats import SpecDecodingStats
from engine.routing import EngineLoad
from eval.sim.cost_model import StepCost
from eval.sim.drafts import DraftCounts
from eval.sim.sim_request import SimRequest
from tracing.events import MovedTurn
from tracing.tracer import Tracer


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """Sizes of one engine."""

    cost: StepCost
    scheduler: SchedulerConfig
    block_size: int
    num_blocks: int
    """Usable blocks."""
    num_host_blocks: int = 0
    """Copies that fit in host memory; 0: there is no host tier."""
    num_disk_blocks: int = 0
    """Copies that fit on disk, the tier after host memory; 0: there is none."""
    kv_cache_groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP
    num_states: int = 0
    """Usable state slots, for a model that has layers with states."""
    max_model_len: int
    enable_prefix_caching: bool = True
    stalled_retry_s: float = STALLED_RETRY_S
    """Seconds until the scheduler is called again when requests wait and nothing can be scheduled."""
    tracer: Tracer | None = None
    drafts: DraftCounts | None = None
    """Statistics of drafts; None: there are none."""
    kv_transfer_bandwidth: float = 0.0
    """Bytes per second at which KV is fetched from other replicas; 0: no fetching."""
    loads_handed_over: bool = False
    """Whether replaced replicas hand over the KV of paused turns, which is then fetched at that rate."""


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Blocks of a pool by use, and numbers of requests, at one time."""

    running: int
    pinned: int
    cached: int
    free: int
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class ReplicaCounts:
    """What a replica has counted until it was closed."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    """Prefill tokens, including recomputed ones."""
    num_preemptions: int = 0
    num_loaded_tokens: int = 0
    """Tokens whose KV came from host memory or disk."""
    num_disk_tokens: int = 0
    """How many of these were read from disk."""
    num_used_blocks: int = 0
    """Blocks that are still held."""
    pins_ended: Counter[str] = field(default_factory=Counter)
    pin_block_s: Counter[str] = field(default_factory=Counter)
    drafts: SpecDecodingStats = field(default_factory=SpecDecodingStats)


@dataclass(frozen=True, slots=True)
class PausedTurn:
    """A turn whose KV a pin holds."""

    last_block: BlockHash
    """The last block that it holds."""
    num_blocks: int
    """Blocks of its tokens that it holds."""
    turn: MovedTurn | None
    """What the replica with the next turn is told; None: the policy knows no jobs."""


class SimReplica(Protocol):
    """One engine of a simulation."""

    is_up: bool
    """Whether turns may go to it."""

    @property
    def num_unfinished(self) -> int: ...

    @property
    def load(self) -> EngineLoad:
        """The load that the engine would report."""

    @property
    def wants_signals(self) -> bool:
        """Whether it needs signals about tool calls and the ends of jobs."""

    def add_request(self, request: SimRequest) -> None: ...

    def num_new_tokens(self, request: SimRequest) -> int:
        """Tokens of the prompt whose KV is not cached there now."""

    def signal(self, signal: Signal) -> TurnReceipt | None:
        """Returns the policy's new decision about the turn."""

    def take_lesson(self) -> Lesson | None:
        """Returns what its policy has to learn now, if anything."""

    def pool_use(self) -> PoolUse: ...

    def paused_turns(self) -> list[PausedTurn]:
        """What its pins hold."""

    def restart(self) -> None:
        """Loses all KV, as a process in its place would have none; what its policy has learned stays."""

    def close(self) -> ReplicaCounts:
        """Ends all pins and returns the counts."""
