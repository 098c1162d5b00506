"""Feeds the inputs of a trace to its scheduler and policy, and compares every event."""

from __future__ import annotations

import sys
import time
import typing
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from eval.trace.replay.difference import Difference, first_difference
from eval.trace.replay.errors import NotReplayableError, check_tells_engine
from eval.trace.replay.recorded_engine import RecordedEngine
from tracing.events import (
    InputEvent,
    JobEvent,
    PinEvent,
    StepDecision,
    TraceEnd,
    TraceEvent,
    TraceGap,
    TraceHeader,
)
from tracing.reader import TraceError, TraceReport, read_trace

INPUTS = typing.get_args(InputEvent)
NOT_OF_THE_ENGINE = {
    *("wall_time_s", "monotonic_s", "from_start", "program", "machine", "part", "num_events_before"),
}
"""Header fields that the engine was not made from."""


@dataclass(slots=True)
class ReplayResult:
    """The progress and the findings of a replay."""

    num_events: int = 1
    """Events compared, including the header."""
    counts: Counter[type[TraceEvent]] = field(default_factory=Counter)
    difference: Difference | None = None
    missing: int = 0
    """Number of events missing in the trace where the replay had to stop; 0: it reached the end."""
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def num_steps(self) -> int:
        return self.counts[StepDecision]

    @property
    def whole(self) -> bool:
        """Whether every decision in the trace was repeated."""
        return self.difference is None and not self.missing

    def __str__(self) -> str:
        done = (
            f"{self.num_steps:,} steps, {self.counts[PinEvent]:,} pin events, "
            f"{self.counts[JobEvent]:,} job events"
        )
        lines = [f"{done}: no difference ({self.num_events:,} events in {self.seconds:.1f} s)"]
        if self.difference is not None:
            lines = [f"{done}, and then a difference:", str(self.difference)]
        elif self.missing:
            lines.append(
                f"STOPPED there: {self.missing:,} events are missing, they came faster than they could be "
                "written; what follows cannot be replayed"
            )
        return "\n".join([*lines, *self.notes])


def replay(path: Path) -> ReplayResult:
    """Replays a whole trace, with progress on stderr. TraceError, a sentence, if it cannot be replayed."""
    report = TraceReport()
    events = read_trace(path, report)
    header = next(events)
    assert isinstance(header, TraceHeader), "the reader has checked it"
    result = ReplayResult()
    started = time.monotonic()
    try:
        _check_begins(header, report)
        engine = _engine(header)
        compare(engine, events, result)
    except NotReplayableError as error:
        raise TraceError(f"{path}, event {result.num_events + 1:,}: {error}") from error
    result.seconds = time.monotonic() - started
    if result.difference is not None:
        result.notes.append(_written_elsewhere(header, engine.header))
    elif result.whole and report.cut_line is not None:
        result.notes.append(f"the trace was CUT OFF in line {report.cut_line:,} and replayed up to there")
    elif result.whole and report.end is None:
        result.notes.append("the trace was not closed in order: its end may be missing")
    return result


def _written_elsewhere(before: TraceHeader, now: TraceHeader) -> str:
    """Describes other differences between the program that wrote the trace and this one."""
    if not before.machine:
        return "The trace does not say on what machine it was written."
    was = {"program": before.program, **before.machine}
    here = {"program": now.program, **now.machine}
    names = [name for name in {**was, **here} if was.get(name) != here.get(name)]
    if not names:
        return f"It was written by the same {', '.join(was)} as this program runs with."
    differing = (f"{name}: {was.get(name, 'unknown')}, now {here.get(name, 'unknown')}" for name in names)
    return f"It was written in an environment other than this program's ({'; '.join(differing)})."


def _check_begins(header: TraceHeader, report: TraceReport) -> None:
    if report.num_events_before:
        raise NotReplayableError(
            "the first parts of the trace are gone: it can be analyzed, but not replayed"
        )
    if not header.from_start:
        raise NotReplayableError(
            "the trace was switched on while the engine ran, so what came before is not known: it can be "
            "analyzed, but not replayed"
        )


def _engine(header: TraceHeader) -> RecordedEngine:
    check_tells_engine(header)
    engine = RecordedEngine(header)
    for name in set(header.__struct_fields__) - NOT_OF_THE_ENGINE:
        before = getattr(header, name)
        now = getattr(engine.header, name)
        if before != now:
            raise NotReplayableError(f"the header's {name} is {before!r}, but this program's is {now!r}")
    return engine


def compare(engine: RecordedEngine, events: Iterable[TraceEvent], result: ReplayResult) -> None:
    """Replays all events after the header: up to the end, the first difference, or the first gap."""
    group: list[TraceEvent] = []
    step = -1
    with tqdm(unit=" steps", file=sys.stderr, disable=None, leave=False) as bar:
        for event in events:
            if isinstance(event, TraceGap):
                result.missing = event.dropped
                return
            if isinstance(event, TraceEnd):
                break
            group.append(event)
            if not isinstance(event, INPUTS):
                continue
            if isinstance(event, StepDecision):
                step = event.step
                bar.update()
            found = first_difference(group, engine.take(event))
            if found is not None:
                place, recorded, now = found
                number = result.num_events + 1 + place
                result.difference = Difference(step, number, event, recorded, now)
                return
            result.num_events += len(group)
            result.counts.update(map(type, group))
            group.clear()
    if group:
        result.notes.append(f"the last {len(group)} events are of an input that is not in the trace")
