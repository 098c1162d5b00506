"""The figures of a run that reports show: how each is read, written, and which way is better."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from eval.load.records import VerifiedDrafts
from eval.report.metrics import RunResult
from eval.trace.analysis.distribution import Distribution

Value = float | int | None


class Form(Protocol):
    """Formats a value; ``like`` is a value whose precision it uses, such as that next to an interval."""

    def __call__(self, value: float, like: float | None = None) -> str: ...


class Better(Enum):
    """Which of two values is better."""

    LESS = "less"
    MORE = "more"
    NEITHER = "neither"


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a run."""

    label: str
    """The full label with its unit. Leading spaces indent it under the figure above."""
    value: Callable[[RunResult], Value]
    form: Form
    better: Better = Better.NEITHER
    short: tuple[str, str] = ("", "")
    """The two header lines of a narrow column."""


def seconds(value: float, like: float | None = None) -> str:
    """Formats about four digits: 12.34, 123.4, 1,234; with as many decimals as ``like``, if given."""
    size = abs(value if like is None else like)
    return format(value, ",.2f" if size < 99.995 else ",.1f" if size < 999.95 else ",.0f")


def count(value: float, like: float | None = None) -> str:
    """Formats integers unchanged; a mean over seeds with one decimal while it is small."""
    size = value if like is None else like
    return format(value, ",.0f" if size == int(size) or abs(size) >= 1000 else ",.1f")


def tokens(value: float, like: float | None = None) -> str:
    """Formats thousands from a hundred thousand on, millions from a hundred million on."""
    size = abs(value if like is None else like)
    if size < 100_000:
        return format(value, ",.0f")
    return f"{value / 1e3:,.0f} k" if size < 1e8 else f"{value / 1e6:,.0f} M"


def percent(value: float, like: float | None = None) -> str:
    return format(value, ".1f")


def _of(name: str, statistic: str) -> Callable[[RunResult], Value]:
    """Returns a getter of one statistic of one distribution; it returns None if nothing was measured."""

    def get(result: RunResult) -> Value:
        distribution: Distribution | None = getattr(result, name)
        return None if distribution is None else getattr(distribution, statistic)

    return get


def _ms_of(name: str, statistic: str) -> Callable[[RunResult], Value]:
    in_seconds = _of(name, statistic)

    def get(result: RunResult) -> Value:
        value = in_seconds(result)
        return None if value is None else 1000 * value

    return get


def _percent_of(name: str) -> Callable[[RunResult], Value]:
    def get(result: RunResult) -> Value:
        share: float | None = getattr(result, name)
        return None if share is None else 100 * share

    return get


JOB_COMPLETION = Figure(
    "job completion, mean s",
    _of("job_completion_s", "mean"),
    seconds,
    Better.LESS,
    ("JCT, s", "mean"),
)
_COMPLETION_P95 = Figure("  p95", _of("job_completion_s", "p95"), seconds, Better.LESS, ("JCT, s", "p95"))
_JOBS_PER_HOUR = Figure("jobs per hour", lambda r: r.jobs_per_hour, count, Better.MORE, ("jobs", "per h"))
_RETURNING_P99 = Figure(
    "  p99", _of("returning_ttft_s", "p99"), seconds, Better.LESS, ("TTFT, s", "ret. p99")
)
_LONGEST_WAIT = Figure(
    "longest wait of a turn, s", lambda r: r.longest_wait_s, seconds, Better.LESS, ("longest", "wait, s")
)
_GOODPUT = Figure(
    "goodput, turns/s", lambda r: r.goodput_turns_per_s, seconds, Better.MORE, ("goodput", "turns/s")
)
_RECOMPUTED = Figure(
    "  recomputed", lambda r: r.recomputed_tokens, tokens, Better.LESS, ("recomp.", "tokens")
)
_HIT_RATE = Figure("  from cache, %", _percent_of("hit_rate"), percent, Better.MORE, ("cache", "hit %"))
_PREEMPTIONS = Figure("preemptions", lambda r: r.num_preemptions, count, Better.LESS, ("pre-", "empt."))
_HELD_IN_VAIN = Figure(
    "  pinned but wasted, % of pool x time",
    _percent_of("held_in_vain_share"),
    percent,
    short=("wasted", "% pool"),
)

_Get = Callable[[VerifiedDrafts], float | None]


def _of_drafts(get: _Get, scale: float = 1.0) -> Callable[[RunResult], Value]:
    """Returns a getter of a figure of drafts; it returns None if nothing was drafted."""

    def of_run(result: RunResult) -> Value:
        value = None if result.drafts is None else get(result.drafts)
        return None if value is None else scale * value

    return of_run


def _acceptance_at(place: int) -> _Get:
    return lambda drafts: drafts.acceptance_at(place)


