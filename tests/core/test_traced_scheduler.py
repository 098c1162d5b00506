"""The trace wraps the scheduler: it records every input, and only while there is a sink."""

from __future__ import annotations

import inspect

import pytest

from engine.core.scheduler import Scheduler
from engine.core.traced_scheduler import READS, TracedScheduler
from tests.core.engine_room import EngineRoom
from tracing.events import RequestArrived, StepDecision, StepOutput, StepSnapshot, TraceEvent
from tracing.tracer import Tracer

HALVES = {"begin_step", "plan"}
"""Halves of ``schedule`` that wrappers of the scheduler call instead."""


class Seen:
    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def emit(self, event: TraceEvent) -> None:
        self.events.append(event)


def test_no_input_passes_by_the_trace() -> None:
    """The wrapper overrides every method of the scheduler that takes the time."""
    inputs = {
        name
        for name, method in inspect.getmembers(Scheduler, inspect.isfunction)
        if not name.startswith("_") and "now" in inspect.signature(method).parameters
    }
    assert inputs >= {"schedule", "add_request", "close"}
    assert inputs - HALVES <= vars(TracedScheduler).keys()


def test_each_method_has_a_record_or_reads_only() -> None:
    """A new method of the scheduler must be recorded, or listed as reading only."""
    methods = {name for name in vars(Scheduler) if not name.startswith("_")}
    for_the_start = {"add_parts", "encoder"}
    assert methods - HALVES - for_the_start - READS <= vars(TracedScheduler).keys()
    assert READS - methods <= vars(EngineRoom().scheduler).keys()
    with pytest.raises(AttributeError, match="'add_parts' of a scheduler is not to be used past its trace"):
        _ = TracedScheduler(EngineRoom()._untraced, Tracer()).add_parts


def test_the_wrapper_takes_what_the_scheduler_takes() -> None:
    """Methods of the wrapper have the scheduler's signatures."""
    for name, method in inspect.getmembers(TracedScheduler, inspect.isfunction):
        if not name.startswith("_") and name != "begin_trace":
            assert inspect.signature(method) == inspect.signature(getattr(Scheduler, name)), name


def test_a_trace_comes_and_goes_while_requests_run() -> None:
    """Without a sink nothing is wrapped; traced steps are numbered consecutively."""
    tracer, seen = Tracer(), Seen()
    room = EngineRoom(tracer=tracer)
    room.add("a", [1] * 5, max_tokens=9)
    room.step()
    assert isinstance(room.scheduler, Scheduler)
    for name in ("b", "c"):
        tracer.add(seen)
        assert isinstance(room.scheduler, TracedScheduler)
        room.add(name, [2] * 5)
        room.step()
        tracer.remove(seen)
        room.step()
    assert isinstance(room.scheduler, Scheduler)
    traced = [RequestArrived, StepSnapshot, StepDecision, StepOutput]
    kinds = [type(event) for event in seen.events if type(event) in traced]
    assert kinds == traced * 2
    assert [event.step for event in seen.events if isinstance(event, StepDecision)] == [0, 1]
