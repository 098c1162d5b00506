"""Reads recorded mini-swe-agent runs (one JSON object per line) as jobs.

Tool times were not recorded there: ``tool_s`` is null and ``tool_s_est`` is an assumption, drawn from the
times of the same programs in another recording. It is kept as such (``gap_measured`` is False).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from eval.errors import WorkloadError
from eval.workloads.job import GapKind, Job, ToolRun, Turn


class _RecordedTurn(msgspec.Struct):
    """The fields of a turn that a replay needs."""

    input_text: str
    output_text: str
    gap_kind: GapKind
    input_tokens: int = 0
    prefix_tokens: int = 0
    output_tokens: int = 0
    tool: str | None = None
    cmd: str | None = None
    tool_s: float | None = None
    tool_s_est: float | None = None


class _RecordedJob(msgspec.Struct):
    """The fields of a job that a replay needs."""

    job_id: str
    source: str
    system_text: str
    turns: list[_RecordedTurn]
    arrival_s: float | None = None


def read_miniswe(path: Path) -> Iterator[Job]:
    """The jobs of a file, in its order. A bad line is an error that names it."""
    decoder = msgspec.json.Decoder(_RecordedJob)
    try:
        lines = path.open("rb")
    except OSError as error:
        raise WorkloadError(f"Cannot read the workload {path}: {error.strerror}.") from error
    with lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                recorded = decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise WorkloadError(f"{path}, line {number}: not a recorded job: {error}.") from error
            if not recorded.turns:
                raise WorkloadError(f"{path}, line {number}: job {recorded.job_id} has no turns.")
            yield _job(recorded)


def _job(recorded: _RecordedJob) -> Job:
    return Job(
        job_id=recorded.job_id,
        source=recorded.source,
        system_text=recorded.system_text,
        turns=tuple(_turn(turn) for turn in recorded.turns),
        arrival_s=recorded.arrival_s,
    )


def _turn(recorded: _RecordedTurn) -> Turn:
    ran = recorded.gap_kind is GapKind.TOOL
    measured = recorded.tool_s is not None
    gap_s = (recorded.tool_s if measured else recorded.tool_s_est) if ran else None
    calls = (ToolRun(recorded.tool, recorded.cmd, gap_s),) if ran and recorded.tool else ()
    return Turn(
        input_tokens=recorded.input_tokens,
        prefix_tokens=recorded.prefix_tokens,
        output_tokens=recorded.output_tokens,
        gap_kind=recorded.gap_kind,
        gap_s=gap_s,
        gap_measured=ran and measured,
        calls=calls,
        input_text=recorded.input_text,
        output_text=recorded.output_text,
    )