_DRAFTS = (
    Figure("tokens per step", _of_drafts(lambda d: d.tokens_per_step), seconds, Better.MORE),
    Figure("  of jobs, p50", _of("job_tokens_per_step", "p50"), seconds, Better.MORE),
    Figure("  of steps with drafts", _of_drafts(lambda d: d.tokens_per_draft), seconds, Better.MORE),
    Figure("draft tokens verified", _of_drafts(lambda d: d.drafted_tokens), tokens),
    Figure("  accepted, %", _of_drafts(lambda d: d.acceptance_rate, 100), percent, Better.MORE),
    *(
        Figure(
            f"  drafts accepted up to token {number}, %",
            _of_drafts(_acceptance_at(number - 1), 100),
            percent,
        )
        for number in (1, 2, 4, 8)
    ),
)
"""The figures of speculative decoding."""

MAIN = (
    JOB_COMPLETION,
    _COMPLETION_P95,
    _JOBS_PER_HOUR,
    _RETURNING_P99,
    _LONGEST_WAIT,
    _GOODPUT,
    _RECOMPUTED,
    _HIT_RATE,
    _HELD_IN_VAIN,
)
"""The figures of a table of many runs."""

ALL = (
    Figure("jobs completed", lambda r: r.num_completed_jobs, count),
    Figure("turns answered", lambda r: r.num_turns, count),
    Figure("failed turns", lambda r: r.num_errors, count, Better.LESS),
    Figure("first arrival to last end, s", lambda r: r.wall_s, seconds),
    JOB_COMPLETION,
    Figure("  p50", _of("job_completion_s", "p50"), seconds, Better.LESS),
    _COMPLETION_P95,
    Figure("  p99", _of("job_completion_s", "p99"), seconds, Better.LESS),
    Figure("  max", _of("job_completion_s", "max"), seconds, Better.LESS),
    _JOBS_PER_HOUR,
    Figure("TTFT, p50 s", _of("ttft_s", "p50"), seconds, Better.LESS),
    Figure("  p99", _of("ttft_s", "p99"), seconds, Better.LESS),
    Figure("  max", _of("ttft_s", "max"), seconds, Better.LESS),
    Figure("TTFT of first turns, p50 s", _of("first_ttft_s", "p50"), seconds, Better.LESS),
    Figure("  p99", _of("first_ttft_s", "p99"), seconds, Better.LESS),
    Figure("  max", _of("first_ttft_s", "max"), seconds, Better.LESS),
    Figure("TTFT of returning turns, p50 s", _of("returning_ttft_s", "p50"), seconds, Better.LESS),
    _RETURNING_P99,
    Figure("  max", _of("returning_ttft_s", "max"), seconds, Better.LESS),
    Figure("time per output token, p50 ms", _ms_of("tpot_s", "p50"), seconds, Better.LESS),
    Figure("  p99", _ms_of("tpot_s", "p99"), seconds, Better.LESS),
    _LONGEST_WAIT,
    _GOODPUT,
    Figure("  output tokens/s", lambda r: r.goodput_tokens_per_s, seconds, Better.MORE),
    Figure("output tokens/s", lambda r: r.output_tokens_per_s, seconds, Better.MORE),
    Figure("output tokens", lambda r: r.output_tokens, tokens),
    Figure("prompt tokens", lambda r: r.prompt_tokens, tokens),
    Figure("  from cache", lambda r: r.cached_tokens, tokens, Better.MORE),
    _HIT_RATE,
    Figure("  computed", lambda r: r.computed_prefill_tokens, tokens, Better.LESS),
    _RECOMPUTED,
    Figure("  loaded from host memory", lambda r: r.host_tokens_loaded, tokens),
    Figure("    of these read from disk", lambda r: r.disk_tokens_loaded, tokens),
    _PREEMPTIONS,
    Figure("KV pool in use at the end, %", _percent_of("kv_usage_at_end"), percent, Better.LESS),
    Figure("turns pinned (receipts)", lambda r: r.num_pinned_turns, count),
    Figure("KV pinned but wasted, token-s", lambda r: r.held_in_vain_token_s, tokens),
    _HELD_IN_VAIN,
)
"""All figures, except for the outcomes of pins."""


def task_figures(runs: list[RunResult]) -> list[Figure]:
    """The number of solved tasks, if any of the runs had tasks."""
    solved = Figure("tasks solved", lambda run: run.num_solved, count, Better.MORE)
    return [solved] if any(run.num_solved is not None for run in runs) else []


def draft_figures(runs: list[RunResult]) -> list[Figure]:
    """Returns the figures of speculative decoding, if any of the runs drafted."""
    return list(_DRAFTS) if any(run.drafts is not None for run in runs) else []


def pin_figures(runs: list[RunResult]) -> list[Figure]:
    """A figure for each way in which a pin of any of the runs ended."""
    return [pin_figure(cause) for cause in sorted({cause for run in runs for cause in run.pins_ended})]


def pin_figure(cause: str) -> Figure:
    """The number of pins that ended in one way."""
    return Figure(f"  pins {cause.replace('_', ' ')}", lambda run: run.pins_ended.get(cause, 0), count)
