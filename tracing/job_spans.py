"""Makes OpenTelemetry spans from the core's events: a job, its turns with their phases, its tool gaps.

It does not know threads or collectors. Spans are created late, with the times of the events: a turn's when it
has ended, a gap's when its pin has ended, too. Attributes have the names of the GenAI conventions, then V1's,
then ours under ``continuum.``; ``docs/observability.md`` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tracing.ended_request import EndedRequest
from tracing.events import JobEvent, PinEvent

MAX_JOBS = 65536
"""Maximum number of open jobs; beyond it, the oldest job's span ends, as if the job had been forgotten."""
MAX_GAPS = 256
"""Maximum number of open gaps of one job; beyond it, the oldest one ends."""
PHASES = ("queue", "prefill", "decode")
"""Phases of a turn: until it is first scheduled, until its first token, until its end."""

Attributes = dict[str, str | int | float | Sequence[str]]


@dataclass(slots=True, eq=False)
class _Note:
    """An event at one moment of a gap."""

    name: str
    at_s: float
    attributes: Attributes


@dataclass(slots=True, eq=False)
class _Gap:
    """The time from the end of a turn to the next one, and what was pinned in it."""

    request_id: str
    turn: int
    began_s: float
    job: _Job
    tools: list[str] = field(default_factory=list)
    ended_s: float | None = None
    outcome: str = ""
    pin_id: int | None = None
    pin_open: bool = False
    pin: Attributes = field(default_factory=dict)
    """Attributes about its pin."""
    notes: list[_Note] = field(default_factory=list)

    @property
    def has_span(self) -> bool:
        """Whether it gets a span: not at a job's end, if nothing ran and nothing was pinned."""
        return self.outcome == "returned" or bool(self.tools) or self.pin_id is not None


@dataclass(slots=True, eq=False)
class _Job:
    """A job whose span is open. The span is created when the first turn has ended, in that turn's trace."""

    job_id: str
    began_s: float
    last_s: float
    """Time of its last event."""
    span: Span | None = None
    agent: Attributes = field(default_factory=dict)
    """Attributes about the sub-agent whose job it is."""
    outcome: str | None = None
    num_turns: int = 0
    num_open_turns: int = 0
    gaps: dict[str, _Gap] = field(default_factory=dict)
    """Open gaps, by the request that came before them."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    queued_s: float = 0.0
    tools_s: float = 0.0


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn in progress, with the data that only the policy has."""

    job: _Job
    number: int
    recomputed_tokens: int = 0


