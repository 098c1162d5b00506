"""Recorded gaps with the durations that a server would have predicted, to learn corrections from."""

from __future__ import annotations

from collections.abc import Sequence

from continuum.learning.tool_stats import ToolStats
from continuum.tuning import Tuning
from estimator.learned.call_history import CallFacts, CallHistory, PastCall, kind_of, log_of
from eval.learn.past_jobs import groups_of, learn_tools, tools_of
from eval.workloads.job import Job

NUM_FOLDS = 4


def past_calls(jobs: Sequence[Job]) -> list[PastCall]:
    """Returns each gap as a server that has learned from jobs of other groups would predict it; none if there
    is only one group."""
    groups = groups_of(jobs)
    past = list[PastCall]()
    names = sorted(set(groups))
    fold_of = {name: place % NUM_FOLDS for place, name in enumerate(names)}
    for fold in range(min(NUM_FOLDS, len(names)) if len(names) > 1 else 0):
        others = ToolStats(Tuning())
        learn_tools(others, [job for job, group in zip(jobs, groups, strict=True) if fold_of[group] != fold])
        state = others.state()
        for job, group in zip(jobs, groups, strict=True):
            if fold_of[group] == fold and state is not None:
                past += _of_job(job, group, state)
    return past


def _of_job(job: Job, group: str, state: str) -> list[PastCall]:
    """Returns the gaps of a job, each predicted as if no gap of the job had ended yet."""
    stats = ToolStats(Tuning())
    history = CallHistory()
    past = []
    stats.recall(state)
    clock_s = 0.0
    for number, turn in enumerate(job.turns[:-1]):
        tools = tools_of(turn)
        gap_s = turn.gap_s
        clock_s += gap_s or 0.0
        if not tools or gap_s is None:
            continue
        key = stats.slowest(tools, job.job_id, job.tenant)
        facts = CallFacts(number, len(tools), turn.input_tokens, turn.output_tokens)
        row = history.row(stats.curve(tools, job.job_id, job.tenant), key, facts)
        if row is not None:
            past.append(PastCall(group, kind_of(key), tuple(row), log_of(gap_s)))
        history.add(key, gap_s)
        stats.observe(tools, gap_s, clock_s, job_id=job.job_id, tenant=job.tenant)
    return past
