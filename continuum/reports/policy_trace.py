"""Writes the policy's decisions into the trace; does nothing if no trace is written."""

from __future__ import annotations

from continuum.jobs.branches import BranchListener
from continuum.jobs.client_hints import remaining_of
from continuum.jobs.job import BranchTip, Job, Turn
from continuum.queueing.admission import WorkingSet
from continuum.retention.ttl import TtlDecision, TtlInputs
from engine.core.policy import Pin, PinEnd
from engine.core.request import Request
from engine.records.messages import ToolSignal
from tracing.events import JobEvent, PinEvent
from tracing.tracer import Tracer

PinInputs = dict[str, float | int | str | bool | None]


class PolicyTrace(BranchListener):
    """One method per event of a job or a pin."""

    def __init__(self, tracer: Tracer | None) -> None:
        self._tracer = tracer or Tracer()

    # ---- jobs ----

    def turn_arrived(self, turn: Turn, now: float) -> None:
        if self._tracer.on:
            event = self._turn_event("turn_arrived", turn, now)
            event.gap_s = turn.gap_s
            event.predicted_excess_s = turn.predicted_excess_s
            event.continues = turn.tip.request_id if turn.tip is not None else None
            event.earlier_id = turn.job.earlier_id
            event.repeats = turn.repeats
            event.waits_since_s = turn.kept_since_s
            self._tracer.emit(event)

    def turn_parked(self, turn: Turn, working_set: WorkingSet, now: float) -> None:
        if self._tracer.on:
            event = self._turn_event("turn_parked", turn, now)
            need = working_set.worst_need(turn)
            event.needed_blocks = need.begun_blocks
            event.own_blocks = need.own_blocks
            event.ahead_s = need.ahead_s
            event.allowed_blocks = working_set.num_usable_blocks
            self._tracer.emit(event)

    def turn_admitted(self, turn: Turn, now: float) -> None:
        if self._tracer.on:
            self._turn("turn_admitted", turn, now)

    def turn_ended(self, turn: Turn, now: float) -> None:
        if self._tracer.on:
            self._turn("turn_ended", turn, now)

    def turn_aborted(self, turn: Turn, now: float) -> None:
        if self._tracer.on:
            self._turn("turn_aborted", turn, now)

    def on_prewarmed(self, tip: BranchTip, request: Request, now: float) -> None:
        if self._tracer.on:
            event = _tip_event("prewarmed", tip, request.request_id, now)
            event.continues = tip.request_id
            event.num_prompt_tokens = request.num_prompt_tokens
            event.cached_tokens = request.num_cached_tokens or 0
            self._tracer.emit(event)

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        if self._tracer.on:
            event = _tip_event("tools_started", tip, tip.request_id, now)
            event.tools = [str(key) for key in tip.tools or ()]
            self._tracer.emit(event)

    def on_hint(self, tip: BranchTip, signal: ToolSignal, now: float) -> None:
        if self._tracer.on:
            event = _tip_event(f"reported_{signal.state.value}", tip, tip.request_id, now)
            event.tools = [str(key) for key in tip.tools or ()]
            event.reported_remaining_s = remaining_of(signal, now - tip.ended_s)
            self._tracer.emit(event)

    def on_job_done(self, job: Job, now: float) -> None:
        if self._tracer.on:
            self._tracer.emit(JobEvent(now=now, kind="finished", job_id=job.job_id, turn=job.num_turns))

    def on_job_gone(self, job: Job, now: float) -> None:
        if self._tracer.on and not job.is_finished:
            self._tracer.emit(JobEvent(now=now, kind="forgotten", job_id=job.job_id, turn=job.num_turns))

    def _turn(self, kind: str, turn: Turn, now: float) -> None:
        self._tracer.emit(self._turn_event(kind, turn, now))

    def _turn_event(self, kind: str, turn: Turn, now: float) -> JobEvent:
        return JobEvent(
            now=now,
            kind=kind,
            job_id=turn.job.job_id,
            req_id=turn.request.request_id,
            turn=turn.number,
            num_prompt_tokens=turn.request.num_prompt_tokens,
            num_output_tokens=turn.request.num_output_tokens,
            num_known_tokens=turn.num_known_tokens,
            cached_tokens=turn.num_cached_tokens or 0,
            recomputed_tokens=turn.num_recomputed_tokens if turn.num_cached_tokens is not None else 0,
            diverged_at_token=turn.diverged_at_token,
            diverged_tokens=turn.num_diverged_tokens,
            supersedes=turn.supersedes,
            superseded_tokens=turn.num_superseded_tokens,
        )

    # ---- pins ----

    def decided(
        self, tip: BranchTip, inputs: TtlInputs, decision: TtlDecision, rule: str, now: float
    ) -> None:
        if self._tracer.on:
            told: PinInputs = {
                "tool_observations": inputs.curve.num_observations,
                "tool_median_s": inputs.curve.known_median_s,
                **_correction(tip),
                "all_observations": inputs.global_curve.num_observations,
                "pool_share": inputs.pool_share,
                "prefill_s": inputs.prefill_s,
                "reload_s": inputs.reload_s,
                "queue_delay_s": inputs.queue_delay_s,
                "memoryfulness": inputs.memoryfulness,
                "called_tools": inputs.called_tools,
                "last_probability": inputs.last_probability,
                "answer_return": inputs.answer_return,
                "tools": " ".join(str(key) for key in tip.tools or ()),
                "elapsed_s": now - tip.ended_s,
            }
            if tip.asked_ttl_s is not None:
                told["asked_ttl_s"] = tip.asked_ttl_s
            event = self._decision(tip, decision, rule, told, now)
            event.num_blocks = inputs.num_blocks
            self._tracer.emit(event)

    def held_on(self, tip: BranchTip, decision: TtlDecision, num_children: int, now: float) -> None:
        """The first time that a pin is held on, for so many sub-agents."""
        if self._tracer.on:
            inputs: PinInputs = {"at_work": num_children, "elapsed_s": now - tip.ended_s}
            self._tracer.emit(self._decision(tip, decision, "sub-agents", inputs, now))

    def extended(self, pin: Pin, tip: BranchTip, now: float) -> None:
        """A pin that takes the place of a shorter one of the same turn."""
        if self._tracer.on:
            decision = TtlDecision(pin.deadline_s - tip.ended_s, "with an early result, until the same time")
            inputs: PinInputs = {"elapsed_s": now - tip.ended_s}
            self._tracer.emit(self._decision(tip, decision, "early-result", inputs, now))
        self.created(pin, tip, now)

    def created(self, pin: Pin, tip: BranchTip, now: float) -> None:
        if self._tracer.on:
            event = self._pin_event("created", tip, now)
            event.deadline_s = pin.deadline_s
            self._tracer.emit(event)

    def refused(self, tip: BranchTip, num_blocks: int, now: float) -> None:
        """``num_blocks``: the blocks that a pin would have held."""
        if self._tracer.on:
            event = self._pin_event("refused", tip, now)
            event.num_blocks = num_blocks
            event.reason = tip.receipt.reason if tip.receipt is not None else None
            self._tracer.emit(event)

    def shrunk(self, pin: Pin, num_blocks_lost: int, cause: PinEnd, by: str | None, now: float) -> None:
        if self._tracer.on:
            self._tracer.emit(
                PinEvent(
                    now=now,
                    kind="shrunk",
                    pin_id=pin.pin_id,
                    job_id=pin.job_id,
                    req_id=pin.request_id,
                    num_blocks=num_blocks_lost,
                    cause=None if cause is PinEnd.REVOKED else cause.value,
                    by=by,
                )
            )

    def ended(self, pin: Pin, tip: BranchTip, cause: PinEnd, by: str | None, now: float) -> None:
        if self._tracer.on:
            self._tracer.emit(
                PinEvent(
                    now=now,
                    kind="ended",
                    pin_id=pin.pin_id,
                    job_id=pin.job_id,
                    req_id=pin.request_id,
                    num_blocks=pin.num_blocks,
                    deadline_s=pin.deadline_s,
                    cause=cause.value,
                    held_s=now - tip.ended_s,
                    needed_blocks=pin.num_needed_blocks,
                    by=by,
                )
            )

    def _decision(
        self, tip: BranchTip, decision: TtlDecision, rule: str, inputs: PinInputs, now: float
    ) -> PinEvent:
        event = self._pin_event("decided", tip, now)
        event.ttl_s = decision.ttl_s
        event.reason = decision.reason
        event.rule = rule
        event.inputs = inputs
        return event

    def _pin_event(self, kind: str, tip: BranchTip, now: float) -> PinEvent:
        pin = tip.pin
        return PinEvent(
            now=now,
            kind=kind,
            pin_id=pin.pin_id if pin is not None else None,
            job_id=tip.job.job_id,
            req_id=tip.request_id,
            num_blocks=pin.num_blocks if pin is not None else 0,
        )


def _tip_event(kind: str, tip: BranchTip, req_id: str, now: float) -> JobEvent:
    return JobEvent(now=now, kind=kind, job_id=tip.job.job_id, req_id=req_id, turn=tip.turn_number)


def _correction(tip: BranchTip) -> dict[str, float]:
    """The factor by which a learned model moved the median; empty if none is trusted."""
    factor = None if tip.estimate is None else tip.estimate.factor
    return {} if factor is None else {"tool_correction": factor}
