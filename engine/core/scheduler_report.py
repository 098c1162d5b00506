"""What a scheduler reports of itself: gauges and counts, its state, and whether its parts agree."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from engine.core.fairness.fair_queue import FairQueue
from engine.core.fairness.tenant_slots import TenantSlots
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.kv_leases import KVLeases
from engine.core.offload.pending_kv_loads import PendingKVLoads
from engine.core.parts import Parts
from engine.core.pin_manager import PinManager
from engine.core.policy import SchedulingPolicy
from engine.core.request import Request, RequestStatus
from engine.core.steps_in_flight import StepsInFlight
from engine.records.reported_stats import SchedulerStats


class PauseState(Enum):
    """What the scheduler may still schedule."""

    UNPAUSED = "unpaused"
    PAUSED_NEW = "paused_new"
    """Running requests go on, and nothing is admitted."""
    PAUSED_ALL = "paused_all"
    """Nothing is scheduled."""


@dataclass(frozen=True, slots=True)
class SchedulerStatistics:
    """The state of a scheduler at one moment."""

    num_running: int
    num_waiting: int
    num_loading: int
    """Waiting requests that are admitted, and whose KV is being loaded from another tier."""
    num_compiling: int
    """Waiting requests whose grammar is being compiled; they are in no queue."""
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    """Blocks, free or not, that are cached."""
    num_pinned_blocks: int
    num_pins: int
    num_host_blocks: int
    num_used_host_blocks: int
    num_disk_blocks: int
    num_used_disk_blocks: int
    pause_state: str


@dataclass(slots=True)
class StepCounts:
    """Events since the last ``make_stats()``."""

    step_tokens: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0

    def look_up(self, request: Request) -> None:
        """Count what the prefix cache had of a request that starts to run."""
        self.prefix_cache_queries += request.num_tokens
        self.prefix_cache_hits += request.num_computed_tokens - request.num_external_computed_tokens


class SchedulerView(Protocol):
    """What a report reads of a scheduler: its parts, and where each of its requests is."""

    policy: SchedulingPolicy
    kv: KVCacheManager
    loads: PendingKVLoads
    leases: KVLeases
    pins: PinManager
    slots: TenantSlots
    steps: StepsInFlight
    parts: Parts
    requests: dict[str, Request]
    waiting: FairQueue
    compiling: dict[str, Request]
    running: list[Request]
    constrained: dict[str, Request]
    pause_state: PauseState


def stats_of(scheduler: SchedulerView, counts: StepCounts) -> SchedulerStats:
    """Gauges as they are now, and these counts; resets the counts of the scheduler's parts."""
    pool = scheduler.kv.pool
    tier = scheduler.loads.tier_statistics()
    states = scheduler.kv.states
    loads = scheduler.loads.take_counts()
    writes = scheduler.loads.take_write_counts()
    stats = SchedulerStats(
        num_running_reqs=len(scheduler.running),
        num_waiting_reqs=len(scheduler.waiting) + scheduler.loads.num_requests + len(scheduler.compiling),
        num_total_blocks=pool.num_usable_blocks,
        num_free_blocks=pool.num_free_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_pinned_blocks=scheduler.kv.num_pinned_blocks,
        num_pinned_alone_blocks=scheduler.kv.pool.num_pinned_alone,
        num_pins=scheduler.kv.num_pins,
        step_tokens=counts.step_tokens,
        prefix_cache_queries=counts.prefix_cache_queries,
        prefix_cache_hits=counts.prefix_cache_hits,
        num_preemptions=counts.num_preemptions,
        pins_ended=scheduler.pins.take_ended(),
        pin_block_s=scheduler.pins.take_block_s(),
        pin_held_s=scheduler.pins.take_held_s(),
        superseded_blocks=scheduler.pins.take_superseded(),
        jobs=scheduler.policy.take_job_stats(),
        num_host_blocks=tier.num_blocks,
        num_used_host_blocks=tier.num_used_blocks,
        loaded_tokens=loads.num_tokens,
        failed_loads=loads.num_failed,
        remote_loaded_tokens=loads.num_remote_tokens,
        remote_failed_loads=loads.num_failed_remote,
        num_disk_blocks=tier.num_disk_blocks,
        num_used_disk_blocks=tier.num_used_disk_blocks,
        disk_loaded_tokens=loads.num_disk_tokens,
        disk_failed_loads=loads.num_failed_disk,
        disk_written_blocks=writes.num_written,
        disk_failed_writes=writes.num_failed,
        disk_dropped_writes=writes.num_dropped,
        num_states=0 if states is None else states.pool.num_usable_blocks,
        num_free_states=0 if states is None else states.pool.num_free_blocks,
        tokens_without_state=0 if states is None else states.take_num_lacking_tokens(),
        block_lives=None if pool.lives is None else pool.lives.take(),
    )
    scheduler.parts.fill_stats(stats, scheduler.running)
    return stats


def statistics_of(scheduler: SchedulerView) -> SchedulerStatistics:
    """How many requests, blocks and pins there are now."""
    kv = scheduler.kv.statistics()
    tier = scheduler.loads.tier_statistics()
    return SchedulerStatistics(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + scheduler.loads.num_requests + len(scheduler.compiling),
        num_loading=scheduler.loads.num_requests,
        num_compiling=len(scheduler.compiling),
        num_blocks=kv.num_blocks,
        num_free_blocks=kv.num_free_blocks,
        num_cached_blocks=kv.num_cached_blocks,
        num_pinned_blocks=kv.num_pinned_blocks,
        num_pins=kv.num_pins,
        num_host_blocks=tier.num_blocks,
        num_used_host_blocks=tier.num_used_blocks,
        num_disk_blocks=tier.num_disk_blocks,
        num_used_disk_blocks=tier.num_used_disk_blocks,
        pause_state=scheduler.pause_state.value,
    )


def check_invariants_of(scheduler: SchedulerView) -> None:
    """Raise AssertionError unless queues, requests, pins and blocks agree with each other."""
    kv = scheduler.kv
    queued = {r.request_id for r in scheduler.waiting}
    running = {r.request_id for r in scheduler.running}
    loading = {r.request_id for r in scheduler.loads.requests}
    assert len(running) == len(scheduler.running)
    assert len(queued) + len(running) + len(loading) + len(scheduler.compiling) == len(scheduler.requests)
    places = queued | running | loading | scheduler.compiling.keys()
    assert places == set(scheduler.requests), "a request is lost or unknown"
    assert scheduler.constrained.keys() == {i for i, r in scheduler.requests.items() if r.grammar is not None}
    for request in scheduler.compiling.values():
        assert request.status is RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        assert not kv.num_blocks_of(request.request_id)
    for request in scheduler.running:
        assert request.status is RequestStatus.RUNNING
        num_ahead = request.num_output_placeholders + request.num_drafts_under_way
        assert request.num_computed_tokens <= request.num_tokens + num_ahead
        assert kv.num_slots_of(request.request_id) >= request.num_computed_tokens
    for request in scheduler.waiting:
        assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        assert request.num_computed_tokens == 0
        assert not kv.num_blocks_of(request.request_id)
    scheduler.parts.check_invariants()
    pins = scheduler.pins.all()
    assert len(pins) == kv.num_pins
    assert sum(pin.num_blocks for pin in pins) == kv.num_pinned_blocks
    scheduler.slots.check_invariants([*scheduler.running, *scheduler.loads.requests])
    scheduler.steps.check_invariants()
    scheduler.loads.check_invariants()
    kv.check_invariants()
