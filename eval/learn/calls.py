"""Recorded jobs as the estimator sees them: turns that end with calls, and what followed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from estimator.tool_key import ToolKey, tool_key
from eval.workloads.families import eldest
from eval.workloads.job import GapKind, Job, ToolRun, Turn


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call with a recorded time, and what was known when it began."""

    key: ToolKey
    seconds: float
    turn_index: int
    num_parallel: int
    input_tokens: int
    output_tokens: int

    @property
    def tool(self) -> str:
        """Returns the name of the tool: ``bash``, ``read``."""
        return str(ToolKey(self.key.parts[:1]))

    @property
    def program(self) -> str:
        """Returns the tool and what it ran: ``bash/pytest``."""
        return str(ToolKey(self.key.parts[:2]))


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """How a turn ended and what followed."""

    calls: tuple[Call, ...]
    """The calls with recorded times, which ran in parallel."""
    tools: tuple[ToolKey, ...] | None
    """All tools that the turn called; None if unknown."""
    growth_tokens: int | None
    """Tokens of the next prompt beyond this one and its output; None after the last turn."""
    gap_s: float
    """Seconds until the last of those calls ended; without any, the recorded gap, 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Played:
    """A job and its turns in order."""

    job_id: str
    group: str
    arrival_s: float | None
    """The recorded arrival."""
    turns: tuple[TurnEnd, ...]

    @property
    def calls(self) -> list[Call]:
        return [call for turn in self.turns for call in turn.calls]

    @property
    def tool_s(self) -> float:
        """Sum of the turns' gaps: from the first call to the end of the last, without the model's time."""
        return sum(turn.gap_s for turn in self.turns)


def played(jobs: Sequence[Job]) -> list[Played]:
    """Returns the jobs in their order. One without a group joins the group of the job that started it."""
    parents = {job.job_id: job.parent_job for job in jobs}
    return [
        Played(job.job_id, job.group or eldest(job.job_id, parents), job.arrival_s, _turn_ends(job.turns))
        for job in jobs
    ]


def _turn_ends(turns: Sequence[Turn]) -> tuple[TurnEnd, ...]:
    ends = []
    for index, turn in enumerate(turns):
        is_last = index == len(turns) - 1
        growth = None if is_last else turns[index + 1].input_tokens - turn.input_tokens - turn.output_tokens
        calls = _calls(turn, index)
        gap_s = max((call.seconds for call in calls), default=turn.gap_s or 0.0)
        ends.append(TurnEnd(calls, _tools(turn), growth, gap_s))
    return tuple(ends)


def _calls(turn: Turn, index: int) -> tuple[Call, ...]:
    count = len(turn.calls)
    return tuple(
        Call(key_of_run(run), run.seconds, index, count, turn.input_tokens, turn.output_tokens)
        for run in turn.calls
        if run.seconds is not None
    )


def _tools(turn: Turn) -> tuple[ToolKey, ...] | None:
    if not turn.calls and turn.gap_kind in (GapKind.TOOL, GapKind.UNKNOWN):
        return None
    return tuple(key_of_run(run) for run in turn.calls)


def key_of_run(run: ToolRun) -> ToolKey:
    """Returns the key that the policy would use, if the recording has the command: often only the program."""
    return tool_key(run.tool, run.command or "")
