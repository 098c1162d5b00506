"""The settings of a simulation."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.config.engine_config import SchedulerConfig
from engine.core.policy import PolicyContext
from engine.records.kv_cache_groups import ONE_FULL_GROUP, KVCacheGroup
from eval.errors import UsageError
from eval.sim.cost_model import StepCost
from eval.sim.drafts import DraftCounts
from eval.sim.kv_sizes import KvSizes
from eval.sim.pool_checks import check_pool
from eval.sim.replicas.make import EXACT
from eval.sim.replicas.replica import ReplicaConfig
from tracing.tracer import Tracer

KV_TRANSFER_GB_S = 50.0
"""Rate of one 400 Gb/s port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The simulated servers and clients. UsageError if a pool has no block, or more than can be simulated."""

    cost: StepCost
    kv_tokens: int
    """Size of one replica's KV pool, in tokens whose KV of every layer fits."""
    host_kv_tokens: int = 0
    """Host memory of one replica for offloaded KV, in tokens; 0: no offloading."""
    disk_kv_tokens: int = 0
    """Disk of one replica for KV evicted from host memory, in tokens; 0: no disk tier."""
    kv_cache_groups: tuple[KVCacheGroup, ...] = ONE_FULL_GROUP
    """Layers of the model that share a block table, or have states."""
    num_states: int = 0
    """State slots of one replica's pool, for a model that has layers with states."""
    block_size: int = 16
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    num_replicas: int = 1
    replica_model: str = EXACT
    """How an engine is simulated: one of ``REPLICA_MODELS``."""
    num_prefill_replicas: int = 0
    """Additional replicas that compute prompts only; 0: each replica computes its own."""
    prefill_above: int = 0
    """They compute a prompt only if more tokens of it are new at its decoding replica; 0: every prompt."""
    kv_transfer_gb_s: float = KV_TRANSFER_GB_S
    """GB/s at which one replica fetches their KV."""
    router: str = "jobs"
    upgrade_s: float | None = None
    """Seconds for which each replica is down in a rolling upgrade; None: there is none."""
    upgrade_hands_over: bool = True
    """Whether a replaced replica hands over the KV of its paused jobs."""
    tell_last_step: bool = False
    """Whether the client says which turn is a job's last."""
    tell_parents: bool = False
    """Whether the client of a sub-agent says which job waits for it."""
    lessons: bool = False
    """Whether policies learn from ended jobs, as in a server, but without delay."""
    share_prefixes: bool = False
    """Whether jobs with the same system prompt and tools begin with the same blocks."""
    drafts: DraftCounts | None = None

    def __post_init__(self) -> None:
        is_plain = self.num_replicas > 1 and self.router == "jobs" and self.replica_model == EXACT
        if self.upgrade_s is not None and not is_plain:
            raise UsageError("--upgrade-s needs at least two --replicas, exact ones, and --router jobs.")
        check_pool("--kv-tokens", self.kv_tokens, self)
        if self.host_kv_tokens:
            check_pool("--host-kv-tokens", self.host_kv_tokens, self)
            if any(group.is_state for group in self.kv_cache_groups):
                raise UsageError("--host-kv-tokens needs a model without states: no tier holds them.")
        if self.disk_kv_tokens:
            check_pool("--disk-kv-tokens", self.disk_kv_tokens, self)
            if not self.host_kv_tokens:
                raise UsageError(
                    "--disk-kv-tokens needs --host-kv-tokens: the disk takes what host memory evicts."
                )

    @property
    def has_windows(self) -> bool:
        """Whether any layers have a sliding window, chunks or states."""
        return not all(group.is_full for group in self.kv_cache_groups)

    @property
    def num_blocks(self) -> int:
        """Blocks of one replica's pool, each of which holds the KV of one group's layers."""
        return self.sizes.num_blocks(self.kv_tokens)

    @property
    def sizes(self) -> KvSizes:
        """Sizes of a block of the pool or of a tier."""
        return KvSizes(self.block_size, self.kv_cache_groups)

    def replica(self, max_model_len: int, tracer: Tracer | None) -> ReplicaConfig:
        """The configuration of each engine."""
        return ReplicaConfig(
            cost=self.cost,
            scheduler=self.scheduler,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_host_blocks=self.sizes.num_blocks(self.host_kv_tokens),
            num_disk_blocks=self.sizes.num_blocks(self.disk_kv_tokens),
            kv_cache_groups=self.kv_cache_groups,
            num_states=self.num_states,
            max_model_len=max_model_len,
            tracer=tracer,
            drafts=self.drafts,
            kv_transfer_bandwidth=self.kv_transfer_gb_s * 1e9,
            loads_handed_over=self.upgrade_s is not None and self.upgrade_hands_over,
        )

    def policy_context(self, tracer: Tracer | None) -> PolicyContext:
        """The context for each engine's policy."""
        return PolicyContext(
            self.block_size,
            self.num_blocks,
            tracer,
            num_host_blocks=self.sizes.num_blocks(self.host_kv_tokens),
            kv_cache_groups=self.kv_cache_groups,
            num_states=self.num_states,
        )
