"""V1's gauge of adapters, which gateways read: their names are in labels."""

from __future__ import annotations

import os
import time

from prometheus_client import Gauge

from engine.metrics.page import Page
from engine.records.adapters import name_of
from engine.records.reported_stats import LoRAStats


class LoRAMetrics:
    """Adapters of requests. The value is the time, in seconds since 1970: the latest series counts."""

    def __init__(self, page: Page, engine: str) -> None:
        self._engine = engine
        self._keeps_all = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        """Whether old series remain: processes share files to which they only add."""
        self._last: tuple[str, ...] | None = None
        self._info = Gauge(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting requests; the value is the Unix time of the update.",
            ("engine", "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
            registry=None,
            multiprocess_mode="mostrecent",
        )
        self._family = page.add("vllm:lora_requests_info", self._info)

    def record(self, stats: LoRAStats) -> None:
        """Exports the adapters of now."""
        running = ",".join(name_of(key) or "" for key in stats.running)
        waiting = ",".join(name_of(key) or "" for key in stats.waiting)
        values = (self._engine, str(stats.max_loras), running, waiting)
        if self._last is not None and self._last != values and not self._keeps_all:
            self._info.remove(*self._last)
        self._last = values
        self._info.labels(*values).set(time.time())
        self._family.changed = True
