"""A whole trace on a screen: what the file is, how busy the engine was, and how its jobs fared."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
import polars as pl

from tracing.analysis.distribution import Distribution, Level
from tracing.analysis.faults import faults_of
from tracing.analysis.lives import TraceFacts
from tracing.analysis.phases import PHASE_NAMES, Seconds
from tracing.analysis.tables import SECONDS, TraceTables
from tracing.analysis.writing import NOTHING, count, percent, seconds, table, tokens


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the trace is."""

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
    """From the engine's start to an orderly end, with every event."""
    faults: list[str]
    """Why it is not, in sentences."""

    @classmethod
    def of(cls, facts: TraceFacts) -> FileFacts:
        header, faults = facts.header, faults_of(facts)
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


class PoolShares(msgspec.Struct, frozen=True, kw_only=True):
    """Who had the KV pool: means over time, of all its blocks."""

    running: float
    pinned: float
    cached: float | None
    """Free and findable; None: the trace does not tell it from empty."""
    free: float
    """Free and empty; both kinds of free, if cached is None."""
    most_pinned: float


class TraceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What ``continuum trace summary --json`` prints. Seconds, tokens, blocks."""

    file: FileFacts
    num_jobs: int
    num_open_jobs: int
    """Under way where the trace ends."""
    turns_by_end: dict[str, int]
    num_steps: int
    tokens_per_step: float | None
    prompt_tokens: int
    """Of turns that began to run."""
    cached_tokens: int
    loaded_tokens: int
    """Of those: from host memory or disk."""
    disk_tokens: int
    """Of those: read from disk."""
    recomputed_tokens: int
    output_tokens: int
    scheduled_tokens: int
    num_preemptions: int
    waiting: Level | None
    running: Level | None
    pool: PoolShares | None
    pins: dict[str, int]
    """By what became of them."""
    jct_s: Distribution | None
    """Of jobs that are not open."""
    ttft_first_s: Distribution | None
    """Of turns that continue none."""
    ttft_returning_s: Distribution | None
    seconds: Seconds
    """Where the wall time of all jobs went."""

    @property
    def per_second(self) -> float:
        """What a total is multiplied by to have a rate."""
        return 1 / self.file.duration_s if self.file.duration_s > 0 else 0.0


def summarise(tables: TraceTables) -> TraceSummary:
    """The figures of a trace."""
    jobs = tables.jobs
    turns = tables.turns.select(
        "end", "ttft_s", "gap_s", "turn", "started_s", "num_prompt_tokens", "cached_tokens", "loaded_tokens",
        "disk_tokens", "recomputed_tokens", "num_output_tokens", "num_preemptions",
    ).collect()  # fmt: skip
    began = turns.filter(pl.col("started_s").is_not_null())
    first = began["gap_s"].is_null() & (began["turn"] <= 1)
    steps = tables.steps.select(
        "tokens", "num_waiting", "num_running", "running_blocks", "pinned_blocks", "free_blocks",
        "empty_blocks", "total_blocks", lasted_s=pl.col("until_s") - pl.col("now"),
    ).collect(engine="streaming")  # fmt: skip
    return TraceSummary(
        file=FileFacts.of(tables.facts),
        num_jobs=len(jobs),
        num_open_jobs=int(jobs["open"].sum()),
        turns_by_end=_counts(turns["end"]),
        num_steps=len(steps),
        tokens_per_step=_mean(steps["tokens"]),
        prompt_tokens=int(began["num_prompt_tokens"].sum()),
        cached_tokens=int(began["cached_tokens"].sum()),
        loaded_tokens=int(began["loaded_tokens"].sum()),
        disk_tokens=int(began["disk_tokens"].sum()),
        recomputed_tokens=int(began["recomputed_tokens"].sum()),
        output_tokens=int(turns["num_output_tokens"].sum()),
        scheduled_tokens=int(steps["tokens"].sum()),
        num_preemptions=int(turns["num_preemptions"].sum()),
        waiting=Level.of(steps, "num_waiting", "lasted_s"),
        running=Level.of(steps, "num_running", "lasted_s"),
        pool=_pool_shares(steps),
        pins=_counts(tables.pins.select("outcome").collect()["outcome"]),
        jct_s=Distribution.of(jobs.filter(~pl.col("open"))["wall_s"]),
        ttft_first_s=Distribution.of(began.filter(first)["ttft_s"]),
        ttft_returning_s=Distribution.of(began.filter(~first)["ttft_s"]),
        seconds=Seconds(**{name: float(jobs[name].sum()) for name in SECONDS}),
    )


def _counts(values: pl.Series) -> dict[str, int]:
    """The most frequent first."""
    counted = values.value_counts().sort(["count", values.name], descending=[True, False])
    return {str(value): int(number) for value, number in counted.iter_rows()}


def _mean(values: pl.Series) -> float | None:
    mean = values.mean()
    return float(mean) if isinstance(mean, int | float) else None


def _pool_shares(steps: pl.DataFrame) -> PoolShares | None:
    total = int(steps["total_blocks"].max() or 0)  # type: ignore[arg-type]
    if not total or not float(steps["lasted_s"].sum()) > 0:
        return None

    def share(column: str) -> float:
        level = Level.of(steps, column, "lasted_s")
        return level.mean / total if level is not None else 0.0

    told = steps["empty_blocks"].null_count() == 0
    free = share("free_blocks")
    empty = share("empty_blocks") if told else free
    return PoolShares(
        running=share("running_blocks"),
        pinned=share("pinned_blocks"),
        cached=free - empty if told else None,
        free=empty,
        most_pinned=float(steps["pinned_blocks"].max() or 0) / total,  # type: ignore[arg-type]
    )


def render(summary: TraceSummary) -> str:
    """As a text of a screen."""
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
        f"{tokens(summary.recomputed_tokens)} prompt tokens that a job's turn before had were computed again",
        f"{summary.num_preemptions:,} preemptions",
    ]
    if summary.pins:
        pins = ", ".join(
            f"{number:,} {outcome.replace('_', ' ')}" for outcome, number in summary.pins.items()
        )
        lines.append(f"{sum(summary.pins.values()):,} pins: {pins}")
    return lines


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
    return lines
