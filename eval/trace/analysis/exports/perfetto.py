"""Trace Event JSON, for ui.perfetto.dev and chrome://tracing: a process per job with its turns, their phases,
the calls between them and its pins; the engine with its pool and queue as counters.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TextIO

import msgspec

from eval.trace.analysis.exports.export import Silent
from eval.trace.analysis.jobs import GapLife, PinLife, TurnLife
from eval.trace.analysis.pool import StepLife
from tracing.events import TraceEvent, TraceHeader

ENGINE_PID = 1
FIRST_JOB_PID = 2
COUNTER_S = 0.02
"""Shortest interval between counters: a step may take a millisecond, and a day has millions."""
TURNS = 1
GAPS = 1001
PINS = 2001
"""First thread of each kind; where two slices overlap the second is on the next thread."""
_KINDS = {TURNS: "turns", GAPS: "between turns", PINS: "pins"}

Arg = float | int | str | bool | None


class Event(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One entry of ``traceEvents``; times in microseconds."""

    ph: str
    """X: a slice; C: a counter; M: a name."""
    pid: int
    tid: int = 0
    ts: float | None = None
    dur: float | None = None
    name: str
    cat: str | None = None
    args: Mapping[str, Arg] = {}


class _Lanes:
    """Threads of one kind in one process. Slices come in order of their ends; none overlap on a thread."""

    def __init__(self, first: int) -> None:
        self.first = first
        self._ends: list[float] = []

    def place(self, start_s: float, end_s: float) -> tuple[int, bool]:
        """Returns the thread for a slice, and whether the thread is new."""
        for lane, end in enumerate(self._ends):
            if end <= start_s:
                self._ends[lane] = end_s
                return self.first + lane, False
        self._ends.append(end_s)
        return self.first + len(self._ends) - 1, True


class PerfettoExport(Silent):
    """Writes entries as turns, gaps and pins end."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._encoder = msgspec.json.Encoder()
        self._num_events = 0
        self._began_s = 0.0
        self._pids: dict[str | None, int] = {}
        self._lanes: dict[tuple[int, int], _Lanes] = {}
        self._counted_s: float | None = None
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        self._emit(Event(ph="M", pid=ENGINE_PID, name="process_name", args={"name": "engine"}))
        self._emit(Event(ph="M", pid=ENGINE_PID, name="process_sort_index", args={"sort_index": 0}))

    def event(self, event: TraceEvent) -> None:
        if isinstance(event, TraceHeader):
            self._began_s = event.monotonic_s

    def close(self) -> None:
        self._file.write("\n]}\n")

    def notes(self) -> list[str]:
        return [f"{self._num_events:,} events of {len(self._pids):,} jobs"]

    def _emit(self, event: Event) -> None:
        self._file.write(",\n" if self._num_events else "")
        self._file.write(self._encoder.encode(event).decode())
        self._num_events += 1

    def _us(self, now: float) -> float:
        """Returns microseconds, rounded to the nanosecond, so that ends meet beginnings exactly."""
        return round(1e6 * (now - self._began_s), 3)

    def _pid(self, job_id: str | None) -> int:
        pid = self._pids.get(job_id)
        if pid is None:
            pid = self._pids[job_id] = FIRST_JOB_PID + len(self._pids)
            name = "requests of no job" if job_id is None else f"job {job_id}"
            self._emit(Event(ph="M", pid=pid, name="process_name", args={"name": name}))
            self._emit(Event(ph="M", pid=pid, name="process_sort_index", args={"sort_index": pid}))
        return pid

    def _thread(self, pid: int, kind: int, start_s: float, end_s: float) -> int:
        lanes = self._lanes.setdefault((pid, kind), _Lanes(kind))
        tid, new = lanes.place(start_s, end_s)
        if new:
            self._emit(Event(ph="M", pid=pid, tid=tid, name="thread_name", args={"name": _KINDS[kind]}))
            self._emit(Event(ph="M", pid=pid, tid=tid, name="thread_sort_index", args={"sort_index": tid}))
        return tid

    def _slice(
        self, pid: int, tid: int, name: str, cat: str, start_s: float, end_s: float, args: Mapping[str, Arg]
    ) -> None:
        start = self._us(start_s)
        end = self._us(end_s)
        told = {key: value for key, value in args.items() if value is not None}
        self._emit(
            Event(
                ph="X", pid=pid, tid=tid, ts=start, dur=round(end - start, 3), name=name, cat=cat, args=told
            )
        )

    # ---- lives ----

    def turn(self, turn: TurnLife) -> None:
        pid = self._pid(turn.job_id)
        tid = self._thread(pid, TURNS, turn.arrived_s, turn.ended_s)
        name = f"turn {turn.number}" if turn.job_id is not None else turn.req_id
        self._slice(
            pid,
            tid,
            name,
            "turn",
            turn.arrived_s,
            turn.ended_s,
            {
                "request": turn.req_id,
                "end": turn.end.value,
                "prompt_tokens": turn.num_prompt_tokens,
                "output_tokens": turn.num_output_tokens,
                "cached_tokens": turn.cached_tokens,
                "recomputed_tokens": turn.recomputed_tokens,
                "loaded_tokens": turn.loaded_tokens or None,
                "preemptions": turn.num_preemptions or None,
                "ttft_s": turn.ttft_s,
                "memory_s": turn.seconds.memory_s or None,
            },
        )
        for span in turn.spans:
            args = {"memory_s": span.memory_s} if span.memory_s else {}
            self._slice(pid, tid, span.phase.value, "phase", span.start_s, span.end_s, args)

    def gap(self, gap: GapLife) -> None:
        if gap.ended_s is None:
            return
        pid = self._pid(gap.job_id)
        tid = self._thread(pid, GAPS, gap.started_s, gap.ended_s)
        name = gap.called or "client"
        args = {"after": gap.req_id, "before": gap.next_req_id}
        self._slice(pid, tid, name, "tool" if gap.tools else "client", gap.started_s, gap.ended_s, args)

    def pin(self, pin: PinLife) -> None:
        if pin.pin_id is None:
            return
        pid = self._pid(pin.job_id)
        tid = self._thread(pid, PINS, pin.began_s, pin.ended_s)
        self._slice(
            pid,
            tid,
            f"pin {pin.outcome.value.replace('_', ' ')}",
            "pin",
            pin.began_s,
            pin.ended_s,
            {
                "pin": pin.pin_id,
                "blocks": pin.num_blocks,
                "granted_s": pin.granted_s,
                "expected_s": pin.expected_s,
                "rule": pin.rule,
                "reason": pin.reason,
                "revoked_by": pin.revoked_by,
                "shrunk": pin.num_shrinks or None,
                "spared_s": pin.spared_s or None,
            },
        )

    def step(self, step: StepLife) -> None:
        if self._counted_s is not None and step.now - self._counted_s < COUNTER_S:
            return
        self._counted_s = step.now
        pool: dict[str, Arg] = {"running": step.running_blocks, "pinned": step.pinned_blocks}
        if step.empty_blocks is None:
            pool["free"] = step.free_blocks
        else:
            pool["cached"] = step.free_blocks - step.empty_blocks
            pool["free"] = step.empty_blocks
        self._count("KV blocks", step.now, pool)
        self._count("requests", step.now, {"running": step.num_running, "waiting": step.num_waiting})
        self._count("tokens of the step", step.now, {"tokens": step.tokens})

    def _count(self, name: str, now: float, values: Mapping[str, Arg]) -> None:
        self._emit(Event(ph="C", pid=ENGINE_PID, ts=self._us(now), name=name, args=values))
