"""The metrics of a server: of its one core, or of each of several, under the same names."""

from __future__ import annotations

from pathlib import Path

from engine.frontend.stats import IterationStats
from engine.metrics.metrics import Metrics
from engine.metrics.page import Page
from engine.metrics.shared_page import SharedPage
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
        """``shared_folder``: the folder of the processes of this server; None for a single process.
        ``num_speculative_tokens``: as of ``Metrics``."""
        self._page = Page()
        self._shared_page = SharedPage(shared_folder) if shared_folder is not None else None
        self._engines = [
            Metrics(self._page, model_name, max_model_len, num_speculative_tokens, engine_index=index)
            for index in range(num_engines)
        ]
        first = self._engines[0]
        self.record_receipt = first.record_receipt
        self.record_rejection = first.record_rejection
        self.record_viewers = first.record_viewers
        self.record_volatile_text = first.record_volatile_text
        self.record_continued_prompt = first.record_continued_prompt
        self.record_media = first.record_media
        self.record_key_usage = first.record_key_usage

    async def exposition(self) -> bytes:
        """The page for Prometheus, of all processes of this server."""
        if self._shared_page is not None:
            return await self._shared_page.exposition()
        return self._page.exposition()

    def record(self, scheduler: SchedulerStats | None, iteration: IterationStats) -> None:
        """A listener for AsyncLLM's statistics."""
        self._engines[iteration.engine].record(scheduler, iteration)

    def record_pool(self, block_size: int, num_gpu_blocks: int) -> None:
        """Records the size of each core's KV pool."""
        for engine in self._engines:
            engine.record_pool(block_size, num_gpu_blocks)
