"""Summarizes a workload in figures: jobs, turns, tokens and the times between turns, per tool."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

import msgspec

from eval.workloads.job import GapKind, Job
from eval.workloads.provenance import describe

MAX_TOOLS = 12
"""The most tools that are shown individually."""
TIMEOUTS_S = (10.0, 60.0, 300.0, 3600.0)
"""Idle times after which a cache forgets a job; hosted caches keep prompts for five minutes, or an hour."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and quantiles of some values."""

    count: int
    mean: float
    sd: float
    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Returns None without values. A quantile is the nearest-rank one."""
        ordered = sorted(values)
        if not ordered:
            return None
        p50, p90, p99 = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.9, 0.99))
        return cls(
            count=len(ordered),
            mean=statistics.fmean(ordered),
            sd=statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
            p50=p50,
            p90=p90,
            p99=p99,
            max=ordered[-1],
        )


class IdleTimeout(msgspec.Struct, frozen=True, kw_only=True):
    """What a cache of any size would save that forgets a job after some idle time."""

    timeout_s: float
    hit_rate: float
    """Prompt tokens that it finds, as a share of all prompt tokens."""
    amplification: float | None
    """Computed prompt tokens by those that no earlier turn of the job had; None if there are none."""

    @classmethod
    def of(cls, timeout_s: float, jobs: Iterable[Job]) -> IdleTimeout | None:
        """Returns None without prompt tokens. A gap of unknown length counts as none."""
        num_all = num_found = num_repeated = 0
        for job in jobs:
            gap_s = math.inf  # before its first turn, which finds nothing
            for turn in job.turns:
                num_all += turn.input_tokens
                num_repeated += turn.prefix_tokens
                num_found += turn.prefix_tokens if gap_s <= timeout_s else 0
                gap_s = turn.gap_s or 0.0
        if not num_all:
            return None
        num_new = num_all - num_repeated
        return cls(
            timeout_s=timeout_s,
            hit_rate=num_found / num_all,
            amplification=(num_all - num_found) / num_new if num_new else None,
        )


class WorkloadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A workload in figures."""

    name: str
    num_jobs: int
    num_sub_agents: int
    num_turns: int
    turns_per_job: Spread | None
    context_tokens: Spread | None
    """Tokens of prompt and output of a job's longest turn."""
    new_input_tokens: Spread | None
    """New input tokens per turn, beyond the tokens of the turn before."""
    output_tokens: Spread | None
    """Output tokens per turn."""
    gap_s: dict[str, Spread]
    """Length of gaps, by kind of gap."""
    tool_s: dict[str, Spread]
    """Time until a turn's last call ended, by its first tool and, for a shell, its program."""
    idle_timeouts: list[IdleTimeout]
    """Savings of a cache with each of ``TIMEOUTS_S``."""
    facts: list[str]
    """Sentences on what is measured and what is assumed."""
    notes: list[str]
    """Notes from reading, and on what was left out."""


def summarize(name: str, jobs: Sequence[Job], notes: Sequence[str] = ()) -> WorkloadSummary:
    """Returns the figures of all jobs."""
    turns = [turn for job in jobs for turn in job.turns]
    by_kind: dict[str, list[float]] = {}
    by_tool: dict[str, list[float]] = {}
    for turn in turns:
        if turn.gap_s is None:
            continue
        by_kind.setdefault(turn.gap_kind.value, []).append(turn.gap_s)
        if turn.gap_kind is GapKind.TOOL:
            called = " ".join(filter(None, (turn.tool, turn.command)))
            by_tool.setdefault(called or "unnamed", []).append(turn.gap_s)
    num_children = sum(job.parent_job is not None for job in jobs)
    return WorkloadSummary(
        name=name,
        num_jobs=len(jobs) - num_children,
        num_sub_agents=num_children,
        num_turns=len(turns),
        turns_per_job=Spread.of(len(job.turns) for job in jobs),
        context_tokens=Spread.of(job.max_context_tokens for job in jobs),
        new_input_tokens=Spread.of(turn.new_input_tokens for turn in turns),
        output_tokens=Spread.of(turn.output_tokens for turn in turns),
        gap_s=_spreads(by_kind),
        tool_s=_spreads(by_tool),
        idle_timeouts=[
            found for timeout_s in TIMEOUTS_S if (found := IdleTimeout.of(timeout_s, jobs)) is not None
        ],
        facts=describe(jobs),
        notes=list(notes),
    )


def _spreads(values: dict[str, list[float]]) -> dict[str, Spread]:
    """Returns the spread by name, the most frequent first."""
    ordered = sorted(values.items(), key=lambda entry: (-len(entry[1]), entry[0]))
    return {name: spread for name, times in ordered if (spread := Spread.of(times)) is not None}


def render(summary: WorkloadSummary) -> str:
    """Formats the summary for one screen."""
    sub_agents = f" and {summary.num_sub_agents} sub-agents" if summary.num_sub_agents else ""
    head = f"{summary.name}: {summary.num_jobs} jobs{sub_agents}, {summary.num_turns} turns"
    rows = [
        ("turns per job", summary.turns_per_job),
        ("context tokens per job", summary.context_tokens),
        ("new input tokens per turn", summary.new_input_tokens),
        ("output tokens per turn", summary.output_tokens),
        *((f"seconds after a turn: {kind}", spread) for kind, spread in summary.gap_s.items()),
        *((f"  {tool}", spread) for tool, spread in list(summary.tool_s.items())[:MAX_TOOLS]),
    ]
    names = ("count", "mean", "sd", "p50", "p90", "p99", "max")
    table = ["".join(("", *(f"{name:>11}" for name in names))).rjust(34 + 11 * len(names))]
    for told, spread in rows:
        if spread is not None:
            cells = (_cell(getattr(spread, name)) for name in names)
            table.append(f"{told[:34]:34}" + "".join(f"{cell:>11}" for cell in cells))
    others = len(summary.tool_s) - MAX_TOOLS
    if others > 0:
        table.append(f"  and {others} more tools")
    table += ["", *_idle_table(summary.idle_timeouts)]
    return "\n".join([head, "", *table, "", *summary.facts, *(f"note: {note}" for note in summary.notes)])


def _idle_table(timeouts: Sequence[IdleTimeout]) -> list[str]:
    """What is found by a cache of any size that keeps a job's KV for some idle time."""
    if not timeouts:
        return []
    lines = [f"{'KV kept for this long after a turn':34}{'found':>11}{'computed / new':>18}"]
    for each in timeouts:
        amplified = "-" if each.amplification is None else f"{each.amplification:.1f}"
        lines.append(f"  {each.timeout_s:g} s".ljust(34) + f"{each.hit_rate:>11.1%}{amplified:>18}")
    return lines


def _cell(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"
