"""All metrics in the order of the page: V1's names where V1 has the metric, others under ``continuum:``.

A metric is added here alone: the registry, the recording and ``docs/metrics.md`` follow.
"""

from __future__ import annotations

from engine.core.policy import PinEnd
from engine.frontend.stats import FinishedRequestStats, IterationStats
from engine.metrics.buckets import (
    BLOCK_LIFE_BUCKETS_S,
    GAP_BUCKETS_S,
    ITERATION_BUCKETS,
    ITL_BUCKETS_S,
    JOB_BUCKETS_S,
    LATENCY_BUCKETS_S,
    N_BUCKETS,
    TTFT_BUCKETS_S,
    TURN_BUCKETS,
)
from engine.metrics.metric import Metric, counter, gauge, histogram
from engine.records.messages import FinishReason, TurnReceipt
from engine.records.reported_stats import (
    BlockLives,
    ContinuedStats,
    JobEnd,
    JobStats,
    SchedulerStats,
    SpecDecodingStats,
)

PIN_ENDS = tuple(map(str, PinEnd))

VIEWERS = gauge("continuum:dashboard_viewers", "Viewers of /dashboard.")
REJECTIONS = counter(
    "vllm:admission_rejections",
    "Requests refused with 503 or 429, by the limit that was reached.",
    label="reason",
    of_server=True,
)
VOLATILE_TEXTS = counter(
    "continuum:prefix_killers_removed",
    "Volatile texts removed from prompts because they change with every request, by kind.",
    label="kind",
)
CONTINUED_PROMPTS = counter(
    "continuum:continued_prompts",
    "Prompts that continue a turn whose tokens the API server has, by how they were made: by appending "
    "to these tokens, or by rendering the whole prompt.",
    label="made",
    label_values=("appended", "rendered"),
)
KEY_USAGE = {
    word: counter(f"continuum:key_{word}", text, label="key", of_server=True)
    for word, text in (
        ("requests", "Requests of each key of the key file."),
        ("prompt_tokens", "Prompt tokens of each key of the key file."),
        ("output_tokens", "Output tokens of each key of the key file."),
        ("computed_tokens", "Output tokens, and prompt tokens that were not cached, of each such key."),
    )
}
"""Use by key, by the words of quotas."""
MEDIA = counter("vllm:mm_cache_queries", "Pictures and clips in prompts.")
KNOWN_MEDIA = counter("vllm:mm_cache_hits", "Pictures and clips in prompts that had been decoded before.")


def _share(used: int, total: int) -> float | None:
    """None where there is nothing to have a share of."""
    return used / total if total else None


def _unless_aborted(stats: FinishedRequestStats, value: float | None) -> float | None:
    """The times and lengths of an aborted request reflect its client, those of one that failed before its
    first token nothing."""
    is_empty = stats.finish_reason == str(FinishReason.ERROR) and not stats.num_generation_tokens
    return None if is_empty or stats.finish_reason == str(FinishReason.ABORT) else value


