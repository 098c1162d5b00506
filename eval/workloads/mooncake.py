"""Mooncake traces: one request per line, with the ids of its prompt's blocks of 512 tokens.

Two formats: Mooncake's own, in which every row has the whole prompt and sessions are inferred; and aiperf's
rows with a ``session_id``, in which a row adds ``input_length`` tokens to its session (unless its blocks
begin with those of the previous row: then it has the whole prompt). Gaps run from request to request, so they
include the recorded system's service time; a ``delay`` runs from the answer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import msgspec

from eval.workloads.checks import JobChecks
from eval.workloads.job import GapKind, Job, Turn
from eval.workloads.jsonl import Place, read_lines

BLOCK_SIZE = 512
SCOPE = "mooncake"
MIN_SHARED_BLOCKS = 2
"""Fewest shared blocks with which a prompt continues an earlier one: one may be a system prompt."""

Amount = Annotated[float, msgspec.Meta(ge=0)]


class TraceRow(msgspec.Struct, kw_only=True):
    """A request. Fields that matter only to a client (``tools``, ``extra``) are ignored."""

    input_length: Annotated[int, msgspec.Meta(ge=1)]
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    timestamp: Amount | None = None
    """Milliseconds since the trace began."""
    delay: Amount | None = None
    """Milliseconds since the previous answer."""
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0)]] = []
    session_id: str | None = None

    @property
    def full_ids(self) -> list[int]:
        """Ids of the blocks that the prompt fills."""
        return self.hash_ids[: self.input_length // BLOCK_SIZE]


@dataclass(slots=True)
class _Session:
    """The rows of a conversation, in the order of the file."""

    name: str
    place: Place
    rows: list[TraceRow] = field(default_factory=list)


def read_mooncake(path: Path) -> tuple[list[Job], list[str]]:
    """Reads one job per session, in order of their first requests; WorkloadError names an invalid line."""
    sessions: dict[str, _Session] = {}
    tips: dict[int, str] = {}
    inferred = False
    for place, row in read_lines(path, TraceRow, "a Mooncake request"):
        num_blocks = -(-row.input_length // BLOCK_SIZE)
        if len(row.hash_ids) > num_blocks:
            raise place.error(
                f"hash_ids name {len(row.hash_ids)} blocks of {BLOCK_SIZE}, but input_length is "
                f"{row.input_length}"
            )
        name = row.session_id
        if name is None:
            inferred = True
            name = _continued(row, tips, sessions) or f"mooncake-{len(sessions):05d}"
        session = sessions.setdefault(name, _Session(name, place))
        if session.rows:
            _check_time(session.rows[-1], row, place)
            if row.session_id is None:
                del tips[session.rows[-1].full_ids[-1]]
        session.rows.append(row)
        if row.session_id is None and len(row.full_ids) >= MIN_SHARED_BLOCKS:
            tips[row.full_ids[-1]] = name
    checks = JobChecks()
    jobs = [checks.check(_job(session, path.stem), session.place) for session in sessions.values()]
    num_requests = sum(len(session.rows) for session in sessions.values())
    told = f"sessions are INFERRED from block ids: {num_requests} requests became {len(jobs)} jobs"
    return jobs, [told] if inferred else []


def _continued(row: TraceRow, tips: dict[int, str], sessions: dict[str, _Session]) -> str | None:
    """The session whose last prompt's full blocks this prompt begins with; the longest, if several do.

    An id identifies its block and all before it, so the last id of a prompt is enough.
    """
    for index in range(len(row.hash_ids) - 1, MIN_SHARED_BLOCKS - 2, -1):
        name = tips.get(row.hash_ids[index])
        if name is not None and row.input_length > sessions[name].rows[-1].input_length:
            return name
    return None


def _check_time(before: TraceRow, row: TraceRow, place: Place) -> None:
    if before.timestamp is not None and row.timestamp is not None and row.timestamp < before.timestamp:
        raise place.error(
            f"timestamp is {row.timestamp:g}, earlier than that of the request before ({before.timestamp:g})"
        )


def _job(session: _Session, source: str) -> Job:
    rows = session.rows
    whole = [row.session_id is None or _begins_with(row, before) for before, row in pairwise(rows)]
    turns: list[Turn] = []
    for index, row in enumerate(rows):
        input_tokens = row.input_length
        prefix_tokens = 0
        if turns and whole[index - 1]:
            prefix_tokens = BLOCK_SIZE * _num_shared(rows[index - 1], row)
        elif turns:
            prefix_tokens = turns[-1].input_tokens + turns[-1].output_tokens
            input_tokens += prefix_tokens
        gap_kind, gap_s, measured = _gap(row, rows[index + 1] if index + 1 < len(rows) else None)
        turns.append(
            Turn(
                input_tokens=input_tokens,
                prefix_tokens=prefix_tokens,
                output_tokens=row.output_length,
                gap_kind=gap_kind,
                gap_s=gap_s,
                gap_measured=measured,
                # The blocks of a row that only adds to its session are not those of the whole prompt.
                block_runs=_runs(row) if all(whole) else (),
            )
        )
    return Job(
        job_id=session.name,
        source=source,
        turns=tuple(turns),
        arrival_s=None if rows[0].timestamp is None else rows[0].timestamp / 1000,
        block_size=BLOCK_SIZE,
        block_scope=SCOPE,
    )


def _begins_with(row: TraceRow, before: TraceRow) -> bool:
    ids = before.full_ids
    return bool(ids) and row.input_length > before.input_length and row.hash_ids[: len(ids)] == ids


def _num_shared(before: TraceRow, row: TraceRow) -> int:
    """Returns the number of full blocks of the earlier prompt with which the later one begins."""
    pairs = zip(before.full_ids, row.hash_ids, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(before.full_ids), len(row.hash_ids)))


def _gap(row: TraceRow, following: TraceRow | None) -> tuple[GapKind, float | None, bool]:
    if following is None:
        return GapKind.END, None, False
    if following.delay is not None:
        return GapKind.UNKNOWN, following.delay / 1000, True
    if row.timestamp is not None and following.timestamp is not None:
        return GapKind.UNKNOWN, round((following.timestamp - row.timestamp) / 1000, 6), False
    return GapKind.UNKNOWN, None, False


def _runs(row: TraceRow) -> tuple[tuple[int, int], ...]:
    """Encodes the full blocks as (first, count) runs of consecutive ids."""
    runs: list[tuple[int, int]] = []
    for block_id in row.full_ids:
        first, count = runs[-1] if runs else (0, 0)
        if runs and block_id == first + count:
            runs[-1] = (first, count + 1)
        else:
            runs.append((block_id, 1))
    return tuple(runs)
