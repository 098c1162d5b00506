"""Compares two traces of the same jobs: which jobs gained and lost, how much, and where.

Jobs are matched by id, without the load generator's mark of a run. The reason of a change is the part of the
job's time that changed most in the direction of the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import polars as pl

from eval.trace.analysis.distribution import Distribution
from eval.trace.analysis.summary import TraceSummary, summarize
from eval.trace.analysis.tables import TraceTables
from eval.trace.analysis.writing import NOTHING, count, percent, seconds, signed, table, tokens, wrapped

PARTS = {
    "queue_s": "waiting for its place",
    "memory_s": "waiting for memory",
    "grammar_s": "waiting for grammars",
    "load_s": "loading from host memory or disk",
    "prefill_s": "prefill",
    "decode_s": "decode",
    "lost_s": "preempted and recomputing",
    "between_s": "between turns",
}
"""Parts of a job's time, as in its account, except that all costs of preemption are one part, and all time
between turns is one (a policy without tools writes none into its trace)."""

RUN_MARK = r"\.[0-9a-f]{6}$"
"""The suffix that ``continuum bench`` adds to the ids of its jobs."""


class JobChange(msgspec.Struct, frozen=True, kw_only=True):
    """A job in both traces; differences are the second minus the first."""

    job_id: str
    a_s: float
    b_s: float
    change_s: float
    parts_s: dict[str, float]
    """The change by part of its time; adds up to the total."""
    reason: str
    """The part that changed most in the same direction."""
    a_recomputed_tokens: int
    b_recomputed_tokens: int


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of both traces."""

    name: str
    a: float | None
    b: float | None


class TraceDiff(msgspec.Struct, frozen=True, kw_only=True):
    """The output of ``continuum trace diff --json``."""

    a: TraceSummary
    b: TraceSummary
    figures: list[Figure]
    jobs: list[JobChange]
    """Jobs that are complete in both, the largest gain first."""
    only_a: list[str]
    """Ids of jobs that the other trace lacks; likewise below."""
    only_b: list[str]
    open: list[str]
    """Jobs in both that are open where one trace ends: not compared."""
    parts_s: dict[str, float]
    """Mean change of a job by part of its time."""


def compare(a: TraceTables, b: TraceTables) -> TraceDiff:
    """Compares the second trace with the first."""
    jobs_a, jobs_b = _same_names(a.jobs.filter(pl.col("named")), b.jobs.filter(pl.col("named")))
    both = _parted(jobs_a).join(_parted(jobs_b), on="job_id", suffix="_b")
    is_open = _open_in_one(a, b)
    open_in_one = both.filter(is_open)
    closed = both.filter(~is_open)
    jobs = [_change(row) for row in closed.iter_rows(named=True)]
    jobs.sort(key=lambda job: (job.change_s, job.job_id))
    of_a = summarize(a)
    of_b = summarize(b)
    return TraceDiff(
        a=of_a,
        b=of_b,
        figures=[Figure(name=each.name.strip(), a=each.get(of_a), b=each.get(of_b)) for each in _FIGURES],
        jobs=jobs,
        only_a=jobs_a.join(jobs_b, on="job_id", how="anti")["job_id"].to_list(),
        only_b=jobs_b.join(jobs_a, on="job_id", how="anti")["job_id"].to_list(),
        open=open_in_one["job_id"].to_list(),
        parts_s={name: sum(job.parts_s[name] for job in jobs) / len(jobs) for name in PARTS} if jobs else {},
    )


