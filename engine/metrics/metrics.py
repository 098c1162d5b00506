"""The metrics of one engine core: those of the table, and what records into them.

The core's statistics are recorded by the process that receives them; a gauge is the core's latest value, by
the core's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from engine.frontend.stats import IterationStats
from engine.metrics.buckets import token_buckets
from engine.metrics.lora_metrics import LoRAMetrics
from engine.metrics.metric import Kind, Metric, Value
from engine.metrics.page import Page
from engine.metrics.table import (
    BLOCK_LIVES,
    CONTINUED_PROMPTS,
    DRAFTS,
    KEY_USAGE,
    KNOWN_MEDIA,
    MEDIA,
    REJECTIONS,
    TABLE,
    VIEWERS,
    VOLATILE_TEXTS,
)
from engine.records.messages import TurnReceipt
from engine.records.reported_stats import JobStats, SchedulerStats

LABELS = ("model_name", "engine")


class Metrics:
    """All metrics of one core. ``record`` is called once per engine step."""

    def __init__(
        self,
        page: Page,
        model_name: str,
        max_model_len: int,
        num_speculative_tokens: int = 0,
        engine_index: int = 0,
    ) -> None:
        """``page``: the page of this process, to which the metrics are added.
        ``num_speculative_tokens``: most drafts of a request in a step; 0: none."""
        self._page = page
        self._values = (model_name, str(engine_index))
        self._token_buckets = token_buckets(max_model_len)
        self._recorders: dict[type, list[Callable[[Any, float], None]]] = {}
        """For each type of record, what adds it to the metrics that read it."""
        self._named: dict[str, _Recorder] = {}
        for metric in TABLE:
            if metric not in (*DRAFTS, *BLOCK_LIVES):
                self._add(metric)
        if num_speculative_tokens:
            for metric in DRAFTS:
                self._add(metric)
            by_place = self._named[DRAFTS[-1].name]
            for place in range(num_speculative_tokens):
                by_place.begin(str(place))
        self._lora: LoRAMetrics | None = None

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """A listener for AsyncLLM's statistics."""
        now = iteration.timestamp
        if scheduler is not None:
            self._record(scheduler, now)
            self._record_features(scheduler, now)
        self._record(iteration, now)
        for finished in iteration.finished_requests:
            self._record(finished, now)

    def record_receipt(self, receipt: TurnReceipt) -> None:
        """Records the end of a job's turn: recomputed tokens, and the time of its tool call."""
        self._record(receipt, 0.0)

    def record_rejection(self, limit: str) -> None:
        """Records a request refused by the limit of this name."""
        self._named[REJECTIONS.name].add({limit: 1}, 0.0)

    def record_viewers(self, number: int, timestamp: float) -> None:
        """Sets the number of viewers of the dashboard, over all API server processes."""
        self._named[VIEWERS.name].add(number, timestamp)

    def record_volatile_text(self, kind: str) -> None:
        """Records that text was removed from a prompt, since it changes with every request."""
        self._named[VOLATILE_TEXTS.name].add({kind: 1}, 0.0)

    def record_continued_prompt(self, *, appended: bool) -> None:
        """Records a prompt that continues a turn whose tokens are known."""
        self._named[CONTINUED_PROMPTS.name].add({"appended" if appended else "rendered": 1}, 0.0)

    def record_key_usage(self, key: str, word: str, number: int) -> None:
        """Records what a key has used: ``word`` is that of a quota."""
        self._named[KEY_USAGE[word].name].add({key: number}, 0.0)

    def record_media(self, *, is_known: bool) -> None:
        """Records a picture or clip of a prompt, and whether it had been decoded before. Thread safe."""
        self._named[MEDIA.name].add(1, 0.0)
        self._named[KNOWN_MEDIA.name].add(is_known, 0.0)

    def record_pool(self, block_size: int, num_gpu_blocks: int) -> None:
        """Records the size of the KV pool in V1's form: numbers in labels."""
        info = Gauge(
            "vllm:cache_config_info",
            "KV pool: tokens per block, and number of blocks.",
            ("engine", "block_size", "num_gpu_blocks"),
            registry=None,
            multiprocess_mode="mostrecent",
        )
        self._page.add("vllm:cache_config_info", info)
        info.labels(self._values[1], str(block_size), str(num_gpu_blocks)).set(1)

    def _record(self, record: object, now: float) -> None:
        for add in self._recorders.get(type(record), ()):
            add(record, now)

    def _record_features(self, stats: SchedulerStats, now: float) -> None:
        """The statistics of features that are on."""
        for part in (stats.jobs, stats.continued, stats.spec_decoding):
            if part is not None:
                self._record(part, now)
        for job in (stats.jobs or JobStats()).ended:
            self._record(job, now)
        if stats.lora is not None:
            if self._lora is None:
                self._lora = LoRAMetrics(self._page, self._values[-1])
            self._lora.record(stats.lora)
        if stats.block_lives is not None:
            if BLOCK_LIVES[0].name not in self._named:
                for metric in BLOCK_LIVES:
                    self._add(metric)
            self._record(stats.block_lives, now)

    def _add(self, metric: Metric) -> None:
        """Registers a metric; from now on it is exported and recorded."""
        values = self._values[:1] if metric.of_server else self._values
        recorder = _Recorder(metric, self._page, values, metric.buckets or self._token_buckets)
        self._named[metric.name] = recorder
        if metric.source is not None:
            self._recorders.setdefault(metric.source, []).append(recorder.record)


