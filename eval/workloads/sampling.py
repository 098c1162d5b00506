"""Selects the jobs of a workload to run: first limits, then a draw. Notes what was left out or changed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from eval.errors import WorkloadError
from eval.workloads.families import cut, families, without_jobs
from eval.workloads.job import Job, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class JobLimits:
    """Limits on the jobs of a recording; None means no limit."""

    max_turns: int | None = None
    """Jobs are cut after this many turns."""
    max_context_tokens: int | None = None
    """The most tokens of prompt plus output of a turn."""
    cut_at_context: bool = False
    """Cut a job before the turn that passes ``max_context_tokens``, instead of leaving it out with its
    family."""
    gap_cap_s: float | None = None
    """Longer gaps and calls are shortened to this."""


NO_LIMITS = JobLimits()


@dataclass(frozen=True, slots=True)
class Sample:
    """Jobs to run: each root followed by its sub-agents."""

    jobs: list[Job]
    notes: list[str]
    """Notes on what was left out or changed, one sentence each; printed with every result."""


def limited(jobs: Sequence[Job], limits: JobLimits) -> Sample:
    """Returns the jobs within limits. Sub-agents stay or go with the turns that start them."""
    done: Counter[str] = Counter()
    kept: list[Job] = []
    for family in families(jobs):
        kept.extend(_limited_family(family, limits, done))
    return Sample(kept, _notes(limits, done))


def draw(jobs: Sequence[Job], num_jobs: int | None, seed: int | None) -> Sample:
    """Draws ``num_jobs`` root jobs with their sub-agents: the first ones, or with a seed at random.

    No job is drawn twice before each was drawn once. A copy has an id ending in ``#2`` (``#3``, ...), shares
    no recorded blocks with the original (unless all jobs of the recording share block ids, as then equal
    blocks are equal content), and arrives after the recording's end.
    """
    listed = families(jobs)
    wanted = len(listed) if num_jobs is None else num_jobs
    if not listed:
        return Sample([], [])
    rng = random.Random(f"draw {seed}")
    shared = _shared_scopes(listed)
    later_s = _length_s(listed)
    drawn: list[Job] = []
    for first in range(0, wanted, len(listed)):
        again = first // len(listed)
        order = listed if seed is None else rng.sample(listed, len(listed))
        for family in order[: wanted - first]:
            drawn.extend(_copy(job, again, shared, later_s) if again else job for job in family)
    return Sample(drawn, _drawn_notes(wanted, len(listed)))


def _drawn_notes(wanted: int, num_listed: int) -> list[str]:
    if wanted > num_listed:
        return [f"jobs are REPEATED: {wanted} were asked for, there are {num_listed}"]
    return [f"{wanted} of {num_listed} jobs were drawn"] if wanted < num_listed else []


def _limited_family(family: list[Job], limits: JobLimits, done: Counter[str]) -> list[Job]:
    """Returns the family within the limits; empty if it is left out."""
    limit = limits.max_context_tokens
    gone: set[str] = set()
    kept: list[Job] = []
    for job in family:
        if job.job_id in gone or job.parent_job in gone:
            gone.add(job.job_id)
            continue
        num_turns = _num_turns(job, limits)
        too_long = limit is not None and job.max_context_tokens > limit
        if num_turns == 0 or (too_long and not limits.cut_at_context):
            if job.parent_job is None or not limits.cut_at_context:
                done["left out"] += 1
                return []
            gone.add(job.job_id)
            continue
        shorter, lost = cut(job, num_turns)
        gone.update(lost)
        done["cut"] += shorter is not job
        kept.append(_capped(shorter, limits.gap_cap_s, done))
    done["sub-agents"] += len(family) - len(kept)
    return [without_jobs(job, gone) for job in kept]


def _num_turns(job: Job, limits: JobLimits) -> int:
    """Returns how many of its turns are within the limits."""
    num_turns = min(len(job.turns), limits.max_turns or len(job.turns))
    limit = limits.max_context_tokens
    if limit is None or not limits.cut_at_context:
        return num_turns
    tokens = (turn.input_tokens + turn.output_tokens for turn in job.turns[:num_turns])
    return next((index for index, count in enumerate(tokens) if count > limit), num_turns)


def _capped(job: Job, cap_s: float | None, done: Counter[str]) -> Job:
    if cap_s is None or not any(turn.gap_s is not None and turn.gap_s > cap_s for turn in job.turns):
        return job
    turns = tuple(_capped_turn(turn, cap_s) for turn in job.turns)
    done["capped"] += sum(a is not b for a, b in zip(job.turns, turns, strict=True))
    return replace(job, turns=turns)


def _capped_turn(turn: Turn, cap_s: float) -> Turn:
    if turn.gap_s is None or turn.gap_s <= cap_s:
        return turn
    calls = tuple(
        replace(call, seconds=cap_s) if call.seconds is not None and call.seconds > cap_s else call
        for call in turn.calls
    )
    return replace(turn, gap_s=cap_s, calls=calls)


def _notes(limits: JobLimits, done: Counter[str]) -> list[str]:
    told = (
        ("left out", f"jobs were LEFT OUT: their context passes {limits.max_context_tokens} tokens"),
        ("cut", "jobs were CUT to fewer turns"),
        ("sub-agents", "sub-agents were left out with the turns that start them"),
        ("capped", f"gaps were CAPPED at {limits.gap_cap_s or 0.0:g} s"),
    )
    return [f"{done[key]} {what}" for key, what in told if done[key]]


def _shared_scopes(listed: list[list[Job]]) -> set[str]:
    """Returns scopes of block ids that several families use, in which equal ids are equal content."""
    users: Counter[str] = Counter()
    for family in listed:
        users.update({job.block_scope for job in family if job.block_scope is not None})
    return {scope for scope, count in users.items() if count > 1}


def _length_s(listed: list[list[Job]]) -> float:
    """Returns the time from the first recorded arrival to the expected next one after the last."""
    times = [family[0].arrival_s for family in listed if family[0].arrival_s is not None]
    if len(times) < 2:
        return 0.0
    return (max(times) - min(times)) * len(times) / (len(times) - 1)


def _copy(job: Job, again: int, shared: set[str], later_s: float) -> Job:
    mark = f"#{again + 1}"
    scope = job.block_scope
    return replace(
        job,
        job_id=job.job_id + mark,
        parent_job=None if job.parent_job is None else job.parent_job + mark,
        turns=tuple(
            replace(turn, spawns=tuple(child + mark for child in turn.spawns)) if turn.spawns else turn
            for turn in job.turns
        ),
        block_scope=scope if scope is None or scope in shared else scope + mark,
        arrival_s=None if job.arrival_s is None else job.arrival_s + again * later_s,
    )


def nothing_left(what: str, notes: Sequence[str]) -> WorkloadError:
    """Returns the error about the jobs that limits leave, with the notes on why."""
    return WorkloadError(f"The limits leave {what}{''.join(f'; {note}' for note in notes)}.")
