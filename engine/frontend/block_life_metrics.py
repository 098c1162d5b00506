"""Prometheus histograms of how long KV blocks live, under V1's names; there are none unless asked for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from engine.reported_stats import BlockLives

_BUCKETS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0),
    *(60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0),
)


class BlockLifeMetrics:
    """The lives of sampled blocks that ended, since the server started."""

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
