"""Our own scheduler's trace as jobs: what the engine saw of each job, so that it can be replayed differently.

The engine measured token counts, arrivals and the times between turns: a gap runs from the end of a turn to
the arrival of the next and includes the client's own time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Protocol

from eval.errors import WorkloadError
from eval.trace.analysis.jobs import GapLife, PinLife, TurnEnd, TurnLife
from eval.trace.analysis.life_reader import LifeReader
from eval.trace.analysis.pool import StepLife
from eval.workloads.call_arguments import tool_run
from eval.workloads.checks import JobChecks
from eval.workloads.job import GapKind, Job, ToolRun, Turn
from eval.workloads.jsonl import Place
from tracing.events import JobEvent, SignalEvent, TraceEvent, TraceHeader
from tracing.invariants import TELL_OF_PINS
from tracing.late_names import read_named_trace
from tracing.reader import TraceError, TraceReport


@dataclass(slots=True)
class _Served:
    """A turn that was answered."""

    job_id: str
    arrived_s: float
    ended_s: float
    num_prompt_tokens: int
    num_known_tokens: int
    num_output_tokens: int
    calls: tuple[ToolRun, ...] = ()


class _Turns(Protocol):
    """Collects the turns of jobs from the events of a trace."""

    num_unanswered: int

    def take(self, event: TraceEvent) -> None: ...

    def close(self) -> None: ...

    def served(self) -> list[_Served] | None:
        """Returns None if no job was named."""


class _Told:
    """Jobs from the records of a policy that reports jobs."""

    def __init__(self) -> None:
        self.num_unanswered = 0
        self._any_job = False
        self._arrived: dict[str, float] = {}
        self._served: dict[str, _Served] = {}

    def take(self, event: TraceEvent) -> None:
        if not isinstance(event, JobEvent) or event.req_id is None:
            return
        self._any_job = True
        if event.kind == "turn_arrived":
            self._arrived[event.req_id] = event.now
        elif event.kind == "turn_ended" and event.req_id in self._arrived:
            self._served[event.req_id] = _Served(
                event.job_id,
                self._arrived[event.req_id],
                event.now,
                event.num_prompt_tokens,
                event.num_known_tokens,
                event.num_output_tokens,
            )
        elif event.kind == "tools_started" and event.req_id in self._served:
            self._served[event.req_id].calls = tuple(map(_call, event.tools))

    def close(self) -> None:
        self.num_unanswered = len(self._arrived) - len(self._served)

    def served(self) -> list[_Served] | None:
        return list(self._served.values()) if self._any_job else None


class _Seen:
    """Jobs under a policy without jobs: from the requests' own job ids, like the analysis of traces."""

    def __init__(self) -> None:
        self.num_unanswered = 0
        self._any_job = False
        self._lives = LifeReader(self)
        self._served: dict[str, _Served] = {}

    def take(self, event: TraceEvent) -> None:
        if isinstance(event, SignalEvent) and event.kind == "tool_gap_started":
            self._called(event)
        self._lives.take(event)

    def _called(self, event: SignalEvent) -> None:
        """Adds the calls to the turn that ended before."""
        turn = self._served.get(event.req_id or "")
        if turn is not None:
            turn.calls = tuple(tool_run(call.name, call.arguments) for call in event.calls)

    def close(self) -> None:
        self._lives.close()

    def served(self) -> list[_Served] | None:
        return list(self._served.values()) if self._any_job else None

    def turn(self, turn: TurnLife) -> None:
        if turn.job_id is None:
            return
        self._any_job = True
        if turn.end is not TurnEnd.ENDED or not turn.arrival_told:
            self.num_unanswered += 1
            return
        self._served[turn.req_id] = _Served(
            turn.job_id,
            turn.arrived_s,
            turn.ended_s,
            turn.num_prompt_tokens,
            turn.num_known_tokens,
            turn.num_output_tokens,
        )

    def gap(self, gap: GapLife) -> None:
        pass

    def pin(self, pin: PinLife) -> None:
        pass

    def step(self, step: StepLife) -> None:
        pass

    def finished(self, job_id: str, now: float) -> None:
        pass


