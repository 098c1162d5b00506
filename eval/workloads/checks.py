"""Checks of every job, whatever file it is from. The first violation is an error."""

from __future__ import annotations

import math
from collections.abc import Iterable

from eval.errors import WorkloadError
from eval.workloads.job import GapKind, Job, Turn
from eval.workloads.jsonl import Place

MAX_TOKENS = 1_000_000_000
"""Most tokens of a prompt or an answer; a larger count is an error in the file."""
MAX_BLOCK_ID = 2**32 - 1
"""Block ids are counters up to this; digests are refused."""


class JobChecks:
    """Checks jobs as they are read, including conditions across jobs."""

    def __init__(self) -> None:
        self._places: dict[str, Place] = {}

    def check(self, job: Job, place: Place) -> Job:
        """Returns the job; WorkloadError names its place, the turn, the field and the limit."""
        complaint = complaint_about(job)
        if complaint is not None:
            raise place.error(f"job {job.job_id}: {complaint}")
        earlier = self._places.setdefault(job.job_id, place)
        if earlier is not place:
            raise place.error(f"job {job.job_id} is already {earlier.within}")
        return job

    def error(self, job: Job, what: str) -> WorkloadError:
        """Returns an error about a job that was read."""
        return self._places[job.job_id].error(f"job {job.job_id}: {what}")


def complaint_about(job: Job) -> str | None:
    """Returns what is impossible about a job, or None."""
    if not job.turns:
        return "it has no turns"
    if not job.job_id:
        return "job_id is empty"
    if job.arrival_s is not None and not _is_time(job.arrival_s):
        return f"arrival_s is {job.arrival_s:g}, but must be 0 or more"
    previous: Turn | None = None
    for number, turn in enumerate(job.turns, start=1):
        wrong = (
            _wrong_tokens(turn, previous)
            or _wrong_gap(turn, is_last=number == len(job.turns))
            or _wrong_blocks(turn, job.block_size)
        )
        if wrong is not None:
            return f"turn {number}: {wrong}"
        previous = turn
    return _wrong_shared_prefix(job)


def _wrong_tokens(turn: Turn, previous: Turn | None) -> str | None:
    if turn.input_tokens < 1:
        return f"input_tokens is {turn.input_tokens}, but must be at least 1"
    if turn.output_tokens < 0:
        return f"output_tokens is {turn.output_tokens}, but must be 0 or more"
    for name, tokens in (("input_tokens", turn.input_tokens), ("output_tokens", turn.output_tokens)):
        if tokens > MAX_TOKENS:
            return f"{name} is {tokens}, but must be at most {MAX_TOKENS}"
    if turn.prefix_tokens < 0:
        return f"prefix_tokens is {turn.prefix_tokens}, but must be 0 or more"
    if turn.prefix_tokens > turn.input_tokens:
        return f"prefix_tokens is {turn.prefix_tokens}, more than input_tokens ({turn.input_tokens})"
    known = 0 if previous is None else previous.input_tokens + previous.output_tokens
    if turn.prefix_tokens > known:
        told = "which nothing precedes" if previous is None else f"but the turn before ends at {known}"
        return f"prefix_tokens is {turn.prefix_tokens}, {told}"
    return None


def _wrong_gap(turn: Turn, *, is_last: bool) -> str | None:
    if (turn.gap_kind is GapKind.END) != is_last:
        where = "only the last turn" if turn.gap_kind is GapKind.END else "the last turn"
        return f"gap_kind is {turn.gap_kind.value}, but {where} has gap_kind end"
    if is_last and (turn.spawns or turn.gap_s is not None):
        return "it is the last turn, but has spawns or a gap"
    times: Iterable[tuple[str, float | None]] = (
        ("the gap", turn.gap_s),
        *((f"the time of call {n}", call.seconds) for n, call in enumerate(turn.calls, start=1)),
    )
    for what, seconds in times:
        if seconds is not None and not _is_time(seconds):
            return f"{what} is {seconds:g} s, but must be 0 or more"
    return None


def _wrong_blocks(turn: Turn, block_size: int) -> str | None:
    if not turn.block_runs:
        return None
    if block_size < 1:
        return "hash_runs are given, but the job has no block_size"
    if any(first < 0 or count < 1 for first, count in turn.block_runs):
        return "hash_runs hold a negative id or an empty run"
    if any(first + count - 1 > MAX_BLOCK_ID for first, count in turn.block_runs):
        return f"hash_runs hold an id of more than {MAX_BLOCK_ID}"
    num_blocks = sum(count for _, count in turn.block_runs)
    if num_blocks > turn.input_tokens // block_size:
        return (
            f"hash_runs name {num_blocks} full blocks of {block_size}, but input_tokens is "
            f"{turn.input_tokens}"
        )
    return None


def _wrong_shared_prefix(job: Job) -> str | None:
    shortest = min(turn.input_tokens for turn in job.turns)
    if not 0 <= job.shared_prefix_tokens <= shortest:
        return (
            f"shared_prefix_tokens is {job.shared_prefix_tokens}, but must be 0 to {shortest}, the job's "
            "shortest prompt"
        )
    return None


def _is_time(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds >= 0