def _same_names(a: pl.DataFrame, b: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Removes the load generator's run mark from job ids, if otherwise no job would be in both traces and if
    ids stay distinct without it."""
    if not a.join(b, on="job_id", how="semi").is_empty():
        return a, b
    plain_a, plain_b = (jobs.with_columns(pl.col("job_id").str.replace(RUN_MARK, "")) for jobs in (a, b))
    if plain_a["job_id"].is_duplicated().any() or plain_b["job_id"].is_duplicated().any():
        return a, b
    return plain_a, plain_b


def _open_in_one(a: TraceTables, b: TraceTables) -> pl.Expr:
    """Also covers policies without calls: a job with more turns in the other trace continues after the
    cut."""
    is_open = pl.col("open") | pl.col("open_b")
    if a.facts.report.end is None:
        is_open |= pl.col("num_turns") < pl.col("num_turns_b")
    if b.facts.report.end is None:
        is_open |= pl.col("num_turns_b") < pl.col("num_turns")
    return is_open


def _parted(jobs: pl.DataFrame) -> pl.DataFrame:
    return jobs.with_columns(
        lost_s=pl.col("preempted_s") + pl.col("recompute_s"), between_s=pl.col("tool_s") + pl.col("client_s")
    )


def _change(row: dict[str, float | int | str]) -> JobChange:
    parts = {name: float(row[f"{name}_b"]) - float(row[name]) for name in PARTS}
    change_s = float(row["wall_s_b"]) - float(row["wall_s"])
    direction = -1 if change_s < 0 else 1
    reason = max(parts, key=lambda name: direction * parts[name])
    return JobChange(
        job_id=str(row["job_id"]),
        a_s=float(row["wall_s"]),
        b_s=float(row["wall_s_b"]),
        change_s=change_s,
        parts_s=parts,
        reason=PARTS[reason],
        a_recomputed_tokens=int(row["recomputed_tokens"]),
        b_recomputed_tokens=int(row["recomputed_tokens_b"]),
    )


def _of(distribution: str, statistic: str) -> Callable[[TraceSummary], float | None]:
    def get(summary: TraceSummary) -> float | None:
        found: Distribution | None = getattr(summary, distribution)
        return None if found is None else float(getattr(found, statistic))

    return get


def _share(part: str, whole: str) -> Callable[[TraceSummary], float | None]:
    def get(summary: TraceSummary) -> float | None:
        of = getattr(summary, whole)
        return 100 * getattr(summary, part) / of if of else None

    return get


@dataclass(frozen=True, slots=True)
class _Compared:
    name: str
    get: Callable[[TraceSummary], float | None]
    form: Callable[[float | None], str]


_FIGURES = (
    _Compared("JCT, mean s", _of("jct_s", "mean"), seconds),
    _Compared("  p50", _of("jct_s", "p50"), seconds),
    _Compared("  p95", _of("jct_s", "p95"), seconds),
    _Compared("  p99", _of("jct_s", "p99"), seconds),
    _Compared("TTFT of first turns, p50 s", _of("ttft_first_s", "p50"), seconds),
    _Compared("  p95", _of("ttft_first_s", "p95"), seconds),
    _Compared("TTFT of returning turns, p50 s", _of("ttft_returning_s", "p50"), seconds),
    _Compared("  p95", _of("ttft_returning_s", "p95"), seconds),
    _Compared("duration s", lambda summary: summary.file.duration_s, seconds),
    _Compared("output tokens/s", lambda summary: summary.output_tokens * summary.per_second, seconds),
    _Compared("prompt tokens cached, %", _share("cached_tokens", "prompt_tokens"), count),
    _Compared("tokens recomputed", lambda summary: summary.recomputed_tokens, tokens),
    _Compared("preemptions", lambda summary: summary.num_preemptions, count),
    _Compared("requests waiting, mean", lambda one: one.waiting.mean if one.waiting else None, count),
    _Compared("pool pinned, mean %", lambda one: 100 * one.pool.pinned if one.pool else None, count),
)


def render(diff: TraceDiff, limit: int) -> str:
    """Formats the comparison for a screen; ``limit``: the most gains, and the most losses."""
    a = diff.a.file.policy or "A"
    b = diff.b.file.policy or "B"
    if a == b:
        a = f"A ({a})"
        b = f"B ({b})"
    parts = [_render_figures(diff, a, b), _render_missing(diff)]
    if diff.jobs:
        parts += [_render_parts(diff), *_render_jobs(diff, a, b, limit)]
    return "\n\n".join("\n".join(part) for part in parts if part)


def _render_figures(diff: TraceDiff, a: str, b: str) -> list[str]:
    rows = []
    for figure, compared in zip(diff.figures, _FIGURES, strict=True):
        form = compared.form
        change = ratio = NOTHING
        if figure.a is not None and figure.b is not None:
            change = ("+" if figure.b > figure.a else "") + form(figure.b - figure.a)
            ratio = _ratio(figure.b / figure.a) if figure.a else NOTHING
        rows.append([compared.name, form(figure.a), form(figure.b), change, ratio])
    return table(["", a, b, "change", "ratio"], rows)


def _ratio(value: float) -> str:
    return f"{value:.2f}x" if value < 99.5 else f"{value:,.0f}x"


def _render_missing(diff: TraceDiff) -> list[str]:
    lines = []
    for told, ids in (
        ("only in the first", diff.only_a),
        ("only in the second", diff.only_b),
        ("not compared, as they were under way where a trace ends", diff.open),
    ):
        if ids:
            more = f" and {len(ids) - 3:,} more" if len(ids) > 3 else ""
            lines += wrapped(f"{len(ids):,} jobs {told}: {', '.join(ids[:3])}{more}.")
    if not diff.jobs:
        lines += wrapped("No job is complete in both: jobs are compared where their ids are the same.")
    return lines


def _render_parts(diff: TraceDiff) -> list[str]:
    gained = sum(job.change_s < 0 for job in diff.jobs)
    lost = sum(job.change_s > 0 for job in diff.jobs)
    mean_s = sum(diff.parts_s.values())
    head = f"{len(diff.jobs):,} jobs in both: {gained:,} gained ({percent(gained, len(diff.jobs))})"
    head = f"{head}, {lost:,} lost"
    rows = [[PARTS[name], signed(value)] for name, value in diff.parts_s.items() if abs(value) >= 0.0005]
    rows.append(["in all", signed(mean_s)])
    return [f"{head}; where the mean job's time changed:", *table(["", "s"], rows)]


def _render_jobs(diff: TraceDiff, a: str, b: str, limit: int) -> list[list[str]]:
    gains = [job for job in diff.jobs if job.change_s < 0][:limit]
    losses = [job for job in reversed(diff.jobs) if job.change_s > 0][:limit]
    return [
        table(
            [told, f"{a} s", f"{b} s", "change", "most of it", "s"],
            [
                [
                    job.job_id,
                    seconds(job.a_s),
                    seconds(job.b_s),
                    signed(job.change_s),
                    job.reason,
                    signed(job.parts_s[next(name for name, part in PARTS.items() if part == job.reason)]),
                ]
                for job in jobs
            ],
        )
        for told, jobs in (("largest gains", gains), ("largest losses", losses))
        if jobs
    ]
