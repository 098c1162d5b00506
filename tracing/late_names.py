"""Jobs that their clients named late: a whole trace with each of them under one id.

A job without a name is recorded under an inferred id. Where its client names it in a later turn, that turn's
arrival has both ids; a reader of a whole file can use the name from the first record on.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from tracing.events import JobEvent, PinEvent, PrefixCacheEvent, TraceEvent
from tracing.job_ids import may_be_inferred
from tracing.reader import UNREADABLE, TraceReport, read_trace, trace_lines

_MARK = b'"earlier_id":'
"""Lines without it need not be decoded."""


def read_named_trace(path: str | Path, report: TraceReport | None = None) -> Iterator[TraceEvent]:
    """Read as ``read_trace`` does, with its progress, but with a job's late name in all its records."""
    names: dict[str, str] | None = None
    for event in read_trace(path, report, progress=True):
        if isinstance(event, JobEvent | PinEvent | PrefixCacheEvent):
            job_id = event.job_id
            if job_id is not None and may_be_inferred(job_id):
                if names is None:
                    names = late_names(path)  # a reading of its own, which most traces can do without
                event.job_id = names.get(job_id, job_id)
        yield event


def late_names(path: str | Path) -> dict[str, str]:
    """Late names by the inferred id. TraceError and OSError as ``read_trace`` raises them."""
    if Path(path).is_fifo():
        return {}  # it can be read once only
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
