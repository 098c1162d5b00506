"""``python -m benchmarks.http.metrics_page``: CPU time of a page, beside prometheus_client's own.

Both write the same numbers of one core, in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry, generate_latest

from engine.frontend.stats import IterationStats
from engine.metrics.metrics import Metrics
from engine.metrics.page import Page
from engine.records.reported_stats import SchedulerStats

REPEATS = 200


def main() -> None:
    page = Page()
    core = Metrics(page, "model", 32_768)
    core.record_pool(16, 4096)
    registry = CollectorRegistry()
    for family in page.families:
        registry.register(family)
    times: dict[str, list[float]] = {}
    for step in range(REPEATS):
        _time(times, "nothing changed", page.exposition)
        _decode(core, step)
        _time(times, "after a decode step", page.exposition)
        for family in page.families:
            family.changed = True
        _time(times, "every number changed", page.exposition)
        _time(times, "prometheus_client", lambda: generate_latest(registry))
    theirs = statistics.median(times["prometheus_client"])
    for what, seconds in times.items():
        ours = statistics.median(seconds)
        print(f"{what:22} {ours * 1e3:6.2f} ms  {ours / theirs:5.3f}x")


def _decode(core: Metrics, step: int) -> None:
    stats = SchedulerStats(num_running_reqs=step, prefix_cache_queries=5, step_tokens=32, num_pins=step)
    core.record(
        stats, IterationStats(float(step), num_generation_tokens=32, inter_token_latencies_s=[0.02] * 32)
    )


def _time(times: dict[str, list[float]], what: str, write: Callable[[], object]) -> None:
    begin = time.thread_time()
    write()
    times.setdefault(what, []).append(time.thread_time() - begin)


if __name__ == "__main__":
    main()
