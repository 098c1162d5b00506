"""Turns trace events into what a viewer is shown of requests: when each entered which phase, and totals.

It knows requests only from their events; ``reset`` corrects it now and then, since events may be missing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from engine.watch.feed import Watched
from engine.watch.view import OpenRequest, Phase, PhaseChange, Totals
from tracing.events import (
    JobEvent,
    PinEvent,
    PrefixCacheEvent,
    RequestArrived,
    RequestsEnded,
    StepDecision,
    StepOutput,
)

MAX_EVENTS = 200
"""Maximum number of events in one view; it has at most ten times as many changes of phase."""


@dataclass(slots=True)
class _Followed:
    """A request according to the events so far."""

    job_id: str | None
    phase: Phase


class Digest:
    """The digest for one viewer, from one view to the next."""

    def __init__(self) -> None:
        self._requests: dict[str, _Followed] = {}
        self._jobs: dict[str, str] = {}
        """The job's id by the id of a request whose arrival event comes next."""
        self._scheduled: dict[int, list[str]] = {}
        """Requests of the last two decisions by step, in order."""
        self.totals = Totals()
        self.phases: list[PhaseChange] = []
        self.events: list[PinEvent | JobEvent] = []
        self.num_left_out = 0

    def reset(self, requests: Iterable[OpenRequest]) -> None:
        """Replaces the requests known from events by those that are open now."""
        self._requests = {each.req_id: _Followed(each.job_id, each.phase) for each in requests}
        self._jobs.clear()

    def take(self, events: Iterable[Watched]) -> None:
        """Takes the next events, in order; discards the results of the last call."""
        self.totals = Totals()
        self.phases = []
        self.events = []
        self.num_left_out = 0
        for event in events:
            self._take(event)
        self._leave_out()

    def _leave_out(self) -> None:
        """Keeps the newest, which show the current state."""
        for told, limit in ((self.events, MAX_EVENTS), (self.phases, 10 * MAX_EVENTS)):
            self.num_left_out += max(0, len(told) - limit)
            del told[:-limit]

    def _take(self, event: Watched) -> None:
        match event:
            case StepDecision():
                self._decided(event)
            case StepOutput():
                self._stepped(event)
            case JobEvent():
                self.events.append(event)
                if event.kind == "turn_arrived" and event.req_id is not None:
                    self._jobs[event.req_id] = event.job_id
            case PinEvent():
                self.events.append(event)
            case PrefixCacheEvent():
                self.totals.prompt_tokens += event.num_prompt_tokens
                self.totals.hit_tokens += min(event.hit_tokens, event.num_prompt_tokens)
                self._enter(event.req_id, Phase.PREFILL, event.now, event.job_id)
            case RequestArrived():
                job_id = self._jobs.pop(event.req_id, event.job_id)
                self._enter(event.req_id, Phase.QUEUE, event.arrival_s, job_id)
            case RequestsEnded():
                self._end(event.req_ids, event.now)

    def _decided(self, event: StepDecision) -> None:
        self.totals.steps += 1
        self.totals.preemptions += len(event.preempted)
        self.totals.prefill_tokens += sum(
            tokens
            for req_id, tokens in event.tokens.items()
            if (request := self._requests.get(req_id)) is None or request.phase is not Phase.DECODE
        )
        self._scheduled = {
            step: req_ids for step, req_ids in self._scheduled.items() if step == event.step - 1
        }
        self._scheduled[event.step] = list(event.tokens)
        for req_id in event.loads:
            self._enter(req_id, Phase.LOADING, event.now)
        for req_id in event.preempted:
            self._enter(req_id, Phase.MEMORY, event.now)

    def _stepped(self, event: StepOutput) -> None:
        sampled = self._scheduled.get(event.step, []) if event.sampled is None else event.sampled
        self.totals.generated_tokens += sum(event.num_tokens.values()) - len(event.num_tokens)
        for req_id in sampled:
            request = self._requests.get(req_id)
            if request is None:
                continue  # it has ended since
            self.totals.generated_tokens += 1
            self.totals.output_steps += 1
            if request.phase is Phase.PREFILL:
                self._enter(req_id, Phase.DECODE, event.now)
        self._end(event.ended, event.now)

    def _enter(self, req_id: str, phase: Phase, at_s: float, job_id: str | None = None) -> None:
        request = self._requests.get(req_id)
        if request is None:
            request = self._requests[req_id] = _Followed(job_id, phase)
        request.job_id = request.job_id or job_id
        request.phase = phase
        self.phases.append(PhaseChange(req_id, request.job_id, phase, at_s))

    def _end(self, req_ids: Iterable[str], now: float) -> None:
        for req_id in req_ids:
            request = self._requests.pop(req_id, None)
            job_id = request.job_id if request is not None else None
            self.phases.append(PhaseChange(req_id, job_id, None, now))
