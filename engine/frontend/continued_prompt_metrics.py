"""Prometheus counters of prompts that continue an earlier turn without all of its tokens."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

from engine.reported_stats import ContinuedStats


class ContinuedPromptMetrics:
    """How prompts were made, and what the core made of them, since the server started."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, ...], values: tuple[str, ...]) -> None:
        self._values = values
        self._prompts = Counter(
            "continuum:continued_prompts",
            "Prompts that continue a turn whose tokens the API server has, by how they were made: appended "
            "to it, or rendered as a whole.",
            (*labels, "made"),
            registry=registry,
        )
        self._requests = Counter(
            "continuum:continued_requests",
            "Requests that were sent without the tokens of the turn they continue, by whether the core knew "
            "it, or had to ask for them.",
            (*labels, "turn"),
            registry=registry,
        )

    def record_prompt(self, *, appended: bool) -> None:
        """Count a prompt that continues a turn whose tokens are known."""
        self._prompts.labels(*self._values, "appended" if appended else "rendered").inc()

    def record(self, stats: ContinuedStats) -> None:
        """Add what the core observed since its last report."""
        self._requests.labels(*self._values, "known").inc(stats.num_known)
        self._requests.labels(*self._values, "forgotten").inc(stats.num_forgotten)
