"""Computes how long a device was idle, from a profiler's trace of what ran on it. Arithmetic only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

DEVICE_WORK = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
HOST_WORK = frozenset({"cpu_op"})
"""Kinds of events in a trace, as torch's profiler names them."""
LAUNCH_GAP_S = 10e-6
"""Gaps up to this separate kernels of one graph or stream; in longer ones the device waits for the host."""


@dataclass(frozen=True, slots=True)
class Span:
    start_s: float
    end_s: float


class _Event(msgspec.Struct):
    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


def read_spans(path: Path, kinds: frozenset[str]) -> list[Span]:
    """Returns the spans of a Chrome trace (microseconds) of these kinds of events."""
    trace = msgspec.json.decode(path.read_bytes(), type=_Trace, strict=False)
    return [Span(each.ts / 1e6, (each.ts + each.dur) / 1e6) for each in trace.events if each.cat in kinds]


@dataclass(frozen=True, slots=True)
class Idle:
    """Idle shares of the time from the first work's start to the last's end."""

    waiting: float
    """Share in gaps that only the host can cause."""
    total: float
    """Share in all gaps."""


def idle_of(spans: Iterable[Span]) -> Idle:
    """Returns the idle shares of a device whose work may overlap."""
    ordered = sorted(spans, key=lambda span: span.start_s)
    elapsed_s = max(span.end_s for span in ordered) - ordered[0].start_s
    gaps_s = list(_gaps(ordered))
    waiting_s = sum(gap for gap in gaps_s if gap > LAUNCH_GAP_S)
    return Idle(waiting_s / elapsed_s, sum(gaps_s) / elapsed_s)


def _gaps(ordered: list[Span]) -> Iterator[float]:
    end_s = ordered[0].start_s
    for span in ordered:
        if span.start_s > end_s:
            yield span.start_s - end_s
        end_s = max(end_s, span.end_s)
