"""Makes the trace events of a scheduler's steps; called only while tracing is on."""

from __future__ import annotations

from engine.core.outputs import SchedulerOutput
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.step import Step
from tracing.events import PrefixCacheEvent, StepDecision, StepSnapshot
from tracing.tracer import Tracer

WAITING_HEAD = 8
"""How many waiting requests a snapshot names."""


class StepTrace:
    """Numbers the steps: a step's snapshot, cache events and decision share the number."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._step = -1
        self._now = 0.0

    @property
    def number(self) -> int:
        """The number of the last step, counted from 0; -1 before the first."""
        return self._step

    def snapshot(self, scheduler: Scheduler, step: Step) -> None:
        """Record what a step finds before it hands out its budget."""
        self._step += 1
        self._now = step.now
        kv = scheduler.kv
        waiting = scheduler.waiting
        tier = scheduler.loads.tier_statistics()
        self._tracer.emit(
            StepSnapshot(
                step=self._step,
                now=step.now,
                running=[r.request_id for r in scheduler.running],
                num_waiting=len(waiting),
                waiting_head=[r.request_id for r in waiting.first(WAITING_HEAD)],
                free_blocks=kv.pool.num_free_blocks,
                empty_blocks=kv.pool.num_free_empty_blocks,
                cached_blocks=kv.pool.num_cached_blocks,
                pinned_blocks=kv.num_pinned_blocks,
                num_pins=kv.num_pins,
                total_blocks=kv.pool.num_usable_blocks,
                token_budget=step.budget,
                free_states=0 if kv.states is None else kv.states.pool.num_free_blocks,
                num_loading=scheduler.loads.num_requests,
                host_blocks=tier.num_used_blocks,
                disk_blocks=tier.num_used_disk_blocks,
            )
        )

    def prefix_cache(self, request: Request, job_id: str | None, num_without_state: int) -> None:
        """Record how much of a request that joins the batch was cached, and how many more tokens only lacked
        a state."""
        self._tracer.emit(
            PrefixCacheEvent(
                step=self._step,
                now=self._now,
                req_id=request.request_id,
                job_id=job_id,
                hit_tokens=request.num_computed_tokens,
                loaded_tokens=request.num_external_computed_tokens,
                disk_tokens=request.num_disk_tokens,
                without_state_tokens=num_without_state,
                num_prompt_tokens=request.num_prompt_tokens,
                num_tokens=request.num_tokens,
                resumed=request.num_preemptions > 0,
            )
        )

    def decision(self, step: Step, plan: SchedulerOutput, num_free_blocks: int) -> None:
        """Record what a step has decided."""
        plan.trace_step = self._step
        self._tracer.emit(
            StepDecision(
                step=self._step,
                now=step.now,
                new=[r.request_id for r in step.new],
                resumed=[r.request_id for r in step.resumed],
                running=[r.request_id for r in step.running],
                preempted=[r.request_id for r in step.preempted],
                tokens=dict(plan.num_scheduled_tokens),
                total_tokens=plan.total_num_scheduled_tokens,
                free_blocks=num_free_blocks,
                loads={load.request_id: load.num_blocks for load in plan.kv_loads},
                disk_loads={load.request_id: len(load.reads) for load in plan.kv_loads if load.reads},
                stored_blocks=len(plan.kv_stores) + len(plan.state_stores),
                written_blocks=len(plan.kv_disk_writes),
                drafts={i: len(drafts) for i, drafts in plan.scheduled_spec_decode_tokens.items()},
                remote_loads={
                    load.request_id: len(load.remote) for load in plan.kv_loads if load.remote is not None
                },
                leased_blocks=sum(len(lease.blocks) for lease in plan.kv_leases),
                ended_leases=len(plan.ended_kv_leases),
            )
        )
