"""Jobs and the sub-agents that they start: which turn waits for which job. Knows no file format."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from eval.workloads.checks import JobChecks
from eval.workloads.job import GapKind, Job, ToolRun, Turn

AGENT_CALL = "Task"
"""The tool with which coding agents start a sub-agent."""
CLOCK_SLACK_S = 0.5
"""Recorded times are rounded: a sub-agent may seem to begin this much before its parent's turn ended."""


@dataclass(frozen=True, slots=True)
class Start:
    """When and how long a sub-agent ran in a recording."""

    began_s: float
    """Time since its parent began."""
    lasted_s: float | None = None


def eldest(job_id: str, parents: Mapping[str, str | None]) -> str:
    """Returns the first of a job's line of parents, known or not."""
    seen = {job_id}
    while (parent := parents.get(job_id)) is not None and parent not in seen:
        seen.add(parent)
        job_id = parent
    return job_id


def roots(jobs: Iterable[Job]) -> list[Job]:
    """Returns the jobs that no other job starts."""
    return [job for job in jobs if job.parent_job is None]


def families(jobs: Iterable[Job]) -> list[list[Job]]:
    """Returns each root followed by all its sub-agents, in the order of the roots."""
    children: dict[str, list[Job]] = {}
    listed = list(jobs)
    for job in listed:
        if job.parent_job is not None:
            children.setdefault(job.parent_job, []).append(job)
    found: list[list[Job]] = []
    for root in roots(listed):
        family = [root]
        for member in family:  # grows during the loop
            family.extend(children.get(member.job_id, ()))
        found.append(family)
    return found


def connect(
    jobs: Sequence[Job], starts: Mapping[str, Start], ends_s: Mapping[str, Sequence[float]], checks: JobChecks
) -> tuple[list[Job], list[str]]:
    """Returns the jobs with every sub-agent in the ``spawns`` of the turn that starts it, and notes on
    changes.

    ``starts``: when sub-agents began, if their parents' turns do not name them yet. ``ends_s``: when the
    turns of a job were answered, since the job began. A sub-agent whose parent is missing, or that began
    after its parent's last turn, becomes a root job. WorkloadError if parents and turns contradict each
    other.
    """
    by_id = {job.job_id: job for job in jobs}
    spawned = {child: job.job_id for job in jobs for turn in job.turns for child in turn.spawns}
    started: dict[tuple[str, int], list[str]] = {}
    alone: list[str] = []
    for job in jobs:
        parent = by_id.get(job.parent_job or "")
        if job.parent_job is None or spawned.get(job.job_id) == job.parent_job:
            continue
        if parent is None:
            alone.append(job.job_id)
        elif job.job_id not in starts:
            raise checks.error(job, f"no turn of its parent {parent.job_id} starts it")
        else:
            index = _starting_turn(starts[job.job_id], ends_s[parent.job_id])
            if index is None or index == len(parent.turns) - 1:
                alone.append(job.job_id)
            else:
                started.setdefault((parent.job_id, index), []).append(job.job_id)
    _check_spawns(jobs, by_id, checks)
    orphans = set(alone)
    connected = [_with_starts(job, job.job_id in orphans, started, starts) for job in jobs]
    reached = {job.job_id for family in families(connected) for job in family}
    for job in connected:
        if job.job_id not in reached:
            raise checks.error(job, "its chain of parents is a cycle")
    return connected, [f"{len(alone)} sub-agents became separate jobs: no turn here starts them"] * bool(
        alone
    )


def _starting_turn(start: Start, ends_s: Sequence[float]) -> int | None:
    """Returns the last turn that was answered when the sub-agent began."""
    index = bisect_right(ends_s, start.began_s + CLOCK_SLACK_S) - 1
    return index if index >= 0 else None


def _check_spawns(jobs: Sequence[Job], by_id: Mapping[str, Job], checks: JobChecks) -> None:
    started: set[str] = set()
    for job in jobs:
        for number, turn in enumerate(job.turns, start=1):
            for child in turn.spawns:
                if child not in by_id or by_id[child].parent_job != job.job_id:
                    raise checks.error(
                        job, f"turn {number}: spawns names {child}, which is no sub-agent of it"
                    )
                if child in started:
                    raise checks.error(job, f"turn {number}: spawns names {child}, which is started already")
                started.add(child)


def _with_starts(
    job: Job, alone: bool, started: Mapping[tuple[str, int], list[str]], starts: Mapping[str, Start]
) -> Job:
    turns = list(job.turns)
    for index, turn in enumerate(turns):
        children = started.get((job.job_id, index))
        if children is not None:
            turns[index] = _waiting_turn(turn, children, starts)
    return replace(job, turns=tuple(turns), parent_job=None if alone else job.parent_job)


def _waiting_turn(turn: Turn, children: Sequence[str], starts: Mapping[str, Start]) -> Turn:
    """Returns the turn, which waits for its sub-agents instead of for their recorded time.

    If calls were timed one by one, the gap becomes that of the other calls (the longest of several sub-agent
    calls are assumed to be the replayed ones); else the rest of the gap after the longest sub-agent's end.
    """
    lasted = [start.lasted_s for child in children if (start := starts[child]).lasted_s is not None]
    by_length = sorted((call for call in turn.calls if call.tool == AGENT_CALL), key=_seconds, reverse=True)
    gap_s = turn.gap_s
    if gap_s is not None and by_length:
        replayed = by_length[: len(children)]
        others = [_seconds(call) for call in turn.calls if call not in replayed]
        gap_s = min(gap_s, max(others, default=0.0))
    elif gap_s is not None and lasted:
        gap_s = max(0.0, round(gap_s - max(lasted), 3))
    return replace(turn, gap_s=gap_s, spawns=(*turn.spawns, *children))


def _seconds(call: ToolRun) -> float:
    return call.seconds or 0.0


def without_jobs(job: Job, left_out: set[str]) -> Job:
    """Returns the job without waits for those sub-agents."""
    if not any(child in left_out for turn in job.turns for child in turn.spawns):
        return job
    turns = (
        replace(turn, spawns=tuple(child for child in turn.spawns if child not in left_out))
        for turn in job.turns
    )
    return replace(job, turns=tuple(turns))


def cut(job: Job, num_turns: int) -> tuple[Job, list[str]]:
    """Returns the first turns of a job, and the sub-agents that the removed turns would have started."""
    if num_turns >= len(job.turns):
        return job, []
    kept = job.turns[:num_turns]
    lost = job.turns[num_turns - 1 :]
    last = replace(kept[-1], gap_kind=GapKind.END, gap_s=None, gap_measured=False, calls=(), spawns=())
    return replace(job, turns=(*kept[:-1], last)), [child for turn in lost for child in turn.spawns]
