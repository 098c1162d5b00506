"""Times and counts of requests as the API server sees them, for metrics. Monotonic seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.records.reported_stats import SchedulerStats


@dataclass(slots=True)
class RequestStats:
    """Statistics of one request (one answer if n > 1), updated as its tokens arrive."""

    arrival_time: float
    num_prompt_tokens: int
    num_generation_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    queued_s: float = 0.0
    """Time from arrival to the first step that scheduled it."""
    first_token_time: float | None = None
    last_token_time: float | None = None


@dataclass(frozen=True, slots=True)
class FinishedRequestStats:
    """Time of a finished request by phase."""

    finish_reason: str
    num_prompt_tokens: int
    num_generation_tokens: int
    num_cached_tokens: int
    max_tokens: int | None
    e2e_s: float
    queued_s: float
    prefill_s: float
    """Time from first scheduling to the first token."""
    decode_s: float
    """Time from the first to the last token."""
    inference_s: float
    """Time from first scheduling to the last token."""
    mean_time_per_output_token_s: float
    """Mean time per token after the first; 0 if there is only one."""


@dataclass(slots=True)
class IterationStats:
    """Statistics of one message of the core, over all requests."""

    timestamp: float
    engine: int = 0
    """Number of the core, if there are several."""
    num_prompt_tokens: int = 0
    """Prompt tokens of requests whose first token came in this iteration."""
    num_generation_tokens: int = 0
    time_to_first_tokens_s: list[float] = field(default_factory=list)
    inter_token_latencies_s: list[float] = field(default_factory=list)
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    """Finished requests, one per answer, aborted ones included."""
    n_params_iter: list[int] = field(default_factory=list)
    """``n`` of each request whose last answer ended."""


StatsListener = Callable[[SchedulerStats | None, IterationStats], None]
"""Called once per message of the core, on the thread that processes outputs; must be fast."""


def finished_request_stats(
    stats: RequestStats, *, now: float, finish_reason: str, max_tokens: int | None
) -> FinishedRequestStats:
    """Statistics of a request that has just ended."""
    scheduled = stats.arrival_time + stats.queued_s
    first = stats.first_token_time if stats.first_token_time is not None else now
    last = stats.last_token_time if stats.last_token_time is not None else now
    num_later = stats.num_generation_tokens - 1
    return FinishedRequestStats(
        finish_reason=finish_reason,
        num_prompt_tokens=stats.num_prompt_tokens,
        num_generation_tokens=stats.num_generation_tokens,
        num_cached_tokens=stats.num_cached_tokens,
        max_tokens=max_tokens,
        e2e_s=now - stats.arrival_time,
        queued_s=stats.queued_s,
        prefill_s=first - scheduled,
        decode_s=last - first,
        inference_s=last - scheduled,
        mean_time_per_output_token_s=(last - first) / num_later if num_later > 0 else 0.0,
    )
