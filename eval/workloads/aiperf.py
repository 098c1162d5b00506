"""aiperf's multi-turn file: one session per line, with the texts of its turns and the delays between them.

It has no answers, so a replay needs a live model; if a turn has no ``output_length``, its length is assumed.
Times are milliseconds; a ``delay`` runs from the previous answer, a ``timestamp`` from the start.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from eval.workloads.checks import JobChecks
from eval.workloads.job import GapKind, Job
from eval.workloads.jsonl import Place, read_lines
from eval.workloads.transcript import ASSUMED_OUTPUT_TOKENS, Exchange, Transcript

Amount = Annotated[float, msgspec.Meta(ge=0)]


class SessionTurn(msgspec.Struct, kw_only=True):
    """One question. Images and audio are ignored."""

    text: str | None = None
    texts: list[str] | None = None
    timestamp: Amount | None = None
    delay: Amount | None = None
    output_length: Annotated[int, msgspec.Meta(gt=0)] | None = None


class Session(msgspec.Struct, kw_only=True):
    """One conversation."""

    turns: list[SessionTurn]
    session_id: str | None = None


def read_aiperf(path: Path) -> tuple[list[Job], list[str]]:
    """Reads one job per session; WorkloadError names an invalid line."""
    checks = JobChecks()
    jobs: list[Job] = []
    num_assumed = 0
    for place, session in read_lines(path, Session, "an aiperf session"):
        jobs.append(checks.check(_job(session, place, path.stem, len(jobs)), place))
        num_assumed += sum(turn.output_length is None for turn in session.turns)
    told = f"{num_assumed} answers have no recorded length: ASSUMED {ASSUMED_OUTPUT_TOKENS} tokens"
    return jobs, [told] if num_assumed else []


def _job(session: Session, place: Place, source: str, index: int) -> Job:
    transcript = Transcript()
    for number, turn in enumerate(session.turns, start=1):
        if turn.text is None and turn.texts is None:
            raise place.error(f"turn {number} has neither text nor texts")
        text = turn.text if turn.text is not None else "\n".join(turn.texts or ())
        following = session.turns[number] if number < len(session.turns) else None
        gap_s, measured = _gap(turn, following, number, place)
        transcript.add(
            Exchange(
                input_text=text,
                output_text=None,
                output_tokens=turn.output_length,
                gap_kind=GapKind.UNKNOWN,
                gap_s=gap_s,
                gap_measured=measured,
            )
        )
    began = session.turns[0].timestamp if session.turns else None
    name = session.session_id if session.session_id is not None else f"session-{index}"
    return transcript.job(name, source, None if began is None else began / 1000)


def _gap(
    turn: SessionTurn, following: SessionTurn | None, number: int, place: Place
) -> tuple[float | None, bool]:
    if following is None:
        return None, False
    if following.delay is not None:
        return following.delay / 1000, True
    if turn.timestamp is None or following.timestamp is None:
        return None, False
    if following.timestamp < turn.timestamp:
        raise place.error(
            f"turn {number + 1}: timestamp is {following.timestamp:g}, earlier than the turn before "
            f"({turn.timestamp:g})"
        )
    # From request to request: it includes the time of the answer.
    return (following.timestamp - turn.timestamp) / 1000, False
