"""Prometheus metrics of one engine core: V1's names where V1 has them, ours under ``continuum:``. Those of
several cores are told together (``server_metrics``).

API server processes that share a folder write their counters into files there, and each of them
can report the sum. The core's statistics are recorded by whichever process receives them; a gauge
is the core's latest value, by the core's clock.
"""

from __future__ import annotations

from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector

from engine.frontend.continued_prompt_metrics import ContinuedPromptMetrics
from engine.frontend.optional_metrics import OptionalMetrics
from engine.frontend.picture_metrics import PictureMetrics
from engine.frontend.stats import FinishedRequestStats, IterationStats
from engine.messages import FinishReason, TurnReceipt
from engine.reported_stats import JobStats, SchedulerStats

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
LATENCY_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
ITERATION_BUCKETS = tuple(float(2**power) for power in range(15))
GAP_BUCKETS_S = (
    *(0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0),
    *(20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)

JOB_BUCKETS_S = (
    *(1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0),
    *(1200.0, 1800.0, 3600.0, 7200.0, 21600.0, 86400.0),
)
TURN_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

_LABELS = ("model_name", "engine")
_ABORTED = str(FinishReason.ABORT)


def _token_buckets(limit: int) -> tuple[float, ...]:
    """1-2-5 steps up to ``limit``."""
    steps = [float(digit * 10**power) for power in range(len(str(limit))) for digit in (1, 2, 5)]
    return tuple(step for step in steps if step <= limit)


METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
"""The environment variable that names the folder of multi-process metrics."""


def shared_metrics_environment(folder: Path) -> dict[str, str]:
    """The environment that a process must start with for its metrics to be stored in this folder."""
    return {METRICS_FOLDER: str(_files_in(folder))}


def _files_in(folder: Path) -> Path:
    files = folder / "metrics"
    files.mkdir(exist_ok=True)
    return files


class _CoreGauge:
    """A gauge of the core. Processes receive its values in turn and one may lag, so the core's
    time decides which is the latest."""

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge

    def set(self, value: float, timestamp: float) -> None:
        # Gauge.set would use this process's time.
        self._gauge._value.set(float(value), timestamp=timestamp)


class Metrics:
    """All metrics of one core in their own registry. ``record`` is called once per engine step."""

    def __init__(
        self,
        model_name: str,
        max_model_len: int,
        shared_folder: Path | None = None,
        num_speculative_tokens: int = 0,
        engine_index: int = 0,
    ) -> None:
        """``shared_folder``: the folder of the processes of this server; None for a single
        process. ``num_speculative_tokens``: most drafts of a request in a step; 0: none."""
        self.registry = CollectorRegistry()
        self._scraped = self.registry
        if shared_folder is not None:
            self._scraped = CollectorRegistry()
            MultiProcessCollector(self._scraped, str(_files_in(shared_folder)))  # type: ignore[no-untyped-call]
        self._values = (model_name, str(engine_index))
        self._make_gauges()
        self._make_token_counters()
        self._make_request_counters()
        self._make_job_counters()
        self._make_host_counters()
        self._make_disk_counters()
        self._make_loss_counters()
        self._make_latencies()
        self._make_sizes(_token_buckets(max_model_len))
        self.continued = ContinuedPromptMetrics(self.registry, _LABELS, self._values)
        self.pictures = PictureMetrics(self.registry, _LABELS, self._values)
        self._optional = OptionalMetrics(self.registry, _LABELS, self._values, num_speculative_tokens)

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """A listener for AsyncLLM's statistics."""
        if scheduler is not None:
            self._record_scheduler(scheduler)
            self._optional.record(scheduler)
            self._set_gauges(scheduler, iteration.timestamp)
        self._prompt_tokens.inc(iteration.num_prompt_tokens)
        self._generation_tokens.inc(iteration.num_generation_tokens)
        for seconds in iteration.time_to_first_tokens_s:
            self._ttft.observe(seconds)
        for seconds in iteration.inter_token_latencies_s:
            self._itl.observe(seconds)
        for finished in iteration.finished_requests:
            self._record_finished(finished)
        for n in iteration.n_params_iter:
            self._request_n.observe(n)

    def record_receipt(self, receipt: TurnReceipt) -> None:
        """Records the end of a job's turn: recomputed tokens, and the time of its tool call."""
        self._recomputed_tokens.inc(receipt.recomputed_tokens)
        if receipt.gap_s is not None:
            self._gap.observe(receipt.gap_s)
        if receipt.diverged_at_token is not None:
            self._divergences.inc()
            self._diverged_tokens.inc(receipt.diverged_tokens)
        self._superseded_tokens.inc(receipt.superseded_tokens)

    def record_rejection(self, limit: str) -> None:
        """Records a request refused by the limit of this name."""
        self._rejections.labels(self._values[0], limit).inc()

    def record_viewers(self, number: int, timestamp: float) -> None:
        """Sets the number of viewers of the dashboard, over all API server processes."""
        self._viewers.set(number, timestamp)

    def record_volatile_text(self, kind: str) -> None:
        """Records that text was removed from a prompt, since it changes with every request."""
        self._volatile_texts_removed.labels(*self._values, kind).inc()

    def record_pool(self, block_size: int, num_gpu_blocks: int) -> None:
        """Records the size of the KV pool in V1's form: numbers in labels."""
        info = Gauge(
            "vllm:cache_config_info",
            "KV pool: tokens per block, and number of blocks.",
            ("engine", "block_size", "num_gpu_blocks"),
            registry=self.registry,
            multiprocess_mode="mostrecent",
        )
        info.labels(self._values[1], str(block_size), str(num_gpu_blocks)).set(1)

    def exposition(self) -> bytes:
        """The page for Prometheus."""
        return generate_latest(self._scraped)

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        self._loaded_tokens.inc(stats.host_loaded_tokens)
        self._failed_loads.inc(stats.host_failed_loads)
        self._remote_loaded_tokens.inc(stats.remote_loaded_tokens)
        self._remote_failed_loads.inc(stats.remote_failed_loads)
        self._record_disk(stats)
        self._superseded_blocks.inc(stats.superseded_blocks)
        self._trace_dropped.inc(stats.trace_dropped)
        self._telemetry_dropped.inc(stats.telemetry_dropped)
        self._kv_events_dropped.inc(stats.kv_events_dropped)
        self._cache_queries.inc(stats.prefix_cache_queries)
        self._cache_hits.inc(stats.prefix_cache_hits)
        self._without_state_tokens.inc(stats.tokens_without_state)
        self._preemptions.inc(stats.num_preemptions)
        if stats.step_tokens:
            self._iteration_tokens.observe(stats.step_tokens)
        for cause, count in stats.pins_ended.items():
            self._pins_ended.labels(*self._values, cause).inc(count)
        for cause, block_s in stats.pin_block_s.items():
            self._pin_block_s.labels(*self._values, cause).inc(block_s)
        for cause, pins_held_s in stats.pin_held_s.items():
            for held_s in pins_held_s:
                self._pin_held.labels(*self._values, cause).observe(held_s)
        if stats.jobs is not None:
            self._record_jobs(stats.jobs)
        if stats.continued is not None:
            self.continued.record(stats.continued)

    def _record_disk(self, stats: SchedulerStats) -> None:
        self._disk_loaded_tokens.inc(stats.disk_loaded_tokens)
        self._disk_failed_loads.inc(stats.disk_failed_loads)
        self._disk_written_blocks.inc(stats.disk_written_blocks)
        self._disk_failed_writes.inc(stats.disk_failed_writes)
        self._disk_dropped_writes.inc(stats.disk_dropped_writes)

    def _record_jobs(self, stats: JobStats) -> None:
        for error_s in stats.gap_errors_s:
            self._gap_error.observe(error_s)
        for job in stats.ended:
            self._jobs_ended.labels(*self._values, job.outcome).inc()
            self._job_duration.observe(job.duration_s)
            self._job_queue.observe(job.queued_s)
            self._job_turns.observe(job.num_turns)

    def _set_gauges(self, stats: SchedulerStats, timestamp: float) -> None:
        self._running.set(stats.num_running_reqs, timestamp)
        self._waiting.set(stats.num_waiting_reqs, timestamp)
        if stats.num_total_blocks:
            self._kv_usage.set(stats.kv_usage, timestamp)
            self._pinned_share.set(stats.num_pinned_alone_blocks / stats.num_total_blocks, timestamp)
        self._pins.set(stats.num_pins, timestamp)
        self._pinned_blocks.set(stats.num_pinned_blocks, timestamp)
        if stats.jobs is not None:
            self._jobs.set(stats.jobs.num_jobs, timestamp)
        if stats.num_host_blocks:
            self._host_usage.set(stats.num_used_host_blocks / stats.num_host_blocks, timestamp)
        if stats.num_disk_blocks:
            self._disk_usage.set(stats.num_used_disk_blocks / stats.num_disk_blocks, timestamp)
        if stats.num_states:
            self._state_usage.set(1 - stats.num_free_states / stats.num_states, timestamp)

    def _record_finished(self, stats: FinishedRequestStats) -> None:
        self._success.labels(*self._values, stats.finish_reason).inc()
        self._cached_prompt_tokens.inc(stats.num_cached_tokens)
        if stats.finish_reason == _ABORTED:
            return  # its times and lengths reflect its client
        self._e2e.observe(stats.e2e_s)
        self._queue.observe(stats.queued_s)
        self._prefill.observe(stats.prefill_s)
        self._decode.observe(stats.decode_s)
        self._inference.observe(stats.inference_s)
        if stats.num_generation_tokens > 1:
            self._time_per_output_token.observe(stats.mean_time_per_output_token_s)
        self._request_prompt_tokens.observe(stats.num_prompt_tokens)
        self._request_generation_tokens.observe(stats.num_generation_tokens)
        if stats.max_tokens is not None:
            self._request_max_tokens.observe(stats.max_tokens)

    def _make_gauges(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Requests in the running batch.")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Requests waiting to be scheduled.")
        self._kv_usage = self._gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks that running work holds."
        )
        self._pins = self._gauge("continuum:pins", "Pins: branch tips retained across a tool call.")
        self._pinned_blocks = self._gauge("continuum:pinned_blocks", "KV blocks retained by pins.")
        self._pinned_share = self._gauge(
            "continuum:pinned_share", "Share of the KV blocks that only pins hold: they can be taken."
        )
        self._jobs = self._gauge("continuum:jobs", "Known jobs: neither finished nor forgotten.")
        self._viewers = self._gauge("continuum:dashboard_viewers", "Viewers of /dashboard.")
        self._host_usage = self._gauge(
            "continuum:host_kv_usage_perc", "Slots of the host tier in use; 1 is all of them."
        )
        self._disk_usage = self._gauge(
            "continuum:disk_kv_usage_perc", "Slots of the disk tier that hold KV; 1 is all of them."
        )

        self._state_usage = self._gauge("continuum:state_usage_perc", "State slots in use; 1 is all of them.")

    def _make_disk_counters(self) -> None:
        self._remote_loaded_tokens = self._counter(
            "continuum:remote_kv_loaded_tokens", "Tokens whose KV another server has computed."
        )
        self._remote_failed_loads = self._counter(
            "continuum:remote_kv_failed_loads", "Loads from another server that failed."
        )
        self._disk_loaded_tokens = self._counter(
            "continuum:disk_kv_loaded_tokens", "Tokens whose KV came back from the disk tier."
        )
        self._disk_failed_loads = self._counter(
            "continuum:disk_kv_failed_loads", "Loads from the disk tier that failed."
        )
        self._disk_written_blocks = self._counter(
            "continuum:disk_kv_written_blocks",
            "KV blocks evicted from the host tier and written to the disk tier.",
        )
        self._disk_failed_writes = self._counter(
            "continuum:disk_kv_failed_writes", "KV blocks that could not be written to the disk tier."
        )
        self._disk_dropped_writes = self._counter(
            "continuum:disk_kv_dropped_writes",
            "KV blocks not written to the disk tier: too many writes were in flight.",
        )

    def _make_token_counters(self) -> None:
        self._cache_queries = self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."
        )
        self._cache_hits = self._counter("vllm:prefix_cache_hits", "Tokens found in the prefix cache.")
        self._without_state_tokens = self._counter(
            "continuum:tokens_without_state",
            "Tokens recomputed although their KV was cached: there was no state behind them.",
        )
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed.")
        self._cached_prompt_tokens = self._counter("vllm:prompt_tokens_cached", "Prompt tokens found cached.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self._recomputed_tokens = self._counter(
            "continuum:recomputed_tokens",
            "Tokens recomputed although an earlier turn of the job had computed them.",
        )
        self._divergences = self._counter(
            "continuum:prompt_divergences", "Turns whose prompt diverges from what their job had computed."
        )
        self._diverged_tokens = self._counter(
            "continuum:prompt_diverged_tokens",
            "Tokens of a job after the point where its next prompt diverged.",
        )

    def _make_request_counters(self) -> None:
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions of running requests.")
        self._success = self._counters(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason"
        )
        for reason in FinishReason:  # starts at 0, so that an alert sees the first error
            self._success.labels(*self._values, str(reason))
        self._rejections = Counter(
            "vllm:admission_rejections",
            "Requests refused with 503, by the limit that was reached.",
            ("model_name", "reason"),
            registry=self.registry,
        )
        self._volatile_texts_removed = self._counters(
            "continuum:prefix_killers_removed",
            "Volatile texts removed from prompts since they change with every request, by kind.",
            "kind",
        )

    def _make_job_counters(self) -> None:
        self._jobs_ended = self._counters(
            "continuum:jobs_ended",
            "Jobs that ended, by how: their client said so, or they were idle for too long.",
            "outcome",
        )
        self._pins_ended = self._counters("continuum:pins_ended", "Pins that ended, by cause.", "cause")
        self._pin_block_s = self._counters(
            "continuum:pin_block_seconds",
            "KV block-seconds retained by pins, by how the pin ended.",
            "cause",
        )
        self._superseded_tokens = self._counter(
            "continuum:superseded_tokens",
            "Tokens released since their job's next prompt continues without them.",
        )
        self._superseded_blocks = self._counter(
            "continuum:superseded_blocks",
            "Released KV blocks of the device without another holder: evicted first.",
        )

    def _make_host_counters(self) -> None:
        self._loaded_tokens = self._counter(
            "continuum:host_kv_loaded_tokens", "Tokens whose KV came back from the host tier."
        )
        self._failed_loads = self._counter(
            "continuum:host_kv_failed_loads", "Loads from the host tier that failed."
        )

    def _make_loss_counters(self) -> None:
        self._trace_dropped = self._counter(
            "continuum:trace_events_dropped",
            "Trace events lost since they came faster than they could be written.",
        )
        self._telemetry_dropped = self._counter(
            "continuum:telemetry_dropped", "Spans that did not reach the OpenTelemetry collector."
        )
        self._kv_events_dropped = self._counter(
            "continuum:kv_events_dropped",
            "Batches of KV and pin events lost since they came faster than they could be sent.",
        )

    def _make_latencies(self) -> None:
        def latency(name: str, text: str) -> Histogram:
            return self._histogram(name, text, LATENCY_BUCKETS_S)

        self._ttft = self._histogram(
            "vllm:time_to_first_token_seconds", "Time to first token.", TTFT_BUCKETS_S
        )
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Time between tokens.", ITL_BUCKETS_S)
        self._time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time per token of a request.", ITL_BUCKETS_S
        )
        self._e2e = latency("vllm:e2e_request_latency_seconds", "From arrival to the last token.")
        self._queue = latency("vllm:request_queue_time_seconds", "Time in the waiting queue.")
        self._prefill = latency("vllm:request_prefill_time_seconds", "From scheduling to the first token.")
        self._decode = latency("vllm:request_decode_time_seconds", "From the first to the last token.")
        self._inference = latency("vllm:request_inference_time_seconds", "From scheduling to the last token.")
        self._gap = self._histogram(
            "continuum:gap_seconds", "From the end of a job's turn to its next turn.", GAP_BUCKETS_S
        )
        self._gap_error = self._histogram(
            "continuum:gap_prediction_error_seconds",
            "Absolute error of the predicted median of a tool gap.",
            GAP_BUCKETS_S,
        )
        self._pin_held = Histogram(
            "continuum:pin_held_seconds",
            "Lifetime of a pin, by how it ended.",
            (*_LABELS, "cause"),
            buckets=GAP_BUCKETS_S,
            registry=self.registry,
        )
        self._make_job_times()

    def _make_job_times(self) -> None:
        self._job_duration = self._histogram(
            "continuum:job_duration_seconds",
            "From the arrival of a job's first turn to the end of its last.",
            JOB_BUCKETS_S,
        )
        self._job_queue = self._histogram(
            "continuum:job_queue_seconds", "Total queue time of a job's turns.", LATENCY_BUCKETS_S
        )

    def _make_sizes(self, token_buckets: tuple[float, ...]) -> None:
        self._job_turns = self._histogram("continuum:job_turns", "Turns of a job.", TURN_BUCKETS)
        self._iteration_tokens = self._histogram(
            "vllm:iteration_tokens_total", "Tokens per engine step.", ITERATION_BUCKETS
        )
        self._request_prompt_tokens = self._histogram(
            "vllm:request_prompt_tokens", "Prompt tokens per request.", token_buckets
        )
        self._request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens per request.", token_buckets
        )
        self._request_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of requests.", token_buckets
        )
        self._request_n = self._histogram("vllm:request_params_n", "n of requests.", (1, 2, 5, 10, 20))

    def _gauge(self, name: str, text: str) -> _CoreGauge:
        gauge = Gauge(name, text, _LABELS, registry=self.registry, multiprocess_mode="mostrecent")
        return _CoreGauge(gauge.labels(*self._values))

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, _LABELS, registry=self.registry).labels(*self._values)

    def _counters(self, name: str, text: str, by: str) -> Counter:
        """One counter for each value of the label ``by``."""
        return Counter(name, text, (*_LABELS, by), registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, _LABELS, buckets=buckets, registry=self.registry).labels(*self._values)