class JobSpans:
    """The open jobs, turns and gaps. Used by one thread only."""

    def __init__(self, tracer: Tracer, *, model_name: str, epoch_ns: int) -> None:
        """``epoch_ns``: the wall clock's time when the events' clock was at 0."""
        self._tracer = tracer
        self._model_name = model_name
        self._epoch_ns = epoch_ns
        self._w3c = TraceContextTextMapPropagator()
        self._jobs: dict[str, _Job] = {}
        self._turns: dict[str, _Turn] = {}
        self._gaps: dict[str, _Gap] = {}
        """Gaps that are open, or whose pin has not ended, by the request that came before them."""
        self._handlers = {
            "turn_arrived": self._turn_arrived,
            "turn_admitted": self._turn_goes_on,
            "turn_ended": self._turn_ended,
            "tools_started": self._tools_started,
            "finished": self._job_ended,
            "forgotten": self._job_ended,
        }

    def take(self, item: JobEvent | PinEvent | EndedRequest) -> None:
        """Handles the next event."""
        match item:
            case EndedRequest():
                self._request_ended(item)
            case PinEvent():
                self._pin_event(item)
            case JobEvent():
                handler = self._handlers.get(item.kind)
                if handler is not None:
                    handler(item)
                elif item.kind.startswith("reported_"):
                    self._client_reported(item)

    def close(self, now_s: float) -> None:
        """Ends all open spans, and marks them as unfinished."""
        for gap in list(self._gaps.values()):
            gap.pin_open = False
            if gap.ended_s is not None:
                self._emit_gap(gap)
        for job in list(self._jobs.values()):
            job.num_open_turns = 0
            self._end_job(job, "open", now_s)

    # ---- turns ----

    def _turn_arrived(self, event: JobEvent) -> None:
        gap = self._gaps.get(event.continues or "")
        job = self._job_of(event, gap)
        job.num_turns = max(job.num_turns, event.turn)
        job.num_open_turns += 1
        job.last_s = event.now
        self._turns[event.req_id or ""] = _Turn(job, event.turn)
        if gap is not None and gap.ended_s is None:
            self._come_back(gap, event)

    def _come_back(self, gap: _Gap, event: JobEvent) -> None:
        """Ends the gap: the turn that continues it has arrived, or one that repeats the turn before it."""
        if event.gap_s is None:
            self._end_gap(gap, "repeated", event.now)
            return
        if gap.tools:
            gap.job.tools_s += event.gap_s
        self._end_gap(gap, "returned", gap.began_s + event.gap_s)

    def _job_of(self, event: JobEvent, gap: _Gap | None) -> _Job:
        """The event's job, new if missing. The turn that this one continues identifies a renamed job."""
        job = self._jobs.get(event.job_id)
        if job is None and gap is not None and self._jobs.pop(gap.job.job_id, None) is not None:
            job = self._jobs[event.job_id] = gap.job
            job.job_id = event.job_id
        if job is None:
            job = self._jobs[event.job_id] = _Job(event.job_id, event.now, event.now)
            if len(self._jobs) > MAX_JOBS:
                oldest = next(iter(self._jobs.values()))
                self._end_job(oldest, "forgotten", oldest.last_s)
        return job

    def _turn_goes_on(self, event: JobEvent) -> None:
        turn = self._turns.get(event.req_id or "")
        if turn is not None:
            turn.recomputed_tokens = event.recomputed_tokens

    def _turn_ended(self, event: JobEvent) -> None:
        self._turn_goes_on(event)
        turn = self._turns.get(event.req_id or "")
        if turn is None or event.req_id is None:
            return
        job = turn.job
        if job.outcome is None:
            self._gaps[event.req_id] = job.gaps[event.req_id] = _Gap(event.req_id, event.turn, event.now, job)
        if len(job.gaps) > MAX_GAPS:
            self._end_gap(next(iter(job.gaps.values())), "forgotten", event.now)

    def _request_ended(self, request: EndedRequest) -> None:
        turn = self._turns.pop(request.request_id, None)
        job = turn.job if turn is not None else None
        client = self._client_context(request)
        if job is not None and job.span is None:
            self._begin_job(job, request, client)
        self._emit_turn(request, turn, client)
        if job is not None:
            self._add_up(job, request, turn)
            job.num_open_turns -= 1
            job.last_s = max(job.last_s, request.ended_s)
            self._emit_job(job)

    def _begin_job(self, job: _Job, request: EndedRequest, client: Context | None) -> None:
        """Makes the job's span, below the client's if any; a sub-agent's else below that of its parent."""
        job.began_s = min(job.began_s, request.arrival_s)
        above = Context()
        if request.parent_job is not None:
            job.agent = {"gen_ai.agent.id": job.job_id, "continuum.job.parent": request.parent_job}
            parent = self._jobs.get(request.parent_job)
            if parent is not None and parent.span is not None:
                above = set_span_in_context(parent.span, above)
        job.span = self._begin("job", client or above, job.began_s, SpanKind.INTERNAL, {})

    @staticmethod
    def _add_up(job: _Job, request: EndedRequest, turn: _Turn | None) -> None:
        job.prompt_tokens += request.num_prompt_tokens
        job.output_tokens += request.num_output_tokens
        job.cached_tokens += request.num_cached_tokens
        job.recomputed_tokens += turn.recomputed_tokens if turn is not None else 0
        scheduled_s = request.ended_s if request.first_scheduled_s is None else request.first_scheduled_s
        job.queued_s += scheduled_s - request.arrival_s

    def _client_context(self, request: EndedRequest) -> Context | None:
        """The client's own span; None if it sent none or an invalid one."""
        if request.traceparent is None:
            return None
        return self._w3c.extract({"traceparent": request.traceparent}, Context()) or None

    def _emit_turn(self, request: EndedRequest, turn: _Turn | None, client: Context | None) -> None:
        """Makes the spans of the turn and its phases, below the client's span if any, else the job's."""
        job_span = turn.job.span if turn is not None else None
        parent = client or (set_span_in_context(job_span, Context()) if job_span is not None else Context())
        operation = "chat" if request.is_chat else "text_completion"
        span = self._begin(
            f"{operation} {self._model_name}",
            parent,
            request.arrival_s,
            SpanKind.SERVER,
            {"gen_ai.operation.name": operation, **self._turn_attributes(request, turn)},
            [Link(job_span.get_span_context())] if client is not None and job_span is not None else [],
        )
        if request.error is not None:
            span.set_status(Status(StatusCode.ERROR, request.error))
            span.set_attribute("error.type", request.finish_reason)
        self._emit_phases(request, set_span_in_context(span, Context()))
        span.end(self._ns(request.ended_s))

    def _emit_phases(self, request: EndedRequest, turn: Context) -> None:
        """Makes a span for each phase that the request reached."""
        began = (request.arrival_s, request.first_scheduled_s, request.first_token_s)
        ended = (*began[1:], request.ended_s)
        for name, began_s, ended_s in zip(PHASES, began, ended, strict=True):
            if began_s is not None:
                self._span(name, turn, began_s, request.ended_s if ended_s is None else ended_s)

    def _turn_attributes(self, request: EndedRequest, turn: _Turn | None) -> Attributes:
        attributes: Attributes = {
            "gen_ai.provider.name": "continuum",
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.temperature,
            "gen_ai.request.top_p": request.top_p,
            "gen_ai.request.id": request.request_id,
            "gen_ai.response.id": request.external_id,
            "gen_ai.response.finish_reasons": [request.finish_reason],
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "gen_ai.usage.output_tokens": request.num_output_tokens,
            **_cache_usage(request.num_prompt_tokens, request.num_cached_tokens),
            "continuum.turn.loaded_tokens": request.num_loaded_tokens,
            "continuum.turn.preemptions": request.num_preemptions,
            **_latencies(request),
        }
        if turn is not None:
            attributes["gen_ai.conversation.id"] = turn.job.job_id
            attributes |= turn.job.agent
            attributes["continuum.turn.number"] = turn.number
            attributes["continuum.turn.recomputed_tokens"] = turn.recomputed_tokens
        return attributes

    # ---- gaps ----

    def _tools_started(self, event: JobEvent) -> None:
        gap = self._gaps.get(event.req_id or "")
        if gap is not None:
            gap.tools = event.tools

    def _client_reported(self, event: JobEvent) -> None:
        gap = self._gaps.get(event.req_id or "")
        if gap is None:
            return
        gap.tools = gap.tools or event.tools
        attributes: Attributes = {}
        if event.reported_remaining_s is not None:
            attributes["continuum.gap.reported_remaining_s"] = event.reported_remaining_s
        gap.notes.append(_Note(event.kind, event.now, attributes))

    def _pin_event(self, event: PinEvent) -> None:
        gap = self._gaps.get(event.req_id)
        if gap is None:
            return
        if event.pin_id is not None:
            gap.pin_id = event.pin_id
        note = _pin_attributes(event)
        gap.notes.append(_Note(f"pin_{event.kind}", event.now, note))
        if event.kind in ("created", "refused", "ended"):
            gap.pin_open = event.kind == "created"
        gap.pin.update(note)
        if event.kind == "ended" and gap.ended_s is not None:
            self._emit_gap(gap)

    def _end_gap(self, gap: _Gap, outcome: str, ended_s: float) -> None:
        """Ends the gap; its span is made once its pin has ended, too, which may be a little later."""
        gap.ended_s = ended_s
        gap.outcome = outcome
        gap.job.gaps.pop(gap.request_id, None)
        gap.job.last_s = max(gap.job.last_s, ended_s)
        if not gap.pin_open:
            self._emit_gap(gap)

    def _emit_gap(self, gap: _Gap) -> None:
        self._gaps.pop(gap.request_id, None)
        if not gap.has_span or gap.ended_s is None or gap.job.span is None:
            return
        attributes: Attributes = {
            "gen_ai.conversation.id": gap.job.job_id,
            **gap.job.agent,
            "gen_ai.request.id": gap.request_id,
            "continuum.turn.number": gap.turn,
            "continuum.gap.tools": gap.tools,
            "continuum.gap.outcome": gap.outcome,
            **gap.pin,
        }
        if len(gap.tools) == 1:
            attributes["gen_ai.tool.name"] = gap.tools[0].partition("/")[0]
        job = set_span_in_context(gap.job.span, Context())
        name = "tool_gap" if gap.tools else "gap"
        span = self._begin(name, job, gap.began_s, SpanKind.INTERNAL, attributes)
        for note in gap.notes:
            span.add_event(note.name, note.attributes, self._ns(note.at_s))
        span.end(self._ns(gap.ended_s))

    # ---- jobs ----

    def _job_ended(self, event: JobEvent) -> None:
        job = self._jobs.get(event.job_id)
        if job is not None:
            self._end_job(job, event.kind, event.now)

    def _end_job(self, job: _Job, outcome: str, now_s: float) -> None:
        """Ends a job; its span ends with its last turn if one is still running."""
        self._jobs.pop(job.job_id, None)
        job.outcome = outcome
        for gap in list(job.gaps.values()):
            self._end_gap(gap, outcome, now_s if gap.tools else gap.began_s)
        self._emit_job(job)

    def _emit_job(self, job: _Job) -> None:
        if job.outcome is None or job.num_open_turns > 0 or job.span is None:
            return
        job.span.set_attributes(
            {
                "gen_ai.conversation.id": job.job_id,
                **job.agent,
                "gen_ai.usage.input_tokens": job.prompt_tokens,
                "gen_ai.usage.output_tokens": job.output_tokens,
                **_cache_usage(job.prompt_tokens, job.cached_tokens),
                "continuum.job.outcome": job.outcome,
                "continuum.job.turns": job.num_turns,
                "continuum.job.recomputed_tokens": job.recomputed_tokens,
                "continuum.job.queued_s": job.queued_s,
                "continuum.job.tools_s": job.tools_s,
            }
        )
        job.span.end(self._ns(job.last_s))

    # ---- spans ----

    def _begin(
        self,
        name: str,
        parent: Context,
        began_s: float,
        kind: SpanKind,
        attributes: Mapping[str, str | int | float | Sequence[str]],
        links: Sequence[Link] = (),
    ) -> Span:
        return self._tracer.start_span(name, parent, kind, attributes, links, self._ns(began_s))

    def _span(self, name: str, parent: Context, began_s: float, ended_s: float) -> None:
        self._begin(name, parent, began_s, SpanKind.INTERNAL, {}).end(self._ns(ended_s))

    def _ns(self, seconds: float) -> int:
        return self._epoch_ns + round(seconds * 1e9)