GAUGES = (
    gauge("vllm:num_requests_running", "Requests in the running batch.", SchedulerStats, "num_running_reqs"),
    gauge(
        "vllm:num_requests_waiting", "Requests waiting to be scheduled.", SchedulerStats, "num_waiting_reqs"
    ),
    gauge(
        "vllm:kv_cache_usage_perc",
        "Share of KV blocks that running work holds.",
        SchedulerStats,
        lambda stats: stats.kv_usage if stats.num_total_blocks else None,
    ),
    gauge("continuum:pins", "Pins: branch tips retained across a tool call.", SchedulerStats, "num_pins"),
    gauge("continuum:pinned_blocks", "KV blocks retained by pins.", SchedulerStats, "num_pinned_blocks"),
    gauge(
        "continuum:pinned_share",
        "Share of the KV blocks that only pins hold: they can be taken.",
        SchedulerStats,
        lambda stats: _share(stats.num_pinned_alone_blocks, stats.num_total_blocks),
    ),
    gauge("continuum:jobs", "Known jobs: neither finished nor forgotten.", JobStats, "num_jobs"),
    gauge(
        "continuum:jobs_that_fit",
        "How many more jobs like the recent ones may begin now, beside what begun jobs are expected to need.",
        JobStats,
        "num_that_fit",
    ),
    VIEWERS,
    gauge(
        "continuum:host_kv_usage_perc",
        "Slots of the host tier in use; 1 is all of them.",
        SchedulerStats,
        lambda stats: _share(stats.num_used_host_blocks, stats.num_host_blocks),
    ),
    gauge(
        "continuum:disk_kv_usage_perc",
        "Slots of the disk tier that hold KV; 1 is all of them.",
        SchedulerStats,
        lambda stats: _share(stats.num_used_disk_blocks, stats.num_disk_blocks),
    ),
    gauge(
        "continuum:state_usage_perc",
        "State slots in use; 1 is all of them.",
        SchedulerStats,
        lambda stats: 1 - stats.num_free_states / stats.num_states if stats.num_states else None,
    ),
)
TOKENS = (
    counter(
        "vllm:prefix_cache_queries",
        "Tokens looked up in the prefix cache.",
        SchedulerStats,
        "prefix_cache_queries",
    ),
    counter(
        "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", SchedulerStats, "prefix_cache_hits"
    ),
    counter(
        "continuum:tokens_without_state",
        "Tokens recomputed although their KV was cached, for lack of a state at their end.",
        SchedulerStats,
        "tokens_without_state",
    ),
    counter("vllm:prompt_tokens", "Prompt tokens processed.", IterationStats, "num_prompt_tokens"),
    counter(
        "vllm:prompt_tokens_cached", "Prompt tokens found cached.", FinishedRequestStats, "num_cached_tokens"
    ),
    counter("vllm:generation_tokens", "Tokens generated.", IterationStats, "num_generation_tokens"),
    counter(
        "continuum:recomputed_tokens",
        "Tokens recomputed although an earlier turn of the job had computed them.",
        TurnReceipt,
        "recomputed_tokens",
    ),
    counter(
        "continuum:prompt_divergences",
        "Turns whose prompt diverges from what their job had computed.",
        TurnReceipt,
        lambda receipt: receipt.diverged_at_token is not None,
    ),
    counter(
        "continuum:prompt_diverged_tokens",
        "Tokens of a job after the point where its next prompt diverged.",
        TurnReceipt,
        lambda receipt: 0 if receipt.diverged_at_token is None else receipt.diverged_tokens,
    ),
)
REQUESTS = (
    counter("vllm:num_preemptions", "Preemptions of running requests.", SchedulerStats, "num_preemptions"),
    counter(
        "vllm:request_success",
        "Requests that ended, by reason.",
        FinishedRequestStats,
        lambda stats: {stats.finish_reason: 1},
        label="finished_reason",
        label_values=tuple(map(str, FinishReason)),
        starts_at_zero=True,  # so that an alert sees the first error
    ),
    REJECTIONS,
    VOLATILE_TEXTS,
)
JOBS_AND_PINS = (
    counter(
        "continuum:jobs_ended",
        "Jobs that ended, by how: their client said so, or they were idle for too long.",
        JobEnd,
        lambda job: {job.outcome: 1},
        label="outcome",
        label_values=("finished", "forgotten"),
    ),
    counter(
        "continuum:pins_ended",
        "Pins that ended, by cause.",
        SchedulerStats,
        "pins_ended",
        label="cause",
        label_values=PIN_ENDS,
    ),
    counter(
        "continuum:pin_block_seconds",
        "KV block-seconds retained by pins, by how the pin ended.",
        SchedulerStats,
        "pin_block_s",
        label="cause",
        label_values=PIN_ENDS,
    ),
    counter(
        "continuum:superseded_tokens",
        "Tokens released because their job's next prompt continues without them.",
        TurnReceipt,
        "superseded_tokens",
    ),
    counter(
        "continuum:superseded_blocks",
        "Released KV blocks of the device without another holder: evicted first.",
        SchedulerStats,
        "superseded_blocks",
    ),
)
TIERS = (
    counter(
        "continuum:host_kv_loaded_tokens",
        "Tokens whose KV was loaded from the host tier.",
        SchedulerStats,
        "host_loaded_tokens",
    ),
    counter(
        "continuum:host_kv_failed_loads",
        "Loads from the host tier that failed.",
        SchedulerStats,
        "host_failed_loads",
    ),
    counter(
        "continuum:remote_kv_loaded_tokens",
        "Tokens whose KV another server has computed.",
        SchedulerStats,
        "remote_loaded_tokens",
    ),
    counter(
        "continuum:remote_kv_failed_loads",
        "Loads from another server that failed.",
        SchedulerStats,
        "remote_failed_loads",
    ),
    counter(
        "continuum:disk_kv_loaded_tokens",
        "Tokens whose KV was loaded from the disk tier.",
        SchedulerStats,
        "disk_loaded_tokens",
    ),
    counter(
        "continuum:disk_kv_failed_loads",
        "Loads from the disk tier that failed.",
        SchedulerStats,
        "disk_failed_loads",
    ),
    counter(
        "continuum:disk_kv_written_blocks",
        "KV blocks evicted from the host tier and written to the disk tier.",
        SchedulerStats,
        "disk_written_blocks",
    ),
    counter(
        "continuum:disk_kv_failed_writes",
        "KV blocks that could not be written to the disk tier.",
        SchedulerStats,
        "disk_failed_writes",
    ),
    counter(
        "continuum:disk_kv_dropped_writes",
        "KV blocks not written to the disk tier: too many writes were in flight.",
        SchedulerStats,
        "disk_dropped_writes",
    ),
)
LOSSES = (
    counter(
        "continuum:trace_events_dropped",
        "Trace events lost because they came faster than they could be written.",
        SchedulerStats,
        "trace_dropped",
    ),
    counter(
        "continuum:telemetry_dropped",
        "Spans that did not reach the OpenTelemetry collector.",
        SchedulerStats,
        "telemetry_dropped",
    ),
    counter(
        "continuum:kv_events_dropped",
        "Batches of KV and pin events lost because they came faster than they could be sent.",
        SchedulerStats,
        "kv_events_dropped",
    ),
)
LATENCIES = (
    histogram(
        "vllm:time_to_first_token_seconds",
        "Time to first token.",
        IterationStats,
        "time_to_first_tokens_s",
        TTFT_BUCKETS_S,
    ),
    histogram(
        "vllm:inter_token_latency_seconds",
        "Time between tokens.",
        IterationStats,
        "inter_token_latencies_s",
        ITL_BUCKETS_S,
    ),
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time per token of a request.",
        FinishedRequestStats,
        lambda stats: (
            _unless_aborted(stats, stats.mean_time_per_output_token_s)
            if stats.num_generation_tokens > 1
            else None
        ),
        ITL_BUCKETS_S,
    ),
    histogram(
        "vllm:e2e_request_latency_seconds",
        "From arrival to the last token.",
        FinishedRequestStats,
        lambda stats: _unless_aborted(stats, stats.e2e_s),
        LATENCY_BUCKETS_S,
    ),
    histogram(
        "vllm:request_queue_time_seconds",
        "Time in the waiting queue.",
        FinishedRequestStats,
        lambda stats: _unless_aborted(stats, stats.queued_s),
        LATENCY_BUCKETS_S,
    ),
    histogram(
        "vllm:request_prefill_time_seconds",
        "From scheduling to the first token.",
        FinishedRequestStats,
        lambda stats: _unless_aborted(stats, stats.prefill_s),
        LATENCY_BUCKETS_S,
    ),
    histogram(
        "vllm:request_decode_time_seconds",
        "From the first to the last token.",
        FinishedRequestStats,
        lambda stats: _unless_aborted(stats, stats.decode_s),
        LATENCY_BUCKETS_S,
    ),
    histogram(
        "vllm:request_inference_time_seconds",
        "From scheduling to the last token.",
        FinishedRequestStats,
        lambda stats: _unless_aborted(stats, stats.inference_s),
        LATENCY_BUCKETS_S,
    ),
    histogram(
        "continuum:gap_seconds",
        "From the end of a job's turn to its next turn.",
        TurnReceipt,
        "gap_s",
        GAP_BUCKETS_S,
    ),
    histogram(
        "continuum:gap_prediction_error_seconds",
        "Absolute error of the predicted median of a tool gap.",
        JobStats,
        "gap_errors_s",
        GAP_BUCKETS_S,
    ),
    histogram(
        "continuum:pin_held_seconds",
        "Lifetime of a pin, by how it ended.",
        SchedulerStats,
        "pin_held_s",
        GAP_BUCKETS_S,
        label="cause",
        label_values=PIN_ENDS,
    ),
    histogram(
        "continuum:job_duration_seconds",
        "From the arrival of a job's first turn to the end of its last.",
        JobEnd,
        "duration_s",
        JOB_BUCKETS_S,
    ),
    histogram(
        "continuum:job_queue_seconds",
        "Total queue time of a job's turns.",
        JobEnd,
        "queued_s",
        LATENCY_BUCKETS_S,
    ),
)
SIZES = (
    histogram("continuum:job_turns", "Turns of a job.", JobEnd, "num_turns", TURN_BUCKETS),
    histogram(
        "vllm:iteration_tokens_total",
        "Tokens per engine step.",
        SchedulerStats,
        lambda stats: stats.step_tokens or None,
        ITERATION_BUCKETS,
    ),
    histogram(
        "vllm:request_prompt_tokens",
        "Prompt tokens per request.",
        FinishedRequestStats,
        lambda stats: _unless_aborted(stats, stats.num_prompt_tokens),
    ),
    histogram(
        "vllm:request_generation_tokens",
        "Generated tokens per request.",
        FinishedRequestStats,
        lambda stats: _unless_aborted(stats, stats.num_generation_tokens),
    ),
    histogram(
        "vllm:request_params_max_tokens",
        "max_tokens of requests.",
        FinishedRequestStats,
        lambda stats: _unless_aborted(stats, stats.max_tokens),
    ),
    histogram("vllm:request_params_n", "n of requests.", IterationStats, "n_params_iter", N_BUCKETS),
)
CONTINUED = (
    CONTINUED_PROMPTS,
    counter(
        "continuum:continued_requests",
        "Requests sent to the core without the tokens of the turn they continue, by whether the core still "
        "had them, or had to ask for them.",
        ContinuedStats,
        lambda stats: {"known": stats.num_known, "forgotten": stats.num_forgotten},
        label="turn",
        label_values=("known", "forgotten"),
    ),
)
DRAFTS = (
    counter(
        "vllm:spec_decode_num_drafts",
        "Drafts verified: one per request and step that had any.",
        SpecDecodingStats,
        "num_drafts",
    ),
    counter(
        "vllm:spec_decode_num_draft_tokens", "Draft tokens verified.", SpecDecodingStats, "num_draft_tokens"
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Accepted draft tokens: tokens of a step beyond its first.",
        SpecDecodingStats,
        "num_accepted_tokens",
    ),
    counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted tokens by their place in the draft.",
        SpecDecodingStats,
        lambda stats: {str(place): count for place, count in enumerate(stats.num_accepted_tokens_per_pos)},
        label="position",
    ),
)
"""Only of a server that drafts."""
BLOCK_LIVES = (
    histogram(
        "vllm:kv_block_lifetime_seconds",
        "Time from a sampled block's allocation to its eviction.",
        BlockLives,
        "lifetimes_s",
        BLOCK_LIFE_BUCKETS_S,
    ),
    histogram(
        "vllm:kv_block_idle_before_evict_seconds",
        "Time from a sampled block's last use to its eviction.",
        BlockLives,
        "idle_s",
        BLOCK_LIFE_BUCKETS_S,
    ),
    histogram(
        "vllm:kv_block_reuse_gap_seconds",
        "Time between two uses of a sampled block, the last four.",
        BlockLives,
        "reuse_gaps_s",
        BLOCK_LIFE_BUCKETS_S,
    ),
)

TABLE: tuple[Metric, ...] = (
    *GAUGES,
    *TOKENS,
    *REQUESTS,
    *JOBS_AND_PINS,
    *TIERS,
    *LOSSES,
    *LATENCIES,
    *SIZES,
    *CONTINUED,
    MEDIA,
    KNOWN_MEDIA,
    *KEY_USAGE.values(),
    *DRAFTS,
    *BLOCK_LIVES,
)
