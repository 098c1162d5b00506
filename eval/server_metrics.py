"""Reads the few Prometheus series a measurement needs; a series that a server lacks is None, not zero."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
PREEMPTIONS = "vllm:num_preemptions_total"
PINS = "continuum:pins"
PINS_ENDED = "continuum:pins_ended_total"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMetrics:
    """One reading of ``/metrics``."""

    running: float | None
    waiting: float | None
    kv_usage: float | None
    """Share of the pool that is in use, 0 to 1."""
    preemptions: float | None
    pins: float | None
    """Pins alive."""
    pins_ended: dict[str, float]
    """Cause to count; empty where the server keeps no pins."""

    @classmethod
    def parse(cls, text: str) -> ServerMetrics:
        """Read the exposition format; series of one name are summed over their labels."""
        totals: dict[str, float] = {}
        ended: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
                if sample.name == PINS_ENDED:
                    ended[sample.labels.get("cause", "?")] += sample.value
        return cls(
            running=totals.get(RUNNING),
            waiting=totals.get(WAITING),
            kv_usage=totals.get(KV_USAGE),
            preemptions=totals.get(PREEMPTIONS),
            pins=totals.get(PINS),
            pins_ended=dict(ended),
        )

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits, as far as the server tells."""
        return not self.running and not self.waiting

    def preemptions_since(self, before: ServerMetrics) -> int | None:
        if self.preemptions is None:
            return None
        return round(self.preemptions - (before.preemptions or 0.0))

    def pins_ended_since(self, before: ServerMetrics) -> dict[str, int]:
        """How pins ended between two readings; causes that did not occur are left out."""
        counts = {cause: round(n - before.pins_ended.get(cause, 0.0)) for cause, n in self.pins_ended.items()}
        return {cause: count for cause, count in sorted(counts.items()) if count}