def _cache_usage(prompt_tokens: int, cached_tokens: int) -> Attributes:
    """What was read from the prefix cache and what was written to it: the same tokens as in ``usage``."""
    return {
        "gen_ai.usage.cache_read.input_tokens": cached_tokens,
        "gen_ai.usage.cache_write.input_tokens": max(0, prompt_tokens - cached_tokens),
    }


def _latencies(request: EndedRequest) -> Attributes:
    """Durations in seconds under V1's names, for the phases that the request reached."""
    arrival_s = request.arrival_s
    scheduled_s = request.first_scheduled_s
    token_s = request.first_token_s
    latencies: Attributes = {"gen_ai.latency.e2e": request.ended_s - arrival_s}
    if scheduled_s is not None:
        latencies["gen_ai.latency.time_in_queue"] = scheduled_s - arrival_s
    if scheduled_s is not None and token_s is not None:
        latencies["gen_ai.latency.time_to_first_token"] = token_s - arrival_s
        latencies["gen_ai.latency.time_in_model_prefill"] = token_s - scheduled_s
        latencies["gen_ai.latency.time_in_model_decode"] = request.ended_s - token_s
        latencies["gen_ai.latency.time_in_model_inference"] = request.ended_s - scheduled_s
    return latencies


def _pin_attributes(event: PinEvent) -> Attributes:
    """Attributes of the event, without those that are not set."""
    attributes = {
        "continuum.pin.id": event.pin_id,
        "continuum.pin.blocks": event.num_blocks if event.kind != "shrunk" else None,
        "continuum.pin.lost_blocks": event.num_blocks if event.kind == "shrunk" else None,
        "continuum.pin.ttl_s": event.ttl_s,
        "continuum.pin.rule": event.rule,
        "continuum.pin.reason": event.reason,
        "continuum.pin.outcome": event.cause,
        "continuum.pin.held_s": event.held_s,
    }
    return {name: value for name, value in attributes.items() if value is not None}
