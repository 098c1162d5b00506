"""Sums a replay up: distributions, token counts, how pins ended. Pure arithmetic on records."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import numpy as np

from eval.records import JobRecord, TurnRecord
from eval.server_metrics import ServerMetrics


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds. Percentiles interpolate between neighbours."""

    count: int
    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Distribution | None:
        """None of nothing."""
        array = np.fromiter(values, dtype=np.float64)
        if not array.size:
            return None
        p50, p95, p99 = np.percentile(array, (50, 95, 99)).tolist()
        return cls(
            count=array.size, mean=float(array.mean()), p50=p50, p95=p95, p99=p99, max=float(array.max())
        )


class BenchResult(msgspec.Struct, kw_only=True):
    """A replay in numbers. Failed turns are in ``num_errors`` and nowhere else."""

    name: str
    """What was measured: a policy, a server."""
    model: str
    num_jobs: int
    num_completed_jobs: int
    num_cut_jobs: int
    """Replayed in part, since the rest was over a limit."""
    num_turns: int
    num_errors: int
    num_unlike_recording: int
    """Answers that were not the recorded text: the server does not force tokens."""
    wall_s: float
    job_completion_s: Distribution | None
    """Completed jobs only."""
    ttft_s: Distribution | None
    first_ttft_s: Distribution | None
    """First turns of jobs."""
    returning_ttft_s: Distribution | None
    """All later turns: those that come back from a tool."""
    prompt_tokens: int
    cached_tokens: int
    recomputed_tokens: int
    output_tokens: int
    num_preemptions: int | None
    """None if the server does not say."""
    num_pinned_turns: int
    """Turns whose receipt says that their KV was held."""
    pins_ended: dict[str, int]
    """How pins ended, by cause."""
    kv_usage_at_end: float | None = None
    """Share of the KV pool in use when all jobs had ended; anything but 0 is a leak."""
    notes: list[str] = []
    """What was assumed rather than measured."""


def summarise(
    name: str,
    model: str,
    jobs: list[JobRecord],
    turns: list[TurnRecord],
    before: ServerMetrics,
    after: ServerMetrics,
    notes: list[str],
) -> BenchResult:
    """The numbers of one replay."""
    answered = [turn for turn in turns if turn.error is None]
    completed = [job for job in jobs if job.error is None]
    ttfts = [(turn.turn, turn.ttft_s) for turn in answered if turn.ttft_s is not None]
    return BenchResult(
        name=name,
        model=model,
        num_jobs=len(jobs),
        num_completed_jobs=len(completed),
        num_cut_jobs=sum(job.num_planned_turns < job.num_recorded_turns for job in jobs),
        num_turns=len(answered),
        num_errors=len(turns) - len(answered),
        num_unlike_recording=sum(not turn.as_recorded for turn in answered),
        wall_s=max((job.end_s for job in jobs), default=0.0),
        job_completion_s=Distribution.of(job.completion_s for job in completed),
        ttft_s=Distribution.of(ttft_s for _, ttft_s in ttfts),
        first_ttft_s=Distribution.of(ttft_s for number, ttft_s in ttfts if number == 1),
        returning_ttft_s=Distribution.of(ttft_s for number, ttft_s in ttfts if number > 1),
        prompt_tokens=sum(turn.prompt_tokens for turn in answered),
        cached_tokens=sum(turn.cached_tokens for turn in answered),
        recomputed_tokens=sum(turn.recomputed_tokens for turn in answered),
        output_tokens=sum(turn.output_tokens for turn in answered),
        num_preemptions=after.preemptions_since(before),
        num_pinned_turns=sum(turn.receipt is not None and turn.receipt.ttl_s > 0 for turn in answered),
        pins_ended=after.pins_ended_since(before),
        kv_usage_at_end=after.kv_usage,
        notes=notes,
    )
