"""Prometheus counters of the pictures that prompts bring, under V1's names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class PictureMetrics:
    """Pictures since the server started, and how many had been decoded before."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, ...], values: tuple[str, ...]) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=registry).labels(*values)

        self._queries = counter("vllm:mm_cache_queries", "Pictures in prompts.")
        self._hits = counter("vllm:mm_cache_hits", "Pictures in prompts that had been decoded before.")

    def record(self, *, is_known: bool) -> None:
        """Count a picture of a prompt. Thread safe."""
        self._queries.inc()
        if is_known:
            self._hits.inc()
