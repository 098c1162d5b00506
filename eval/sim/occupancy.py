"""Watches the KV pools of a simulation over time, with a bounded number of samples."""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.scheduler import Scheduler
from engine.core.traced_scheduler import TracedScheduler
from eval.load.records import Occupancy

MAX_SAMPLES = 240
FIRST_PERIOD_S = 0.5


class OccupancySampler:
    """Samples at a steady pace; when there are too many, every other one goes and the pace is halved."""

    def __init__(self, schedulers: Sequence[Scheduler | TracedScheduler]) -> None:
        self._schedulers = schedulers
        self._period_s = FIRST_PERIOD_S
        self._next_s = 0.0
        self.occupancy = Occupancy()

    def look(self, now: float) -> None:
        """Take a sample if one is due."""
        if now < self._next_s:
            return
        self._sample(now)
        if len(self.occupancy.time_s) > MAX_SAMPLES:
            for name in self.occupancy.__struct_fields__:
                setattr(self.occupancy, name, getattr(self.occupancy, name)[::2])
            self._period_s *= 2
        self._next_s = now + self._period_s

    def _sample(self, now: float) -> None:
        running = pinned = cached = free = num_running = num_waiting = 0
        for scheduler in self._schedulers:
            kv = scheduler.kv
            active = [*scheduler.running, *scheduler.loads.requests]
            tables = (kv.blocks_of_request(request.request_id) for request in active)
            held = {block.block_id for table in tables for block in table}
            free_empty = kv.pool.num_free_empty_blocks
            running += len(held)
            pinned += kv.pool.num_usable_blocks - kv.num_free_blocks - len(held)
            cached += kv.num_free_blocks - free_empty
            free += free_empty
            num_running += len(scheduler.running)
            num_waiting += len(scheduler.waiting) + scheduler.loads.num_requests
        samples = self.occupancy
        samples.time_s.append(now)
        samples.running.append(running)
        samples.pinned.append(pinned)
        samples.cached.append(cached)
        samples.free.append(free)
        samples.num_running.append(num_running)
        samples.num_waiting.append(num_waiting)
