"""Prometheus series that are there only where a feature is on: lives of KV blocks, adapters, drafts."""

from __future__ import annotations

import os
import time

from prometheus_client import CollectorRegistry, Gauge, Histogram

from engine.frontend.spec_decoding_metrics import SpecDecodingMetrics
from engine.lora import name_of
from engine.reported_stats import BlockLives, LoRAStats, SchedulerStats

_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)


class BlockLifeMetrics:
    """How long sampled KV blocks lived, of those that ended since the server started; under V1's names."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, ...], values: tuple[str, ...]) -> None:
        def seconds(name: str, text: str) -> Histogram:
            return Histogram(name, text, labels, buckets=_BUCKETS, registry=registry).labels(*values)

        self._lifetime = seconds(
            "vllm:kv_block_lifetime_seconds", "Time from a sampled block's allocation to its eviction."
        )
        self._idle = seconds(
            "vllm:kv_block_idle_before_evict_seconds", "Time from a sampled block's last use to its eviction."
        )
        self._gap = seconds(
            "vllm:kv_block_reuse_gap_seconds", "Time between two uses of a sampled block, the last four."
        )

    def record(self, lives: BlockLives) -> None:
        """Add what the core observed since its last report."""
        for histogram, observed in (
            (self._lifetime, lives.lifetimes_s),
            (self._idle, lives.idle_s),
            (self._gap, lives.reuse_gaps_s),
        ):
            for value in observed:
                histogram.observe(value)


class LoRAMetrics:
    """V1's gauge of adapters, which gateways read. Their names are in labels, and the value is the time, in
    seconds since 1970: the latest series counts."""

    def __init__(self, registry: CollectorRegistry, engine: str) -> None:
        self._engine = engine
        self._keeps_all = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        """Whether series stay that have been: processes share files to which they only add."""
        self._last: tuple[str, ...] | None = None
        self._info = Gauge(
            "vllm:lora_requests_info",
            "Adapters of requests that run and of those that wait; the value is when that was so.",
            ("engine", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            registry=registry,
            multiprocess_mode="mostrecent",
        )

    def record(self, stats: LoRAStats) -> None:
        """Tell which adapters there are now."""
        running, waiting = (
            ",".join(name_of(key) or "" for key in keys) for keys in (stats.running, stats.waiting)
        )
        values = (self._engine, str(stats.max_loras), running, waiting)
        if self._last is not None and self._last != values and not self._keeps_all:
            self._info.remove(*self._last)
        self._last = values
        self._info.labels(*values).set(time.time())


class OptionalMetrics:
    """Of sampled blocks and of adapters from the first report on; of drafts from the start."""

    def __init__(
        self,
        registry: CollectorRegistry,
        labels: tuple[str, ...],
        values: tuple[str, ...],
        num_speculative_tokens: int,
    ) -> None:
        """``values``: of ``labels``, the engine's last. ``num_speculative_tokens``: most drafts of a request
        in a step; 0: none."""
        self._registry, self._labels, self._values = registry, labels, values
        self._block_lives: BlockLifeMetrics | None = None
        self._lora: LoRAMetrics | None = None
        self._spec_decoding: SpecDecodingMetrics | None = None
        if num_speculative_tokens:
            self._spec_decoding = SpecDecodingMetrics(registry, labels, values, num_speculative_tokens)

    def record(self, stats: SchedulerStats) -> None:
        """Add what the core reported."""
        if stats.spec_decoding is not None and self._spec_decoding is not None:
            self._spec_decoding.record(stats.spec_decoding)
        if stats.block_lives is not None:
            if self._block_lives is None:
                self._block_lives = BlockLifeMetrics(self._registry, self._labels, self._values)
            self._block_lives.record(stats.block_lives)
        if stats.lora is not None:
            if self._lora is None:
                self._lora = LoRAMetrics(self._registry, self._values[-1])
            self._lora.record(stats.lora)
