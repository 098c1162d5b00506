"""Reads a whole trace with one id for each job, although clients may name their jobs late.

A job without a name is recorded under an inferred id. When its client names it in a later turn, the arrival
of that turn has both ids; a reader of a whole file can use the name from the first record on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tracing.events import JobEvent, PinEvent, PrefixCacheEvent, TraceEvent
from tracing.job_ids import may_be_inferred
from tracing.reader import UNREADABLE, TraceReport, read_trace, trace_lines

_MARK = b'"earlier_id":'
"""Lines without this need not be decoded."""


def read_named_trace(path: str | Path, report: TraceReport | None = None) -> Iterator[TraceEvent]:
    """Reads like ``read_trace``, with its progress, but replaces a job's inferred id by its late name in all
    records."""
    names: dict[str, str] | None = None
    for event in read_trace(path, report, progress=True):
        if isinstance(event, JobEvent | PinEvent | PrefixCacheEvent):
            job_id = event.job_id
            if job_id is not None and may_be_inferred(job_id):
                if names is None:
                    names = late_names(path)  # an additional pass, which most traces do not need
                event.job_id = names.get(job_id, job_id)
        yield event


def late_names(path: str | Path) -> dict[str, str]:
    """Returns late names by inferred id. Raises TraceError and OSError like ``read_trace``."""
    if Path(path).is_fifo():
        return {}  # it can be read only once
    decoder = msgspec.json.Decoder(TraceEvent)
    names: dict[str, str] = {}
    for line in trace_lines(path, TraceReport()):
        if _MARK not in line.content:
            continue
        try:
            event = decoder.decode(line.content)
        except UNREADABLE:
            continue  # the reader of all lines reports what is wrong with it
        if isinstance(event, JobEvent) and event.earlier_id is not None:
            names[event.earlier_id] = event.job_id
    return names