class _Recorder:
    """A metric, for one core."""

    def __init__(
        self, metric: Metric, page: Page, values: tuple[str, ...], buckets: tuple[float, ...]
    ) -> None:
        labels = LABELS[: len(values)]
        if metric.label is not None:
            labels = (*labels, metric.label)
        common: dict[str, Any] = {"labelnames": labels, "registry": None}
        series: Counter | Gauge | Histogram
        self._put: Callable[[Any, Any, float], bool]
        match metric.kind:
            case Kind.COUNTER:
                series = Counter(metric.name, metric.text, **common)
                self._put = _increase
            case Kind.GAUGE:
                series = Gauge(metric.name, metric.text, multiprocess_mode="mostrecent", **common)
                self._put = _set
            case Kind.HISTOGRAM:
                series = Histogram(metric.name, metric.text, buckets=buckets, **common)
                self._put = _observe
        self._series = series
        self._family = page.add(metric.name, series)
        self._values = values
        self._read = attrgetter(metric.read) if isinstance(metric.read, str) else metric.read
        self._only = None if metric.label is not None else series.labels(*values)
        for value in metric.label_values if metric.starts_at_zero else ():
            self.begin(value)

    def begin(self, label: str) -> None:
        """Exports this value of the label as 0."""
        self._series.labels(*self._values, label)
        self._family.changed = True

    def record(self, record: object, now: float) -> None:
        """Reads the record and adds its value."""
        assert self._read is not None
        self.add(self._read(record), now)

    def add(self, value: Value | Mapping[str, Value], now: float) -> None:
        """Adds a value, or those of several values of the label. ``now``: the core's time of a gauge."""
        if isinstance(value, Mapping):
            for label, one in value.items():
                self._put(self._series.labels(*self._values, label), one, now)
                self._family.changed = True
        elif value is not None and self._put(self._only, value, now):
            self._family.changed = True


def _increase(series: Any, value: Any, _now: float) -> bool:
    """Whether the value has changed, as for the others."""
    if value:
        series.inc(value)
    return bool(value)


def _set(series: Any, value: Any, now: float) -> bool:
    # Processes receive a core's values in turn and one may lag: the core's time decides which is the latest,
    # where Gauge.set would use this process's time.
    changed = bool(series._value.get() != value)
    series._value.set(float(value), timestamp=now)
    return changed


def _observe(series: Any, value: Any, _now: float) -> bool:
    values = value if isinstance(value, list | tuple) else (value,)
    for one in values:
        series.observe(one)
    return bool(values)
