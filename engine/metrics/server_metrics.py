"""The metrics of a server: of its one core, or of each of several, under the same names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.registry import Collector

from engine.frontend.stats import IterationStats
from engine.metrics.metrics import Metrics
from engine.records.reported_stats import SchedulerStats


class ServerMetrics:
    """Metrics of the whole server are exported with engine="0"."""

    def __init__(
        self,
        num_engines: int,
        model_name: str,
        max_model_len: int,
        shared_folder: Path | None = None,
        num_speculative_tokens: int = 0,
    ) -> None:
        """``shared_folder``, ``num_speculative_tokens``: as of ``Metrics``."""
        self._engines = [
            Metrics(model_name, max_model_len, shared_folder, num_speculative_tokens, engine_index=index)
            for index in range(num_engines)
        ]
        first = self._engines[0]
        self.record_receipt = first.record_receipt
        self.record_rejection = first.record_rejection
        self.record_viewers = first.record_viewers
        self.record_volatile_text = first.record_volatile_text
        self.record_continued_prompt = first.record_continued_prompt
        self.record_media = first.record_media
        # The files of a folder hold what all cores' registries have recorded.
        self.exposition: Callable[[], bytes] = first.exposition
        if num_engines > 1 and shared_folder is None:
            merged = CollectorRegistry()
            merged.register(_SideBySide([engine.registry for engine in self._engines]))
            self.exposition = lambda: generate_latest(merged)

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """A listener for AsyncLLM's statistics."""
        self._engines[iteration.engine].record(scheduler, iteration)

    def record_pool(self, block_size: int, num_gpu_blocks: int) -> None:
        """Records the size of each core's KV pool."""
        for engine in self._engines:
            engine.record_pool(block_size, num_gpu_blocks)


class _SideBySide(Collector):
    """The families of several registries: those of one name as one."""

    def __init__(self, registries: list[CollectorRegistry]) -> None:
        self._registries = registries

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for registry in self._registries:
            for family in registry.collect():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()
