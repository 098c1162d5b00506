"""Jobs for the tests of workloads: written by hand, and drawn by Hypothesis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from eval.workloads.job import GapKind, Job, ToolRun, Turn

SHARED = Path(__file__).resolve().parents[4] / "shared" / "workloads"
"""Recorded workloads next to the repository, if available."""


def written(path: Path, *lines: object) -> Path:
    """Writes a file with these lines; lines that are not strings are written as JSON."""
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def turn(input_tokens: int, prefix_tokens: int = 0, output_tokens: int = 10, **fields: Any) -> Turn:
    """A turn that ended, unless the fields say otherwise."""
    return Turn(input_tokens=input_tokens, prefix_tokens=prefix_tokens, output_tokens=output_tokens, **fields)


def job(job_id: str, *turns: Turn, **fields: Any) -> Job:
    """A job of these turns, by default of one with 100 tokens."""
    return Job(job_id=job_id, source="by hand", turns=turns or (turn(100),), **fields)


def chain(num_turns: int, gap_s: float = 1.0) -> tuple[Turn, ...]:
    """Turns that each add 100 tokens and call a tool."""
    waiting = [
        turn(
            110 * index + 100,
            110 * index,
            gap_kind=GapKind.TOOL,
            gap_s=gap_s,
            gap_measured=True,
            calls=(ToolRun("bash", "ls", gap_s),),
        )
        for index in range(num_turns - 1)
    ]
    return (*waiting, turn(110 * num_turns - 10, 110 * (num_turns - 1)))


_seconds = st.floats(0, 1e6)
_texts = st.none() | st.text(max_size=8)
_calls = st.lists(
    st.builds(ToolRun, st.text(max_size=5), st.none() | st.text(max_size=5), st.none() | _seconds), max_size=3
).map(tuple)


@st.composite
def _turns(draw: st.DrawFn, block_size: int) -> tuple[Turn, ...]:
    num_turns = draw(st.integers(1, 4))
    turns: list[Turn] = []
    known = 0
    for index in range(num_turns):
        is_last = index == num_turns - 1
        input_tokens = draw(st.integers(1, 5000))
        num_blocks = input_tokens // block_size if block_size else 0
        gap_s = None if is_last else draw(st.none() | _seconds)
        turns.append(
            Turn(
                input_tokens=input_tokens,
                prefix_tokens=draw(st.integers(0, min(known, input_tokens))),
                output_tokens=draw(st.integers(0, 500)),
                gap_kind=GapKind.END if is_last else draw(st.sampled_from(list(GapKind)[:3])),
                gap_s=gap_s,
                gap_measured=gap_s is not None and draw(st.booleans()),
                calls=() if is_last else draw(_calls),
                block_runs=((draw(st.integers(0, 99)), num_blocks),) if num_blocks else (),
                input_text=draw(_texts),
                output_text=draw(_texts),
            )
        )
        known = input_tokens + turns[-1].output_tokens
    return tuple(turns)


@st.composite
def some_jobs(draw: st.DrawFn) -> list[Job]:
    """Up to four valid jobs of any kind; the last may be a sub-agent of the first."""
    jobs: list[Job] = []
    for number in range(draw(st.integers(1, 4))):
        block_size = draw(st.sampled_from((0, 16, 512)))
        turns = draw(_turns(block_size))
        jobs.append(
            Job(
                job_id=f"job-{number}",
                source=draw(st.sampled_from(("by hand", "agentcgroup-claude"))),
                turns=turns,
                system_text=draw(st.text(max_size=8)),
                arrival_s=draw(st.none() | _seconds),
                tokens_measured=draw(st.booleans()),
                group=draw(_texts),
                tenant=draw(_texts),
                block_size=block_size,
                block_scope=draw(_texts),
                shared_prefix_tokens=draw(st.integers(0, min(turn.input_tokens for turn in turns))),
                shared_prefix=draw(_texts),
            )
        )
    return jobs
