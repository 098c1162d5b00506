"""Readers of traces of async scheduling assign times and counts to the right step."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from engine.core.request import RequestStatus
from engine.watch.digest import Digest
from engine.watch.feed import Watched
from eval.sim.step_samples import step_samples
from eval.trace.analysis.jobs import GapLife, PinLife, TurnLife
from eval.trace.analysis.life_reader import LifeReader
from eval.trace.analysis.pool import StepLife
from tests.core.engine_room import EngineRoom
from tracing.events import StepDecision, StepOutput, StepSnapshot, TraceEvent
from tracing.invariants import all_checks
from tracing.tracer import Tracer


@dataclass(frozen=True, slots=True)
class Sink:
    seen: list[TraceEvent]

    def emit(self, event: TraceEvent) -> None:
        self.seen.append(event)


class Recording:
    """A crowded room, its trace, and a reader's lives of its turns."""

    def __init__(self, *, async_scheduling: bool) -> None:
        self.events: list[TraceEvent] = []
        self.turns: dict[str, TurnLife] = {}
        tracer = Tracer(self)
        self.room = EngineRoom(
            async_scheduling=async_scheduling, tracer=tracer, num_blocks=13, max_num_batched_tokens=8
        )
        self.emit(self.room.begin_trace(from_start=True))
        self.requests = [
            self.room.add(f"r{number}", [number] * (5 + 3 * number), max_tokens=6, stops_after=number + 1)
            for number in range(5)
        ]
        self.room.run()
        reader = LifeReader(self)
        for event in self.events:
            reader.take(event)
        reader.close()

    def emit(self, event: TraceEvent) -> None:
        self.events.append(event)

    def turn(self, turn: TurnLife) -> None:
        self.turns[turn.req_id] = turn

    def gap(self, gap: GapLife) -> None: ...

    def pin(self, pin: PinLife) -> None: ...

    def step(self, step: StepLife) -> None: ...

    def finished(self, job_id: str, now: float) -> None: ...


def test_a_turns_first_token_came_when_it_came() -> None:
    """The first token's time is that of its own step's result, not of the step before."""
    recording = Recording(async_scheduling=True)
    told = {req_id: turn.first_token_s for req_id, turn in recording.turns.items()}
    assert told == {request.request_id: request.first_token_time for request in recording.requests}


def test_tokens_that_were_dropped_are_not_counted() -> None:
    """Tokens that a step computed after a request's stop are not counted."""
    recording = Recording(async_scheduling=True)
    digest = Digest()
    digest.take([event for event in recording.events if isinstance(event, Watched)])
    assert digest.totals.generated_tokens == sum(map(len, recording.room.received.values()))


def test_a_steps_time_is_its_own() -> None:
    """A step of the room takes 10 ms, however far ahead it was decided."""
    events = Recording(async_scheduling=True).events
    samples = list(step_samples(events))
    num_decided = sum(isinstance(event, StepDecision) and bool(event.tokens) for event in events)
    assert len(samples) == num_decided
    assert {round(sample.seconds or 0.0, 6) for sample in samples} == {0.01}


def test_a_result_of_a_step_before_the_trace_is_none_of_its_steps() -> None:
    """A trace begins while a step is under way, and the next step is decided before its result."""
    seen: list[TraceEvent] = []
    tracer = Tracer()
    room = EngineRoom(async_scheduling=True, tracer=tracer)
    room.add("a", [1] * 5, max_tokens=9)
    room.plan_next()
    tracer.add(Sink(seen))
    room.begin_trace(from_start=False)
    room.plan_next()
    room.take_output()
    room.take_output()
    decided = [event.step for event in seen if isinstance(event, StepDecision)]
    told = [event.step for event in seen if isinstance(event, StepOutput)]
    assert (decided, told) == ([0], [-1, 0])


def test_blocks_that_a_step_under_way_still_uses_are_no_fault() -> None:
    """The only request is aborted while its step runs: in the next snapshot no request holds its blocks."""
    recording = Recording(async_scheduling=True)
    room = recording.room
    room.add("alone", [9] * 8, max_tokens=6)
    room.step()
    room.scheduler.finish_requests(["alone"], RequestStatus.FINISHED_ABORTED, room.clock.now())
    room.add("next", [8] * 8, max_tokens=2)
    room.run()
    assert any(
        isinstance(event, StepSnapshot) and not event.running and event.free_blocks < event.total_blocks
        for event in recording.events
    )
    faults = (check.faults(event) for check in all_checks() for event in recording.events)
    assert list(chain.from_iterable(faults)) == []
