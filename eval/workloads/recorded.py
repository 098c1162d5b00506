"""Our own file of jobs: one JSON object per line and per job, read and written. All other formats become it.

How long a replay waits after a turn, by its ``gap_kind``:

- ``tool``: ``tool_s``, measured; else ``tool_s_est``, an assumption of the recording's makers; else it is
  unknown.
- ``user``, ``unknown``: ``other_gap_s``, measured by the client from the answer to its next request; else
  ``gap_to_next_request_s``, which runs from request to request. That one includes the time that the
  recorded system took to answer, so to wait for it after an answer is too long: it counts as assumed.
- ``end``: nothing follows. Calls recorded there are dropped.

A job with ``parent_job`` is a sub-agent. If its parent is in the file, the turn that started it names it in
``spawns`` and waits for it instead of for the recorded call (``families.py``); otherwise it is a root job.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec

from eval.errors import WorkloadError
from eval.workloads.checks import JobChecks
from eval.workloads.families import Start, connect, eldest
from eval.workloads.job import GapKind, Job, ToolRun, Turn
from eval.workloads.jsonl import Place, read_lines
from tracing.parts import COMPRESSED, packed

Seconds = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]

GLOBAL_SCOPE = "global"
FAMILY_SCOPE = "job family (root job and its sub-agents)"

SHARED_PREFIX_TOKENS = {"agentcgroup-claude": 14_000, "agentcgroup-glm": 12_500}
"""System prompt and tools, shared by all (root) jobs of a recording, as its makers state it; the hashes do
not cover them."""


class RecordedCall(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tool call of a turn."""

    tool: str
    s: Seconds | None = None
    cmd: str | None = None


class RecordedTurn(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A turn in its form on disk."""

    input_tokens: Count
    prefix_tokens: Count
    new_input_tokens: Count | None = None
    output_tokens: Count
    gap_kind: GapKind
    tool: str | None = None
    cmd: str | None = None
    tool_s: Seconds | None = None
    tool_s_est: Seconds | None = None
    other_gap_s: Seconds | None = None
    gap_to_next_request_s: Seconds | None = None
    calls: list[RecordedCall] | None = None
    spawns: list[str] = []
    hash_runs: list[tuple[int, int]] = []
    input_text: str | None = None
    output_text: str | None = None
    # For reference only; a replay does not use them.
    t: float | None = None
    """Time of the request, in seconds since the job began."""
    llm_s: Seconds | None = None
    ttft_s: Seconds | None = None
    wall_to_next_s: Seconds | None = None
    output_text_tokens: Count | None = None
    new_block_hashes: list[str] = []
    """Hashes of 256 characters each, without the system prompt: too coarse and too few for KV blocks."""


class RecordedJob(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A job in its form on disk."""

    job_id: str
    source: str
    group: str | None = None
    arrival_s: Seconds | None = None
    turns: list[RecordedTurn]
    system_text: str = ""
    tokens_measured: bool | None = None
    tenant: str | None = None
    priority: int = 0
    parent_job: str | None = None
    start_in_parent_s: Seconds | None = None
    duration_s: Seconds | None = None
    """Duration of a sub-agent. Where it is given, ``start_in_parent_s`` is when the sub-agent
    ended: in all recordings that have both, it is later than the end of a turn of its parent by
    this duration and less than a second."""
    block_size: Count = 0
    block_scope: str | None = None
    hash_scope: str | None = None
    shared_prefix_tokens: Count | None = None
    shared_prefix: str | None = None
    # For reference only.
    model: str | None = None
    models: list[str] = []
    token_counts: str | None = None
    agent_type: str | None = None
    sidechain: bool = False
    task_text_empty: bool = False
    block_chars: Count | None = None
    tool_prompt_tokens: Count | None = None
    system_prompt_tokens: Count | None = None


def read_recorded(path: Path) -> tuple[list[Job], list[str]]:
    """Reads the jobs of a file in its order, and notes on them.

    WorkloadError names the first invalid line.
    """
    checks = JobChecks()
    jobs: list[Job] = []
    starts: dict[str, Start] = {}
    ends_s: dict[str, list[float]] = {}
    for place, recorded in read_lines(path, RecordedJob, "a recorded job"):
        _check_sums(recorded, place)
        jobs.append(checks.check(_job(recorded), place))
        ends_s[recorded.job_id] = _turn_ends_s(recorded.turns)
        if recorded.start_in_parent_s is not None:
            began_s = recorded.start_in_parent_s - (recorded.duration_s or 0.0)
            starts[recorded.job_id] = Start(began_s, recorded.duration_s)
    return connect(_family_scopes(jobs), starts, ends_s, checks)


def write_jobs(path: Path, jobs: Iterable[Job]) -> None:
    """Writes a file that ``read_recorded`` reads back as equal jobs; WorkloadError if that fails."""
    encoder = msgspec.json.Encoder()
    content = b"".join(encoder.encode(_recorded_job(job)) + b"\n" for job in jobs)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_packed(path, content))
    except OSError as error:
        raise WorkloadError(f"Cannot write the workload {path}: {error.strerror}.") from error


