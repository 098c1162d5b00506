"""Wraps a scheduler and writes its trace: its inputs, and what each step found and decided.

The scheduler knows nothing of traces. The record of an input is emitted after all that the input caused, and
so closes its group of records; the policy emits its own in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request, RequestStatus
from engine.core.scheduler import Scheduler
from engine.core.scheduler_report import PauseState
from engine.core.token_grammar import TokenGrammar
from engine.core.trace.header import trace_header
from engine.core.trace.inputs import InputTrace
from engine.core.trace.steps import StepTrace
from engine.records.messages import EngineCoreOutput, Signal, TurnReceipt
from tracing.events import TraceHeader
from tracing.tracer import Tracer

READS = frozenset(
    (
        *("check_invariants", "has_unfinished_requests", "make_stats", "next_due_s", "num_pending_loads"),
        *("awaits_worker", "sampled_grammars", "statistics"),
        *("config", "kv", "leases", "loads", "max_model_len", "parts", "pins", "policy", "steps"),
        *("compiling", "constrained", "requests", "running", "waiting"),
        *("pause_state", "replan_at_once", "request_block_hasher"),
    )
)
"""Methods and attributes of a scheduler that decide nothing, and so may be used without a record."""


class TracedScheduler:
    """Takes the place of its scheduler while tracing is on.

    It has every method that changes something, and passes on ``READS``. A trace that is switched off and on
    again keeps this object: it numbers the steps, and knows which blocks the trace has named.
    """

    def __init__(self, scheduler: Scheduler, tracer: Tracer) -> None:
        self._scheduler = scheduler
        self._steps = StepTrace(tracer)
        self._inputs = InputTrace(tracer, self._steps, scheduler.kv.block_size)

    def __getattr__(self, name: str) -> Any:
        """Pass on what ``READS`` names, which needs no record; AttributeError for anything else."""
        if name not in READS:
            raise AttributeError(f"{name!r} of a scheduler is not to be used past its trace")
        return getattr(self._scheduler, name)

    def begin_trace(self, wall_time_s: float, now: float, *, from_start: bool) -> TraceHeader:
        """The header of a trace that begins now. ``from_start``: nothing has come in yet."""
        self._inputs.begin()
        return trace_header(self._scheduler, wall_time_s, now, from_start=from_start)

    # ---- what comes in ----

    def add_request(self, request: Request, now: float) -> None:
        reads = self._inputs.watch(request)
        self._scheduler.add_request(request, now)
        self._inputs.request_arrived(request, reads, now)

    def grammar_compiled(self, request: Request, grammar: TokenGrammar, now: float) -> None:
        is_awaited = self._scheduler.compiling.get(request.request_id) is request
        self._scheduler.grammar_compiled(request, grammar, now)
        if is_awaited:
            self._inputs.grammar_ready(request, now)

    def finish_requests(
        self, request_ids: Iterable[str], status: RequestStatus, now: float
    ) -> list[EngineCoreOutput]:
        outputs = self._scheduler.finish_requests(request_ids, status, now)
        self._inputs.requests_ended(outputs, status, now)
        return outputs

    def signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        receipt = self._scheduler.signal(signal, now)
        self._inputs.signal(signal, receipt, now)
        return receipt

    def set_pause_state(self, state: PauseState, now: float) -> None:
        self._scheduler.set_pause_state(state, now)
        self._inputs.paused(state.value, now)

    def update_draft_token_ids(self, proposals: Mapping[str, Sequence[int]], now: float) -> None:
        self._scheduler.update_draft_token_ids(proposals, now)
        self._inputs.drafts_proposed(proposals, now)

    def expire(self, now: float) -> None:
        self._scheduler.expire(now)
        self._inputs.idle(now)

    def reset_prefix_cache(self, now: float) -> bool:
        done = self._scheduler.reset_prefix_cache(now)
        self._inputs.prefix_cache_reset(done, now)
        return done

    def reset_encoder_cache(self, now: float) -> None:
        self._scheduler.reset_encoder_cache(now)
        self._inputs.encoder_cache_reset(now)

    def close(self, now: float) -> None:
        self._scheduler.close(now)
        self._inputs.closed(now)

    # ---- one step ----

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan a step; record a snapshot between the scheduler's halves, and the decision afterwards."""
        step = self._scheduler.begin_step(now)
        self._steps.snapshot(self._scheduler, step)
        step.on_prefix_cache_hit = self._on_prefix_cache_hit
        plan = self._scheduler.plan(step)
        self._steps.decision(step, plan, self._scheduler.kv.num_free_blocks)
        return plan

    def _on_prefix_cache_hit(self, request: Request) -> None:
        states = self._scheduler.kv.states
        num_without_state = 0 if states is None else states.num_lacking_tokens_of(request.request_id)
        self._steps.prefix_cache(request, self._scheduler.policy.job_of(request), num_without_state)

    def update_from_output(
        self, plan: SchedulerOutput, result: ModelRunnerOutput, now: float
    ) -> list[EngineCoreOutput]:
        requests = self._scheduler.steps.requests_of(plan)
        before = self._inputs.begin_output(result, requests, self._scheduler.leases)
        outputs = self._scheduler.update_from_output(plan, result, now)
        self._inputs.step_output(before, plan, result, outputs, now)
        return outputs
