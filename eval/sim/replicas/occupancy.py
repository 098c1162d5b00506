"""Samples the KV pools of a simulation over time, with a bounded number of samples."""

from __future__ import annotations

from collections.abc import Sequence

from eval.load.records import Occupancy
from eval.sim.replicas.replica import SimReplica

MAX_SAMPLES = 240
FIRST_PERIOD_S = 0.5


class OccupancySampler:
    """Samples at a steady pace; when there are too many, drops every second one and halves the pace."""

    def __init__(self, replicas: Sequence[SimReplica]) -> None:
        self._replicas = replicas
        self._period_s = FIRST_PERIOD_S
        self._next_s = 0.0
        self.occupancy = Occupancy()

    def look(self, now: float) -> None:
        """Takes a sample if one is due."""
        if now < self._next_s:
            return
        self._sample(now)
        if len(self.occupancy.time_s) > MAX_SAMPLES:
            for name in self.occupancy.__struct_fields__:
                setattr(self.occupancy, name, getattr(self.occupancy, name)[::2])
            self._period_s *= 2
        self._next_s = now + self._period_s

    def _sample(self, now: float) -> None:
        samples = self.occupancy
        uses = [replica.pool_use() for replica in self._replicas]
        samples.time_s.append(now)
        samples.running.append(sum(use.running for use in uses))
        samples.pinned.append(sum(use.pinned for use in uses))
        samples.cached.append(sum(use.cached for use in uses))
        samples.free.append(sum(use.free for use in uses))
        samples.num_running.append(sum(use.num_running for use in uses))
        samples.num_waiting.append(sum(use.num_waiting for use in uses))
