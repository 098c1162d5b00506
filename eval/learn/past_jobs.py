"""Recorded jobs in the form from which a server learns."""

from __future__ import annotations

from collections.abc import Sequence

from continuum.learning.tool_stats import ToolStats
from estimator.learned.job_history import PastJob, TurnFacts
from estimator.tool_key import ToolKey
from eval.learn.calls import key_of_run
from eval.workloads.families import eldest
from eval.workloads.job import GapKind, Job, Turn


def past_jobs(jobs: Sequence[Job]) -> list[PastJob]:
    """Returns the trainer's input. Runs of one task, and sub-agents and their starters, form one group."""
    return [PastJob(group, _facts(job)) for group, job in zip(groups_of(jobs), jobs, strict=True)]


def groups_of(jobs: Sequence[Job]) -> list[str]:
    """Returns the group of each job."""
    parents = {job.job_id: job.parent_job for job in jobs}
    return [job.group or eldest(job.job_id, parents) for job in jobs]


def learn_tools(stats: ToolStats, jobs: Sequence[Job]) -> int:
    """Lets ``stats`` observe each gap between two turns, job by job; returns the number of observed gaps."""
    num_gaps = 0
    clock_s = 0.0
    for job in jobs:
        for turn, after in zip(job.turns, (*job.turns[1:], None), strict=True):
            tools = tools_of(turn)
            if tools is None:
                continue
            if after is None:
                stats.observe_last_turn(tools, job.tenant)
                continue
            clock_s += turn.gap_s or 0.0
            if turn.gap_s is not None and tools:
                stats.observe(tools, turn.gap_s, clock_s, job_id=job.job_id, tenant=job.tenant)
                num_gaps += 1
            growth = after.input_tokens - turn.input_tokens - turn.output_tokens
            stats.observe_next_turn(tools, growth, job.tenant)
    return num_gaps


def _facts(job: Job) -> tuple[TurnFacts, ...]:
    gaps_s = (0.0, *(turn.gap_s or 0.0 for turn in job.turns))
    return tuple(
        TurnFacts(
            turn.input_tokens,
            turn.new_input_tokens,
            turn.output_tokens,
            gap_s,
            tuple(key_of_run(run).parts[0] for run in turn.calls),
        )
        for turn, gap_s in zip(job.turns, gaps_s, strict=False)
    )


def tools_of(turn: Turn) -> list[ToolKey] | None:
    """Returns the turn's tool calls; None if they were not recorded."""
    if not turn.calls and turn.gap_kind in (GapKind.TOOL, GapKind.UNKNOWN):
        return None
    return [key_of_run(run) for run in turn.calls]
