"""Our own scheduler's trace as jobs: what the engine saw of each job, so that it can be run again otherwise.

Token counts, arrivals and the times between turns are measured, by the engine: a gap runs from the end of a
turn to the arrival of the next and holds the client's own time too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from eval.errors import WorkloadError
from eval.workloads.checks import JobChecks
from eval.workloads.job import GapKind, Job, ToolRun, Turn
from eval.workloads.jsonl import Place
from tracing.events import JobEvent
from tracing.reader import TraceError, TraceReport, read_trace


@dataclass(slots=True)
class _Served:
    """A turn that was answered."""

    arrived_s: float
    ended_s: float
    ended: JobEvent
    tools: list[str] = field(default_factory=list)


def read_scheduler_trace(path: Path) -> tuple[list[Job], list[str]]:
    """One job per job id that ended a turn, in the order of first arrivals.

    Turns that overlapped are put one after another. A trace cut off in its last line is read up to there, and
    that is said; any other bad line is a WorkloadError that names it.
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
    """The answered turns of each job in order of arrival, and how many were never answered."""
    arrived: dict[str, JobEvent] = {}
    served: dict[str, _Served] = {}
    any_job = False
    try:
        for event in read_trace(path, report):
            if not isinstance(event, JobEvent) or event.req_id is None:
                continue
            any_job = True
            if event.kind == "turn_arrived":
                arrived[event.req_id] = event
            elif event.kind == "turn_ended" and event.req_id in arrived:
                served[event.req_id] = _Served(arrived[event.req_id].now, event.now, event)
            elif event.kind == "tools_started" and event.req_id in served:
                served[event.req_id].tools = event.tools
    except TraceError as error:
        raise WorkloadError(f"{error}.") from error
    except OSError as error:
        raise WorkloadError(f"Cannot read the workload {path}: {error.strerror}.") from error
    if not any_job:
        raise WorkloadError(
            f"{path}: the trace names no jobs; only --scheduling-policy continuum writes them."
        )
    by_job: dict[str, list[_Served]] = {}
    for turn in sorted(served.values(), key=lambda turn: turn.arrived_s):
        by_job.setdefault(turn.ended.job_id, []).append(turn)
    return by_job, len(arrived) - len(served)


def _job(job_id: str, served: Sequence[_Served], source: str, began_s: float) -> Job:
    turns: list[Turn] = []
    for index, turn in enumerate(served):
        following = served[index + 1] if index + 1 < len(served) else None
        known = turns[-1].input_tokens + turns[-1].output_tokens if turns else 0
        gap_s = None if following is None else round(max(0.0, following.arrived_s - turn.ended_s), 6)
        calls = tuple(_call(key, gap_s if len(turn.tools) == 1 else None) for key in turn.tools)
        turns.append(
            Turn(
                input_tokens=turn.ended.num_prompt_tokens,
                prefix_tokens=min(known, turn.ended.num_known_tokens),
                output_tokens=turn.ended.num_output_tokens,
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
    return GapKind.TOOL if turn.tools else GapKind.UNKNOWN


def _call(key: str, seconds: float | None) -> ToolRun:
    """``bash/git/status`` is the tool ``bash`` running ``git status``."""
    tool, _, command = key.partition("/")
    return ToolRun(tool, command.replace("/", " ") or None, seconds)
