"""Reads a trace back as typed events. Knows nothing of what they mean."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from tracing.events import SCHEMA_VERSION, TraceEnd, TraceEvent


class TraceError(Exception):
    """The file is not a trace that this version can read; names the line."""


@dataclass(slots=True)
class TraceReport:
    """What ``read_trace`` found out about the file, complete once the last event has been read."""

    num_events: int = 0
    cut_line: int | None = None
    """Number of a last line that was only half written and has been left out."""
    end: TraceEnd | None = None
    """None if the trace was not closed in order."""


class _AnyHeader(msgspec.Struct):
    """As much of a header as every version of the schema has."""

    type: Literal["header"]
    schema_version: int


def read_trace(path: str | Path, report: TraceReport | None = None) -> Iterator[TraceEvent]:
    """The events of a trace, header first, in the order of the file.

    A last line cut short (the process was killed) is left out and noted in ``report``.
    """
    report = TraceReport() if report is None else report
    decoder = msgspec.json.Decoder(TraceEvent)
    number = 0
    with open(path, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                if number == 1:
                    _check_header(path, line)
                event: TraceEvent = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if number > 1 and not line.endswith(b"\n"):
                    report.cut_line = number
                    return
                raise TraceError(f"{path}, line {number}: not a trace event: {error}") from error
            report.num_events = number
            report.end = event if isinstance(event, TraceEnd) else None
            yield event
    if number == 0:
        raise TraceError(f"{path}, line 1: the file is empty, a trace starts with a header")


def _check_header(path: str | Path, line: bytes) -> None:
    try:
        version = msgspec.json.decode(line, type=_AnyHeader).schema_version
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}, line 1: not the header of a trace: {error}") from error
    if version != SCHEMA_VERSION:
        raise TraceError(
            f"{path}, line 1: schema version {version}, but this program reads version {SCHEMA_VERSION}"
        )