def _packed(path: Path, content: bytes) -> bytes:
    """Compresses by the file name's suffix, without the timestamp that gzip would record."""
    if path.suffix == ".gz":
        return gzip.compress(content, mtime=0)
    return packed(content) if path.suffix == COMPRESSED else content


# ---- reading ----


def _check_sums(recorded: RecordedJob, place: Place) -> None:
    for number, turn in enumerate(recorded.turns, start=1):
        new = turn.input_tokens - turn.prefix_tokens
        if turn.new_input_tokens is not None and turn.new_input_tokens != new:
            raise place.error(
                f"job {recorded.job_id}: turn {number}: new_input_tokens is {turn.new_input_tokens}, but "
                f"input_tokens less prefix_tokens is {new}"
            )


def _turn_ends_s(turns: Sequence[RecordedTurn]) -> list[float]:
    """When each turn was answered, since the job began: by its recorded time, else by the times before it."""
    ends_s: list[float] = []
    now = 0.0
    for turn in turns:
        now = (now if turn.t is None else turn.t) + (turn.llm_s or 0.0)
        ends_s.append(now)
        now += turn.tool_s or turn.other_gap_s or 0.0
    return ends_s


def _job(recorded: RecordedJob) -> Job:
    counted = recorded.token_counts is None or "chars" not in recorded.token_counts
    shared_tokens = recorded.shared_prefix_tokens
    shared_prefix = recorded.shared_prefix
    if shared_tokens is None and recorded.parent_job is None and recorded.source in SHARED_PREFIX_TOKENS:
        shared_tokens = SHARED_PREFIX_TOKENS[recorded.source]
        shared_prefix = recorded.source
    scope = {GLOBAL_SCOPE: recorded.source, FAMILY_SCOPE: FAMILY_SCOPE}
    return Job(
        job_id=recorded.job_id,
        source=recorded.source,
        turns=tuple(_turn(turn, recorded.block_size) for turn in recorded.turns),
        system_text=recorded.system_text,
        arrival_s=recorded.arrival_s,
        tokens_measured=counted if recorded.tokens_measured is None else recorded.tokens_measured,
        group=recorded.group,
        tenant=recorded.tenant,
        priority=recorded.priority,
        parent_job=recorded.parent_job,
        block_size=recorded.block_size,
        block_scope=scope.get(recorded.hash_scope or "", recorded.block_scope),
        shared_prefix_tokens=shared_tokens or 0,
        shared_prefix=shared_prefix,
    )


def _family_scopes(jobs: list[Job]) -> list[Job]:
    """Sets the scope of hashes that a family shares to the id of its eldest job."""
    parents = {job.job_id: job.parent_job for job in jobs}
    return [
        replace(job, block_scope=eldest(job.job_id, parents)) if job.block_scope == FAMILY_SCOPE else job
        for job in jobs
    ]


