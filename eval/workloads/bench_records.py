"""The records of an earlier run as jobs: what was actually sent and answered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from eval.load.records import JobRecord, TurnRecord, read_records
from eval.workloads.checks import JobChecks
from eval.workloads.families import Start, connect
from eval.workloads.job import GapKind, Job, ToolRun, Turn
from eval.workloads.jsonl import Place


def read_bench_records(path: Path) -> tuple[list[Job], list[str]]:
    """Reads one job per ``job_id``, in the order of their starts, without warm-up jobs.

    A job ends before its first failed turn. The gaps are what the run waited, not what a tool took, so they
    do not count as measured; each prompt is assumed to begin with all of the previous turn. ResultError or
    WorkloadError names what is wrong.
    """
    records = read_records(path)
    finished = {job.job_id: job for job in records.jobs}
    runs: dict[str, list[TurnRecord]] = {}
    for record in sorted(records.turns, key=lambda turn: turn.start_s):
        if record.job_id not in finished or not finished[record.job_id].warmup:
            runs.setdefault(record.job_id, []).append(record)
    answered = {job_id: turns for job_id, run in runs.items() if (turns := _answered(run, Place(path)))}
    began_s = min((turns[0].start_s for turns in answered.values()), default=0.0)
    checks = JobChecks()
    jobs = [
        checks.check(_job(turns, finished.get(job_id), path.stem, began_s), Place(path))
        for job_id, turns in answered.items()
    ]
    connected, notes = _families(jobs, answered, checks)
    notes.append("the gaps are those that an earlier run waited")
    if records.was_cut:
        notes.append("the records were CUT OFF in their last line and read up to there")
    if len(answered) < len(runs):
        notes.append(f"{len(runs) - len(answered)} jobs were left out: their first turn failed")
    return connected, notes


def _answered(run: Sequence[TurnRecord], place: Place) -> list[TurnRecord]:
    """Returns the turns before the first failed one; they must be numbered from 1 on."""
    answered: list[TurnRecord] = []
    for number, record in enumerate(sorted(run, key=lambda turn: turn.turn), start=1):
        if record.turn != number:
            raise place.error(f"job {record.job_id} has turn {record.turn} where turn {number} is missing")
        if record.error is not None:
            break
        answered.append(record)
    return answered


def _job(records: Sequence[TurnRecord], finished: JobRecord | None, source: str, began_s: float) -> Job:
    turns = [_turn(record) for record in records]
    for index, (before, turn) in enumerate(pairwise(turns), start=1):
        known = before.input_tokens + before.output_tokens
        turns[index] = replace(turn, prefix_tokens=min(known, turn.input_tokens))
    turns[-1] = replace(turns[-1], gap_kind=GapKind.END, gap_s=None, calls=())
    return Job(
        job_id=records[0].job_id,
        source=source,
        turns=tuple(turns),
        arrival_s=round(records[0].start_s - began_s, 6),
        parent_job=finished.parent_job if finished is not None else None,
    )


def _turn(record: TurnRecord) -> Turn:
    ran = () if record.tool is None else (ToolRun(record.tool, record.command, record.gap_s),)
    return Turn(
        input_tokens=record.prompt_tokens,
        prefix_tokens=0,
        output_tokens=record.output_tokens,
        gap_kind=GapKind.TOOL if ran else GapKind.UNKNOWN,
        gap_s=record.gap_s,
        calls=ran,
    )


def _families(
    jobs: Sequence[Job], answered: dict[str, list[TurnRecord]], checks: JobChecks
) -> tuple[list[Job], list[str]]:
    """Connects sub-agents with the turns that start them: those whose answer came before they began."""
    starts: dict[str, Start] = {}
    for job in jobs:
        if job.parent_job in answered:
            parent_began_s = answered[job.parent_job][0].start_s
            starts[job.job_id] = Start(answered[job.job_id][0].start_s - parent_began_s)
    ends_s = {
        job_id: [turn.start_s + turn.latency_s - turns[0].start_s for turn in turns]
        for job_id, turns in answered.items()
    }
    return connect(jobs, starts, ends_s, checks)