def read_scheduler_trace(path: Path) -> tuple[list[Job], list[str]]:
    """Reads one job per job id that ended a turn, in the order of first arrivals.

    Turns that overlapped are put one after another. A trace that is cut off in its last line is read up to
    there, with a note; any other invalid line is a WorkloadError that names it.
    """
    report = TraceReport()
    served, num_unanswered = _served_turns(path, report)
    notes: list[str] = []
    if report.cut_line is not None:
        notes.append(f"the trace was CUT OFF in line {report.cut_line} and read up to there")
    elif report.end is None:
        notes.append("the trace was not closed in order: its end may be missing")
    elif report.end.dropped:
        notes.append(f"{report.end.dropped} events are MISSING: they came faster than they could be written")
    if num_unanswered:
        notes.append(f"{num_unanswered} turns were left out: they were not answered to the end")
    num_overlaps = sum(b.arrived_s < a.ended_s for turns in served.values() for a, b in pairwise(turns))
    if num_overlaps:
        notes.append(f"{num_overlaps} turns began while one of their job still ran; they follow it here")
    began_s = min((turns[0].arrived_s for turns in served.values()), default=0.0)
    checks = JobChecks()
    place = Place(path)
    return [
        checks.check(_job(job_id, turns, path.stem, began_s), place) for job_id, turns in served.items()
    ], notes


def _served_turns(path: Path, report: TraceReport) -> tuple[dict[str, list[_Served]], int]:
    """Returns the answered turns of each job in order of arrival, and the number of unanswered ones."""
    try:
        turns = _gathered(read_named_trace(path, report))
    except TraceError as error:
        raise WorkloadError(f"{error}.") from error
    except OSError as error:
        raise WorkloadError(f"Cannot read the workload {path}: {error.strerror}.") from error
    served = turns.served()
    if served is None:
        raise WorkloadError(
            f"{path}: the trace names no jobs: its requests came without job ids, which only "
            "--scheduling-policy continuum infers."
        )
    by_job: dict[str, list[_Served]] = {}
    for turn in sorted(served, key=lambda turn: turn.arrived_s):
        by_job.setdefault(turn.job_id, []).append(turn)
    return by_job, turns.num_unanswered


def _gathered(events: Iterator[TraceEvent]) -> _Turns:
    header = next(events)
    tells = isinstance(header, TraceHeader) and header.policy in TELL_OF_PINS
    turns: _Turns = _Told() if tells else _Seen()
    for event in chain([header], events):
        turns.take(event)
    turns.close()
    return turns


def _job(job_id: str, served: Sequence[_Served], source: str, began_s: float) -> Job:
    turns: list[Turn] = []
    for index, turn in enumerate(served):
        following = served[index + 1] if index + 1 < len(served) else None
        known = turns[-1].input_tokens + turns[-1].output_tokens if turns else 0
        gap_s = None if following is None else round(max(0.0, following.arrived_s - turn.ended_s), 6)
        calls = turn.calls
        if len(calls) == 1:
            calls = (replace(calls[0], seconds=gap_s),)
        turns.append(
            Turn(
                input_tokens=turn.num_prompt_tokens,
                prefix_tokens=min(known, turn.num_known_tokens, turn.num_prompt_tokens),
                output_tokens=turn.num_output_tokens,
                gap_kind=_gap_kind(turn, following),
                gap_s=gap_s,
                gap_measured=gap_s is not None,
                calls=() if following is None else calls,
            )
        )
    arrival_s = round(served[0].arrived_s - began_s, 6)
    return Job(job_id=job_id, source=source, turns=tuple(turns), arrival_s=arrival_s)


def _gap_kind(turn: _Served, following: _Served | None) -> GapKind:
    if following is None:
        return GapKind.END
    return GapKind.TOOL if turn.calls else GapKind.UNKNOWN


def _call(key: str) -> ToolRun:
    """Parses ``bash/git/status`` as the tool ``bash`` running ``git status``."""
    tool, _, command = key.partition("/")
    return ToolRun(tool, command.replace("/", " ") or None)
