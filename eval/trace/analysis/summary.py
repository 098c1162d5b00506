"""Summarizes a trace on one screen: the file, the load of the engine, and the times of its jobs."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import polars as pl

from eval.trace.analysis.distribution import Distribution, Level
from eval.trace.analysis.draft_facts import DraftFacts
from eval.trace.analysis.faults import faults_of
from eval.trace.analysis.lives import TraceFacts
from eval.trace.analysis.phases import PHASE_NAMES, Seconds
from eval.trace.analysis.pool_use import PoolShares
from eval.trace.analysis.tables import SECONDS, TraceTables
from eval.trace.analysis.writing import NOTHING, count, percent, seconds, table, tokens

MAX_PLACES = 8
"""The most positions of a draft that the text shows."""


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the trace."""

    policy: str
    program: str
    """Version of the program that wrote it."""
    began: str | None
    """Date and time (UTC); None of a simulation."""
    duration_s: float
    num_blocks: int
    block_size: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_events: int
    num_files: int
    complete: bool
    """Whether the trace has every event from the engine's start to an orderly end."""
    faults: list[str]
    """Why it is not complete, in sentences."""

    @classmethod
    def of(cls, facts: TraceFacts) -> FileFacts:
        header = facts.header
        faults = faults_of(facts)
        wall = header.wall_time_s
        return cls(
            policy=header.policy,
            program=header.program,
            began=datetime.fromtimestamp(wall, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if wall else None,
            duration_s=facts.duration_s,
            num_blocks=header.num_blocks,
            block_size=header.block_size,
            num_host_blocks=header.num_host_blocks,
            max_num_seqs=header.max_num_seqs,
            max_num_batched_tokens=header.max_num_batched_tokens,
            num_events=facts.report.num_events,
            num_files=facts.report.num_parts,
            complete=not faults,
            faults=faults,
        )


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``continuum trace summary --json``. Seconds, tokens, blocks."""

    file: FileFacts
    num_jobs: int
    num_open_jobs: int
    """Jobs that were open when the trace ended."""
    turns_by_end: dict[str, int]
    num_steps: int
    tokens_per_step: float | None
    prompt_tokens: int
    """Prompt tokens of turns that began to run."""
    cached_tokens: int
    loaded_tokens: int
    """Cached tokens that came from host memory or disk."""
    disk_tokens: int
    """Loaded tokens that were read from disk."""
    recomputed_tokens: int
    output_tokens: int
    scheduled_tokens: int
    num_preemptions: int
    drafts: DraftFacts | None
    """None: there were none."""
    waiting: Level | None
    running: Level | None
    pool: PoolShares | None
    pins: dict[str, int]
    """Number of pins by outcome."""
    jct_s: Distribution | None
    """Completion times of jobs that are not open."""
    ttft_first_s: Distribution | None
    """Times to first token of turns that continue none."""
    ttft_returning_s: Distribution | None
    turns_waited_s: float
    """Waits of all turns, each by itself, even while another turn of its job ran."""
    longest_wait_s: float
    """The longest wait of one turn."""
    seconds: Seconds
    """All jobs' wall time by phase: a moment in which several turns of a job are open counts once."""

    @property
    def per_second(self) -> float:
        """The factor from a total to a rate."""
        return 1 / self.file.duration_s if self.file.duration_s > 0 else 0.0


def summarize(tables: TraceTables) -> TraceSummary:
    """Returns the figures of a trace."""
    jobs = tables.jobs
    totals = tables.totals
    ttft = tables.turns.filter(pl.col("started_s").is_not_null()).select("ttft_s", "gap_s", "turn").collect()
    first = ttft["gap_s"].is_null() & (ttft["turn"] <= 1)
    steps = tables.steps.select("tokens").collect(engine="streaming")
    return TraceSummary(
        file=FileFacts.of(tables.facts),
        num_jobs=len(jobs),
        num_open_jobs=int(jobs["open"].sum()),
        turns_by_end={end.value: number for end, number in totals.turns_by_end.most_common()},
        num_steps=len(steps),
        tokens_per_step=_mean(steps["tokens"]),
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        loaded_tokens=totals.loaded_tokens,
        disk_tokens=totals.disk_tokens,
        recomputed_tokens=totals.recomputed_tokens,
        output_tokens=totals.output_tokens,
        scheduled_tokens=int(steps["tokens"].sum()),
        num_preemptions=totals.num_preemptions,
        drafts=DraftFacts.of(totals.drafts, totals.output_tokens),
        waiting=totals.pool.waiting,
        running=totals.pool.running,
        pool=totals.pool.shares,
        pins={outcome.value: number for outcome, number in totals.pins.most_common()},
        jct_s=Distribution.of(jobs.filter(~pl.col("open"))["wall_s"].drop_nulls()),
        ttft_first_s=Distribution.of(ttft.filter(first)["ttft_s"].drop_nulls()),
        ttft_returning_s=Distribution.of(ttft.filter(~first)["ttft_s"].drop_nulls()),
        turns_waited_s=totals.turns_waited_s,
        longest_wait_s=totals.longest_wait_s,
        seconds=Seconds(**{name: float(jobs[name].sum()) for name in SECONDS}),
    )


def _mean(values: pl.Series) -> float | None:
    mean = values.mean()
    return float(mean) if isinstance(mean, int | float) else None


def _waits_told(summary: TraceSummary) -> str:
    """Describes the turns' waits: a wait while another turn of the job runs is not in the jobs' time."""
    longest = f"one of them {seconds(summary.longest_wait_s)} s"
    told = f"all turns together waited {seconds(summary.turns_waited_s)} s to run, {longest}"
    if summary.turns_waited_s - summary.seconds.waited_s > 0.001:
        told += "; what one waits while another turn of its job runs is not in the table"
    return told


def render(summary: TraceSummary) -> str:
    """Formats the summary for a screen."""
    parts = [_render_file(summary), _render_engine(summary), _render_pool(summary), _render_jobs(summary)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _render_file(summary: TraceSummary) -> list[str]:
    file = summary.file
    files = f" in {file.num_files} files" if file.num_files > 1 else ""
    host = f", {file.num_host_blocks:,} more in host memory" if file.num_host_blocks else ""
    began = f"from {file.began}" if file.began else "simulated"
    began = f"{began}, {file.num_events:,} events{files}"
    lines = [f"policy {file.policy or NOTHING}, {seconds(file.duration_s)} s, {began}"]
    lines.append(
        f"pool of {file.num_blocks:,} blocks of {file.block_size} tokens{host}; "
        f"at most {file.max_num_seqs} requests and {file.max_num_batched_tokens:,} tokens a step"
    )
    if file.complete:
        return [*lines, "the trace is complete"]
    return [*lines, *(f"NOT COMPLETE: {fault}" for fault in file.faults)]


def _render_engine(summary: TraceSummary) -> list[str]:
    rate = summary.per_second
    by_end = ", ".join(f"{number:,} {end}" for end, number in summary.turns_by_end.items())
    jobs = f"{summary.num_jobs:,} jobs ({summary.num_open_jobs:,} still open)"
    turns = f"{sum(summary.turns_by_end.values()):,} turns" + (f": {by_end}" if by_end else "")
    rates = (
        f"{summary.scheduled_tokens * rate:,.0f} tokens/s computed, "
        f"{summary.output_tokens * rate:,.1f} tokens/s of output"
    )
    cached = percent(summary.cached_tokens, summary.prompt_tokens)
    loaded = f", {tokens(summary.loaded_tokens)} of them from host memory" if summary.loaded_tokens else ""
    loaded += f" ({tokens(summary.disk_tokens)} of those read from disk)" if summary.disk_tokens else ""
    lines = [
        f"{jobs}, {turns}",
        f"{summary.num_steps:,} steps of {count(summary.tokens_per_step)} tokens; {rates}",
        f"of {tokens(summary.prompt_tokens)} prompt tokens {cached} were found in the cache{loaded}",
        f"{tokens(summary.recomputed_tokens)} prompt tokens that a job's turn before had were recomputed",
        f"{summary.num_preemptions:,} preemptions",
    ]
    if summary.drafts is not None:
        lines.append(_render_drafts(summary.drafts))
    if summary.pins:
        pins = ", ".join(
            f"{number:,} {outcome.replace('_', ' ')}" for outcome, number in summary.pins.items()
        )
        lines.append(f"{sum(summary.pins.values()):,} pins: {pins}")
    return lines


def _render_drafts(drafts: DraftFacts) -> str:
    by_place = " ".join(f"{share:.2f}" for share in drafts.accepted_by_place[:MAX_PLACES])
    accepted = percent(drafts.accepted_tokens, drafts.drafted_tokens)
    return (
        f"{tokens(drafts.drafted_tokens)} draft tokens verified, {accepted} accepted: "
        f"{drafts.tokens_per_step:.2f} output tokens per step of a request, "
        f"{drafts.tokens_per_draft:.2f} per step with drafts; by place {by_place or NOTHING}"
    )


def _render_pool(summary: TraceSummary) -> list[str]:
    rows = [
        [told, count(level.mean), count(level.p50), count(level.p95), count(level.max)]
        for told, level in (("requests waiting", summary.waiting), ("requests running", summary.running))
        if level is not None
    ]
    lines = table(["over time", "mean", "p50", "p95", "max"], rows) if rows else []
    if summary.pool is not None:
        pool = summary.pool
        cached = f"{percent(pool.cached, 1)} cached, " if pool.cached is not None else ""
        held = f"{percent(pool.running, 1)} running, {percent(pool.pinned, 1)} pinned"
        most = percent(pool.most_pinned, 1)
        lines += ["", f"pool, mean: {held} (at most {most}), {cached}{percent(pool.free, 1)} free"]
    return lines


def _render_jobs(summary: TraceSummary) -> list[str]:
    rows = [
        [
            told,
            count(spread.count),
            *(seconds(getattr(spread, name)) for name in ("mean", "p50", "p95", "p99", "max")),
        ]
        for told, spread in (
            ("job completion (JCT)", summary.jct_s),
            ("TTFT of first turns", summary.ttft_first_s),
            ("TTFT of returning turns", summary.ttft_returning_s),
        )
        if spread is not None
    ]
    lines = table(["seconds", "count", "mean", "p50", "p95", "p99", "max"], rows) if rows else []
    total_s = summary.seconds.total_s
    if total_s > 0:
        where = [
            [told, seconds(getattr(summary.seconds, name)), percent(getattr(summary.seconds, name), total_s)]
            for name, told in PHASE_NAMES.items()
            if getattr(summary.seconds, name) > 0
        ]
        lines += ["", *table(["where the jobs' time went", "s", ""], where)]
    if summary.turns_by_end:
        lines += ["", _waits_told(summary)]
    return lines
