"""What an export is: it is shown every event of a trace and every life as it ends, and writes lines."""

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
    """One form."""

    def event(self, event: TraceEvent) -> None:
        """Before what it means is told as lives."""

    def close(self) -> None:
        """All has been told."""

    def notes(self) -> list[str]:
        """What the file does not contain, or contains in an unexpected form."""


class Silent:
    """Takes nothing; an export overrides what it wants."""

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
    """Read the whole trace into it; what the trace is. TraceError if it is none."""
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
    """Rows of JSON, one per line."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.num_rows = 0

    def write(self, row: str) -> None:
        self._file.write(row)
        self._file.write("\n")
        self.num_rows += 1
