"""Sentences on what is measured and what is assumed in a workload, printed with every result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from eval.workloads.job import GapKind, Job, Turn
from eval.workloads.published import parse_preset


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFacts:
    """Facts from the makers of a recording that its fields do not contain."""

    tokens: str | None = None
    tool_times: str | None = None
    prefix: str | None = None


SOURCES = {
    "agentcgroup-glm": SourceFacts(
        tokens="measured (the server's usage)",
        tool_times="measured, 1 ms, per call; shell commands include a check by the model of about 6 s",
        prefix="system prompt and tools, about 12,500 tokens, are the same for all root jobs",
    ),
    "agentcgroup-claude": SourceFacts(
        tokens="prompts measured, outputs ESTIMATED (the larger of the count reported and chars/4)",
        tool_times="measured, 1 ms, per call",
        prefix="system prompt and tools, about 14,000 tokens, are the same for all root jobs",
    ),
    "kv-cache-tester": SourceFacts(
        tokens="measured (as a proxy counted)",
        tool_times="an upper bound: the client's gaps in steps of 1 s, with approval and its own overhead",
        prefix="block ids hold within a job and its sub-agents only",
    ),
    "miniswe-gemini3-text": SourceFacts(
        tokens="given by the provider, in the tokens of its model",
        tool_times="ASSUMED: drawn from agentcgroup-claude's times of the same program, within the time to "
        "the next turn",
        prefix="the system prompt's text is the same for all jobs; as counts it is not shared",
    ),
    "mooncake-conversation": SourceFacts(
        tokens="measured", prefix="block ids of 512 tokens hold across all jobs"
    ),
    "azure-code-arrivals": SourceFacts(tokens="measured", prefix="not recorded: nothing is shared"),
}


def describe(jobs: Sequence[Job]) -> list[str]:
    """One line each on tokens, gaps, arrivals and prefixes shared across jobs, per source of the jobs."""
    by_source: dict[str, list[Job]] = {}
    for job in jobs:
        by_source.setdefault(job.source, []).append(job)
    lines: list[str] = []
    for source, of_source in by_source.items():
        facts = SOURCES.get(source, SourceFacts())
        told = [
            f"tokens: {facts.tokens or _tokens(source, of_source)}",
            _gaps(of_source, facts),
            f"recorded arrivals: {_arrivals(of_source)}",
            f"prefixes across jobs: {facts.prefix or _prefix(of_source)}",
        ]
        preset = parse_preset(source)
        if preset is not None:
            told.append(f"ASSUMED of {preset.name}: {', '.join(preset.assumed)}")
        lines.extend(f"{source}: {line}" for line in told)
    return lines


def _tokens(source: str, jobs: Sequence[Job]) -> str:
    if parse_preset(source) is not None:
        return "SYNTHETIC, matched to published moments"
    if all(job.tokens_measured for job in jobs):
        return "measured"
    return "ESTIMATED from the length of the text"


def _gaps(jobs: Sequence[Job], facts: SourceFacts) -> str:
    turns = [turn for job in jobs for turn in job.turns if turn.gap_kind is not GapKind.END]
    tools = _counted(turn for turn in turns if turn.gap_kind is GapKind.TOOL)
    others = _counted(turn for turn in turns if turn.gap_kind is not GapKind.TOOL)
    line = f"tool times: {tools or 'none'}"
    if tools and facts.tool_times is not None:
        line += f" ({facts.tool_times})"
    if others:
        line += f"; other gaps: {others}"
    num_waits = sum(bool(turn.spawns) for turn in turns)
    return f"{line}; {num_waits} turns wait for sub-agents" if num_waits else line


def _counted(turns: Iterable[Turn]) -> str:
    listed = list(turns)
    measured = sum(turn.gap_measured for turn in listed)
    unknown = sum(turn.gap_s is None for turn in listed)
    parts = (
        (measured, "measured"),
        (len(listed) - measured - unknown, "ASSUMED"),
        (unknown, "unknown (taken as 0 s)"),
    )
    return ", ".join(f"{count} {name}" for count, name in parts if count)


def _arrivals(jobs: Sequence[Job]) -> str:
    roots = [job for job in jobs if job.parent_job is None]
    recorded = sum(job.arrival_s is not None for job in roots)
    return (
        "measured"
        if roots and recorded == len(roots)
        else f"{recorded} of {len(roots)}"
        if recorded
        else "none"
    )


def _prefix(jobs: Sequence[Job]) -> str:
    shared = {job.shared_prefix: job.shared_prefix_tokens for job in jobs if job.shared_prefix is not None}
    told = [f"{tokens:,} tokens are ASSUMED the same for all of {name}" for name, tokens in shared.items()]
    if any(turn.block_runs for job in jobs for turn in job.turns):
        told.append("by recorded block ids")
    return "; ".join(told) or "none known"
