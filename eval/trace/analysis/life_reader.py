"""Turns a trace's events, one after another, into records of turns, gaps, pins and steps.

Passes on each record as soon as it is complete, so that only open ones are in memory. The same code reads a
file of any length and a live engine's events. What happened before the trace began is unknown: a turn that
was open then begins where it is first seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from eval.trace.analysis.jobs import ClientHint, GapLife, Parked, PinLife, TurnEnd, TurnLife
from eval.trace.analysis.open_gap import GapReader
from eval.trace.analysis.open_pin import PinReader
from eval.trace.analysis.open_turn import OpenTurn, WaitClock
from eval.trace.analysis.phases import Phase
from eval.trace.analysis.pinned_tokens import pinned_tokens
from eval.trace.analysis.pool import StepLife
from eval.trace.draft_outcomes import DraftOutcomes
from tracing.events import (
    GrammarReady,
    JobEvent,
    PinEvent,
    PrefixCacheEvent,
    RequestArrived,
    RequestsEnded,
    SignalEvent,
    StepDecision,
    StepOutput,
    StepSnapshot,
    TraceEvent,
    TraceGap,
    TraceHeader,
)

SAME_MOMENT_S = 1e-6
"""Two times this close count as the same, one computed from the other."""


class LifeSink(Protocol):
    """Takes the records."""

    def turn(self, turn: TurnLife) -> None: ...

    def gap(self, gap: GapLife) -> None: ...

    def pin(self, pin: PinLife) -> None: ...

    def step(self, step: StepLife) -> None: ...

    def finished(self, job_id: str, now: float) -> None:
        """The client reported, or the policy assumed, that no turn of this job will follow."""


class LifeReader:
    """Takes every event of one trace in order; ``close`` at the end."""

    def __init__(self, sink: LifeSink) -> None:
        self.header: TraceHeader | None = None
        self.now = 0.0
        """Latest time of any event."""
        self.began_s: float | None = None
        """Time of the first event."""
        self.num_lost = 0
        """Events that the trace reports as missing."""
        self._sink = sink
        self._pins = PinReader(sink.pin)
        self._open: dict[str, OpenTurn] = {}
        self._gaps = GapReader(sink.gap)
        self._num_turns: dict[str, int] = {}
        self._unseen: list[OpenTurn] = []
        """Turns that arrived since the last step began."""
        self._first_tokens: dict[str, int] = {}
        """Requests whose next token can be sampled when this step is done."""
        self._drafts = DraftOutcomes()
        self._clock = WaitClock()
        self._snapshot: StepSnapshot | None = None
        self._step: StepDecision | None = None
        self._step_ended_s: float | None = None
        self._short_of_memory = False
        self._lost = False
        """Whether events were lost, and no step has named the whole queue since."""
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            TraceHeader: self._take_header,
            RequestArrived: self._take_request,
            GrammarReady: self._take_grammar,
            RequestsEnded: self._take_ended,
            SignalEvent: self._take_signal,
            StepSnapshot: self._take_snapshot,
            StepDecision: self._take_decision,
            StepOutput: self._take_output,
            PrefixCacheEvent: self._take_start,
            JobEvent: self._take_job,
            PinEvent: self._take_pin,
            TraceGap: self._take_loss,
        }

    def take(self, event: TraceEvent) -> None:
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    def close(self) -> None:
        """Ends the trace: passes on open records as they are."""
        self._end_step(self.now)
        self._clock_to(self.now)
        for turn in list(self._open.values()):
            self._close_turn(turn, TurnEnd.OPEN, self.now)
        self._gaps.close()
        self._pins.close(self.now)

    def _at(self, now: float) -> None:
        if self.began_s is None:
            self.began_s = self._clock.now = now
        self.now = max(self.now, now)

    def _clock_to(self, now: float) -> None:
        """Advances the clock to now, with the state that the last step left."""
        snapshot = self._snapshot
        if snapshot is None:
            return
        self._clock.advance(
            now,
            short_of_memory=self._short_of_memory,
            num_waiting=snapshot.num_waiting,
            pinned_blocks=snapshot.pinned_blocks,
        )

    def _take_header(self, header: TraceHeader) -> None:
        if self.header is None:
            self.header = header
            self._at(header.monotonic_s)

    def _take_loss(self, loss: TraceGap) -> None:
        self.num_lost += loss.dropped
        self._lost = True

    # ---- turns arrive and end ----

    def _take_request(self, event: RequestArrived) -> None:
        self._at(event.now)
        turn = self._open.get(event.req_id)
        if turn is None:
            job_id = None if event.prewarms else event.job_id  # no turn, or the policy would have said so
            turn = self._arrive(event.req_id, job_id, event.arrival_s)
            if job_id is not None:
                shared_tokens = event.prefix_blocks * self._block_size
                self._gaps.continue_latest(turn, job_id, shared_tokens)
        if abs(event.arrival_s - turn.arrived_s) > SAME_MOMENT_S and not turn.spans:
            turn.arrived_s = turn.since_s = event.arrival_s
        turn.arrival_told = True
        turn.num_prompt_tokens = event.num_prompt_tokens
        if event.awaits_grammar and turn.phase is Phase.WAIT:
            turn.phase = Phase.GRAMMAR
            self._unseen = [other for other in self._unseen if other is not turn]

    def _take_grammar(self, event: GrammarReady) -> None:
        """Puts the turn in the queue."""
        self._at(event.now)
        turn = self._open.get(event.req_id)
        if turn is not None and turn.phase is Phase.GRAMMAR:
            turn.enter(Phase.WAIT, event.now, self._clock)
            self._unseen.append(turn)

    @property
    def _block_size(self) -> int:
        return self.header.block_size if self.header is not None else 0

    def _arrive(
        self, req_id: str, job_id: str | None, arrived_s: float, *, told: bool = True, number: int = 0
    ) -> OpenTurn:
        if job_id is not None:
            self._num_turns[job_id] = number = number or self._num_turns.get(job_id, 0) + 1
        turn = OpenTurn(job_id, req_id, number, arrived_s, arrived_s, arrival_told=told)
        self._open[req_id] = turn
        self._unseen.append(turn)
        return turn

    def _take_ended(self, event: RequestsEnded) -> None:
        self._at(event.now)
        end = TurnEnd.ENDED if event.how == "stopped" else TurnEnd.ABORTED
        for req_id in event.req_ids:
            turn = self._open.get(req_id)
            if turn is not None:
                self._close_turn(turn, end, event.now)

    def _close_turn(self, turn: OpenTurn, end: TurnEnd, now: float) -> None:
        self._clock_to(now)
        del self._open[turn.req_id]
        if self._first_tokens.pop(turn.req_id, None) is not None and end is TurnEnd.ENDED:
            self._first_token(turn, now)
        life = turn.close(end, now, self._clock)
        self._sink.turn(life)
        if end is TurnEnd.ENDED and life.job_id is not None:
            self._gaps.begin(life.job_id, life)

    # ---- steps ----

    def _take_snapshot(self, snapshot: StepSnapshot) -> None:
        self._at(snapshot.now)
        self._end_step(snapshot.now)
        self._clock_to(snapshot.now)
        self._clock.now = snapshot.now
        self._tokens_came(snapshot.step - self._max_steps_under_way, snapshot.now)
        self._snapshot = snapshot
        self._step = None
        self._step_ended_s = None
        for req_id in snapshot.waiting_head:
            if req_id not in self._open:
                self._arrive(req_id, None, snapshot.now, told=False)
        for turn in self._unseen:
            turn.began_to_wait = self._clock.copy()
        self._unseen.clear()
        if self._lost:
            self._lost = not self._miss(snapshot)

    def _miss(self, snapshot: StepSnapshot) -> bool:
        """Repairs the state after lost events: a turn that appears nowhere any more has ended, one that runs
        now was started. A waiting turn is assumed to wait still until a step names the whole queue; returns
        whether this one does."""
        now = snapshot.now
        running = set(snapshot.running)
        all_named = snapshot.num_waiting <= len(snapshot.waiting_head) and not snapshot.num_loading
        waiting = set(snapshot.waiting_head)
        for turn in list(self._open.values()):
            if turn.req_id in running:
                if not turn.running:
                    turn.enter(Phase.DECODE, now, self._clock)
            elif turn.running or (
                all_named and turn.phase is not Phase.GRAMMAR and turn.req_id not in waiting
            ):
                self._close_turn(turn, TurnEnd.LOST, now)
        return all_named

    def _take_decision(self, step: StepDecision) -> None:
        self._at(step.now)
        self._step = step
        self._drafts.decided(step)
        opened = self._open
        for req_id in step.preempted:
            turn = opened.get(req_id)
            if turn is not None:
                turn.enter(Phase.PREEMPTED, step.now, self._clock)
                turn.give_back()
        for req_id in step.loads:
            turn = opened.get(req_id)
            if turn is not None:
                turn.enter(Phase.LOAD, step.now, self._clock)
        for req_id, num_tokens in step.tokens.items():
            turn = opened.get(req_id)
            if turn is None:
                turn = self._meet(req_id, step.now)
            turn.num_computed += num_tokens - step.drafts.get(req_id, 0)
            if turn.phase is not Phase.DECODE and turn.num_computed >= turn.num_to_compute:
                self._first_tokens.setdefault(req_id, step.step)
        self._short_of_memory = self._is_short_of_memory(step)

    def _meet(self, req_id: str, now: float) -> OpenTurn:
        """Adds a turn that was running before the trace began; its first token is unknown."""
        turn = self._arrive(req_id, None, now, told=False)
        turn.enter(Phase.DECODE, now, self._clock)
        return turn

    def _is_short_of_memory(self, step: StepDecision) -> bool:
        """Whether waiting requests lack memory, judged by the first one. How much of its job's KV it can
        reuse is unknown: none is assumed if the step had budget and slots left, else all."""
        snapshot = self._snapshot
        if snapshot is None:
            return False
        had_room = self._had_room(snapshot, step)
        started = {*step.new, *step.resumed, *step.loads}
        first = next((req_id for req_id in snapshot.waiting_head if req_id not in started), None)
        head = self._open.get(first) if first is not None else None
        if head is None or not head.num_prompt_tokens or not self._block_size:
            return had_room
        num_tokens = max(head.num_prompt_tokens, head.num_to_compute)
        num_tokens -= 0 if had_room else head.num_known_tokens
        assert self.header is not None
        return num_tokens > pinned_tokens(self.header, step.free_blocks)

    def _had_room(self, snapshot: StepSnapshot, step: StepDecision) -> bool:
        """Whether tokens of the budget and a slot were left over."""
        num_slots = len(snapshot.running) - len(step.preempted) + len(step.new) + len(step.resumed)
        num_slots += snapshot.num_loading + len(step.loads)
        max_num_seqs = self.header.max_num_seqs if self.header is not None else 0
        return step.total_tokens < snapshot.token_budget and not 0 < max_num_seqs <= num_slots

    def _take_output(self, output: StepOutput) -> None:
        self._at(output.now)
        if self._snapshot is not None and output.step == self._snapshot.step:
            self._step_ended_s = output.now
        self._tokens_came(output.step, output.now)
        for drafted in self._drafts.came(output):
            turn = self._open.get(drafted.req_id)
            if turn is not None:
                turn.verified(drafted)
        for req_id, how in output.ended.items():
            turn = self._open.get(req_id)
            if turn is not None:
                end = TurnEnd.ABORTED if how == "error" else TurnEnd.ENDED
                self._close_turn(turn, end, output.now)

    @property
    def _max_steps_under_way(self) -> int:
        header = self.header
        return max(2, header.num_stages) if header is not None and header.async_scheduling else 1

    def _tokens_came(self, step: int, now: float) -> None:
        """Records first tokens of this step and all before it."""
        for req_id in [req_id for req_id, of_step in self._first_tokens.items() if of_step <= step]:
            del self._first_tokens[req_id]
            if req_id in self._open:
                self._first_token(self._open[req_id], now)

    def _first_token(self, turn: OpenTurn, now: float) -> None:
        if turn.first_token_s is None:
            turn.first_token_s = now
        if turn.phase is not Phase.PREEMPTED:
            turn.enter(Phase.DECODE, now, self._clock)

    def _take_start(self, event: PrefixCacheEvent) -> None:
        """Records that a request joined the batch."""
        turn = self._open.get(event.req_id)
        if turn is None:
            turn = self._arrive(event.req_id, event.job_id, event.now, told=False)
        again = turn.num_preemptions > 0
        turn.enter(Phase.RECOMPUTE if again else Phase.PREFILL, event.now, self._clock)
        turn.num_computed = event.hit_tokens
        turn.num_to_compute = event.num_tokens
        turn.num_prompt_tokens = event.num_prompt_tokens
        if turn.started_s is None:
            turn.started_s = event.now
            turn.cached_tokens = event.hit_tokens
            turn.loaded_tokens = event.loaded_tokens
            turn.disk_tokens = event.disk_tokens

    def _end_step(self, until_s: float) -> None:
        snapshot = self._snapshot
        step = self._step
        if snapshot is None or step is None:
            return
        self._step = None
        self._sink.step(
            StepLife(
                step=step.step,
                now=snapshot.now,
                until_s=until_s,
                ended_s=self._step_ended_s,
                num_running=len(snapshot.running),
                num_waiting=snapshot.num_waiting,
                num_loading=snapshot.num_loading,
                free_blocks=snapshot.free_blocks,
                empty_blocks=snapshot.empty_blocks,
                pinned_blocks=snapshot.pinned_blocks,
                num_pins=snapshot.num_pins,
                total_blocks=snapshot.total_blocks,
                host_blocks=snapshot.host_blocks,
                token_budget=snapshot.token_budget,
                tokens=step.total_tokens,
                num_scheduled=len(step.tokens),
                num_admitted=len(step.new),
                num_resumed=len(step.resumed),
                num_preempted=len(step.preempted),
                loaded_blocks=sum(step.loads.values()),
                stored_blocks=step.stored_blocks,
            )
        )

    # ---- what the policy says of jobs ----

    def _take_pin(self, event: PinEvent) -> None:
        self._at(event.now)
        self._pins.take(event)

    def _take_job(self, event: JobEvent) -> None:
        self._at(event.now)
        match event.kind:
            case "turn_arrived" if event.req_id is not None:
                self._take_arrival(event, event.req_id)
            case "turn_parked" if event.req_id in self._open:
                self._open[event.req_id].parked = Parked(
                    event.needed_blocks, event.allowed_blocks, event.own_blocks, event.ahead_s
                )
            case "turn_admitted" | "turn_ended" | "turn_aborted" if event.req_id in self._open:
                self._take_turn(event, self._open[event.req_id])
            case "finished" | "forgotten":
                self._gaps.forget(event.job_id)
                if event.kind == "finished":
                    self._sink.finished(event.job_id, event.now)
            case "tools_started":
                self._gaps.tools_known(event.job_id, event.req_id, tuple(event.tools))
            case "reported_started" | "reported_progress" | "reported_finished" | "reported_cancelled":
                told = ClientHint(event.now, event.kind.removeprefix("reported_"), event.reported_remaining_s)
                self._gaps.told(event.job_id, event.req_id, told)
            case _:
                pass

    def _take_turn(self, event: JobEvent, turn: OpenTurn) -> None:
        """Also names the job of a turn that was open when the trace began, which is unknown before."""
        if turn.job_id is None:
            turn.job_id = event.job_id
            turn.number = event.turn
            turn.num_prompt_tokens = event.num_prompt_tokens
            self._num_turns[event.job_id] = max(event.turn, self._num_turns.get(event.job_id, 0))
        turn.num_known_tokens = event.num_known_tokens
        if event.kind != "turn_aborted":
            turn.cached_tokens = event.cached_tokens
            turn.recomputed_tokens = event.recomputed_tokens
        if event.kind != "turn_admitted":
            turn.num_output_tokens = event.num_output_tokens

    def _take_arrival(self, event: JobEvent, req_id: str) -> None:
        turn = self._arrive(req_id, event.job_id, event.now, number=event.turn)
        turn.num_prompt_tokens = event.num_prompt_tokens
        turn.num_known_tokens = event.num_known_tokens
        turn.recomputed_tokens = 0
        turn.diverged_at_token = event.diverged_at_token
        turn.gap_s = event.gap_s
        turn.predicted_excess_s = event.predicted_excess_s
        self._gaps.continue_from(turn, event.job_id, event.continues, event.gap_s)

    def _take_signal(self, event: SignalEvent) -> None:
        """Reads the tools from signals, for policies that record none."""
        self._at(event.now)
        if event.kind == "tool_gap_started" and event.job_id is not None:
            tools = tuple(call.name for call in event.calls)
            self._gaps.tools_known(event.job_id, event.req_id, tools)
