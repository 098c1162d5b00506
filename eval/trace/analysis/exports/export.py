"""The interface of an export: it gets every event of a trace, and every turn, gap and pin at its end."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, TextIO

from eval.trace.analysis.jobs import GapLife, PinLife
from eval.trace.analysis.life_reader import LifeReader, LifeSink
from eval.trace.analysis.lives import TraceFacts
from eval.trace.analysis.pool import StepLife
from tracing.events import TraceEvent
from tracing.late_names import read_named_trace
from tracing.reader import TraceReport


class Export(LifeSink, Protocol):
    """One format."""

    def event(self, event: TraceEvent) -> None:
        """Takes an event before the lives that it completes."""

    def close(self) -> None:
        """Called after the last event."""

    def notes(self) -> list[str]:
        """Returns what the file does not contain, or contains in an unexpected form."""


class Silent:
    """Ignores everything; an export overrides what it needs."""

    def event(self, event: TraceEvent) -> None:
        pass

    def close(self) -> None:
        pass

    def notes(self) -> list[str]:
        return []

    def step(self, step: StepLife) -> None:
        pass

    def pin(self, pin: PinLife) -> None:
        pass

    def gap(self, gap: GapLife) -> None:
        pass

    def finished(self, job_id: str, now: float) -> None:
        pass


def run_export(trace: Path, export: Export) -> TraceFacts:
    """Reads the whole trace into the export; returns the trace's facts. TraceError if it is not a trace."""
    report = TraceReport()
    reader = LifeReader(export)
    for event in read_named_trace(trace, report):
        export.event(event)
        reader.take(event)
    reader.close()
    export.close()
    assert reader.header is not None, "a trace starts with one"
    return TraceFacts(reader.header, report, reader.began_s or 0.0, reader.now, reader.num_lost)


class JsonLines:
    """Writes rows of JSON, one per line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.num_rows = 0

    def write(self, row: str) -> None:
        self._file.write(row)
        self._file.write("\n")
        self.num_rows += 1
