"""``continuum trace validate``: checks a file against docs/trace.md, line by line. It does not know the
engine."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tracing.events import TraceEnd, TraceEvent, TraceGap
from tracing.invariants import all_checks
from tracing.line_limits import check_numbers
from tracing.plain_text import plain_name
from tracing.reader import UNREADABLE, TraceError, TraceLine, TraceReport, note_cut, trace_lines

MAX_SHOWN = 20
"""Maximum number of faults that are shown; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of a line."""

    place: str
    """File and line."""
    what: str


@dataclass(slots=True)
class Validation:
    """Findings about a trace."""

    report: TraceReport = field(default_factory=TraceReport)
    num_records: dict[str, int] = field(default_factory=dict)
    """Number of records by type."""
    faults: list[Fault] = field(default_factory=list)
    """The first ``MAX_SHOWN`` faults."""
    num_faults: int = 0


def validate(path: Path) -> Validation:
    """Reads a whole trace and checks the rules; TraceError if it cannot be read at all."""
    validation = Validation()
    for fault in _faults(path, validation):
        validation.num_faults += 1
        if validation.num_faults <= MAX_SHOWN:
            validation.faults.append(fault)
    return validation


def _faults(path: Path, validation: Validation) -> Iterator[Fault]:
    decoder = msgspec.json.Decoder(TraceEvent)
    checks = all_checks()
    for line in trace_lines(path, validation.report, progress=True):
        event = _decoded(decoder, line, validation.report)
        if event is None:
            return
        if isinstance(event, Fault):
            yield event
            continue
        _count(event, validation)
        if isinstance(event, TraceGap):
            for check in checks:
                check.forget()
        for check in checks:
            for what in check.faults(event):
                yield Fault(line.place, what)


def _decoded(
    decoder: msgspec.json.Decoder[TraceEvent], line: TraceLine, report: TraceReport
) -> TraceEvent | Fault | None:
    """Decodes a line; returns None if it is incomplete."""
    try:
        event = decoder.decode(line.content)
        check_numbers(line.content)
        return event
    except UNREADABLE as error:
        if line.may_be_cut:
            note_cut(line, report)
            return None
        return Fault(line.place, f"not a trace event: {error}")


def _count(event: TraceEvent, validation: Validation) -> None:
    name = str(type(event).__struct_config__.tag)
    validation.num_records[name] = validation.num_records.get(name, 0) + 1
    validation.report.num_events += 1
    validation.report.end = event if isinstance(event, TraceEnd) else None


# ---- the command ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="Trace, any file of a rotated one, or a folder"
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the findings; returns 1 if a rule is broken."""
    try:
        validation = validate(arguments.trace)
    except OSError as error:
        raise TraceError(f"{arguments.trace}: cannot be read: {error.strerror or error}") from error
    print("\n".join(map(plain_name, report_lines(arguments.trace, validation))))
    return 1 if validation.num_faults else 0


def report_lines(path: Path, validation: Validation) -> Iterator[str]:
    report = validation.report
    files = "1 file" if report.num_parts == 1 else f"{report.num_parts} files"
    yield f"{path}: {report.num_events:,} records in {files}"
    width = max(map(len, validation.num_records), default=0)
    for name, count in sorted(validation.num_records.items()):
        yield f"  {name:<{width}} {count:>12,}"
    yield from _remarks(report, validation.num_records.get("gap", 0))
    for fault in validation.faults:
        yield f"{fault.place}: {fault.what}."
    if validation.num_faults > len(validation.faults):
        yield f"... and {validation.num_faults - len(validation.faults):,} more."
    yield (
        "Every rule is kept."
        if not validation.num_faults
        else f"NOT VALID: {validation.num_faults:,} faults."
    )


def _remarks(report: TraceReport, num_gaps: int) -> Iterator[str]:
    """Yields notes on the trace that are not faults."""
    if report.num_events_before:
        yield f"Its first {report.num_events_before:,} events are in files that are no longer there."
    if report.cut_line is not None:
        yield f"Cut off in line {report.cut_line} of its last file: {report.cut_bytes:,} bytes are lost."
    elif report.end is None:
        yield "It was not closed in order: its end is missing, or it is still being written."
    elif report.end.dropped:
        yield f"{report.end.dropped:,} events are missing: they came faster than they could be written."
    if num_gaps:
        yield f"After each of its {num_gaps:,} gaps, what came before is unknown."