def _turn(recorded: RecordedTurn, block_size: int) -> Turn:
    gap_s, measured = _gap(recorded)
    return Turn(
        input_tokens=recorded.input_tokens,
        prefix_tokens=recorded.prefix_tokens,
        output_tokens=recorded.output_tokens,
        gap_kind=recorded.gap_kind,
        gap_s=gap_s,
        gap_measured=measured,
        calls=_calls(recorded, gap_s),
        spawns=tuple(recorded.spawns),
        block_runs=full_blocks(recorded.hash_runs, recorded.input_tokens, block_size),
        input_text=recorded.input_text,
        output_text=recorded.output_text,
    )


def _gap(recorded: RecordedTurn) -> tuple[float | None, bool]:
    """Returns the seconds to wait and whether they were measured, by the rules in the module's docstring."""
    if recorded.gap_kind is GapKind.END:
        return None, False
    if recorded.gap_kind is GapKind.TOOL:
        measured_s = recorded.tool_s
        assumed_s = recorded.tool_s_est
    else:
        measured_s = recorded.other_gap_s
        assumed_s = recorded.gap_to_next_request_s
    return (assumed_s, False) if measured_s is None else (measured_s, True)


def _calls(recorded: RecordedTurn, gap_s: float | None) -> tuple[ToolRun, ...]:
    if recorded.gap_kind is GapKind.END:
        return ()
    if recorded.calls is not None:
        return tuple(ToolRun(call.tool, call.cmd, call.s) for call in recorded.calls)
    if recorded.gap_kind is GapKind.TOOL and recorded.tool is not None:
        return (ToolRun(recorded.tool, recorded.cmd, gap_s),)
    return ()


def full_blocks(
    runs: Iterable[tuple[int, int]], num_tokens: int, block_size: int
) -> tuple[tuple[int, int], ...]:
    """Returns the runs without a last block that a prompt of ``num_tokens`` fills only in part."""
    kept = list(runs)
    # The checks refuse anything beyond one partial block.
    if block_size and sum(count for _, count in kept) == num_tokens // block_size + 1:
        first, count = kept.pop()
        if count > 1:
            kept.append((first, count - 1))
    return tuple(kept)


# ---- writing ----


def _recorded_job(job: Job) -> RecordedJob:
    return RecordedJob(
        job_id=job.job_id,
        source=job.source,
        group=job.group,
        arrival_s=job.arrival_s,
        turns=[_recorded_turn(turn) for turn in job.turns],
        system_text=job.system_text,
        tokens_measured=None if job.tokens_measured else False,
        tenant=job.tenant,
        priority=job.priority,
        parent_job=job.parent_job,
        block_size=job.block_size,
        block_scope=job.block_scope,
        shared_prefix_tokens=job.shared_prefix_tokens,
        shared_prefix=job.shared_prefix,
    )


def _recorded_turn(turn: Turn) -> RecordedTurn:
    recorded = RecordedTurn(
        input_tokens=turn.input_tokens,
        prefix_tokens=turn.prefix_tokens,
        new_input_tokens=turn.new_input_tokens,
        output_tokens=turn.output_tokens,
        gap_kind=turn.gap_kind,
        tool=turn.tool,
        cmd=turn.command,
        calls=[RecordedCall(tool=c.tool, s=c.seconds, cmd=c.command) for c in turn.calls] or None,
        spawns=list(turn.spawns),
        hash_runs=list(turn.block_runs),
        input_text=turn.input_text,
        output_text=turn.output_text,
    )
    if turn.gap_kind is GapKind.TOOL:
        recorded.tool_s = turn.gap_s if turn.gap_measured else None
        recorded.tool_s_est = None if turn.gap_measured else turn.gap_s
    else:
        recorded.other_gap_s = turn.gap_s if turn.gap_measured else None
        recorded.gap_to_next_request_s = None if turn.gap_measured else turn.gap_s
    return recorded
