"""The link between host memory and a simulated device: loads follow each other in the order of their plans.

Stores run in the other direction, at low priority and while the link is idle: they cost no time here. Data
from disk passes as it is read, many times slower than the link, so it costs no link time either.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

from engine.core.outputs import KVLoad
from eval.sim.cost_model import StepCost
from eval.sim.disk_drive import DiskDrive
from eval.sim.kv_sizes import KvSizes


class HostLink:
    """One direction of one replica's link."""

    def __init__(
        self, cost: StepCost, sizes: KvSizes, drive: DiskDrive, kv_transfer_bandwidth: float = 0.0
    ) -> None:
        """``kv_transfer_bandwidth``: bytes per second of what comes from elsewhere, not from host memory."""
        self._kv_transfer_bandwidth = kv_transfer_bandwidth
        self._cost = cost
        self._drive = drive
        self._sizes = sizes
        self._free_s = 0.0
        self._under_way: list[tuple[float, int]] = []
        """A heap of (completion time, load id)."""

    def start(self, loads: Iterable[KVLoad], now: float) -> None:
        """Queues these loads after those under way."""
        for load in loads:
            if load.remote is not None:
                num_tokens = self._sizes.num_tokens(len(load.remote.block_ids))
                takes_s = num_tokens * self._cost.kv_bytes_per_token / self._kv_transfer_bandwidth
                heapq.heappush(self._under_way, (now + takes_s, load.load_id))
                continue
            num_tokens = self._sizes.num_tokens(len(load.copies))
            self._free_s = max(now, self._free_s) + self._cost.copy_s(num_tokens)
            done_s = self._free_s
            if load.reads:
                done_s = max(done_s, self._drive.read(len(load.reads), now))
            heapq.heappush(self._under_way, (done_s, load.load_id))

    def take_done(self, now: float) -> list[int]:
        """Returns the ids of loads that are done by now, each once."""
        done: list[int] = []
        while self._under_way and self._under_way[0][0] <= now:
            done.append(heapq.heappop(self._under_way)[1])
        return done

    @property
    def next_done_s(self) -> float:
        """When the next load is done; infinity if none is under way."""
        return self._under_way[0][0] if self._under_way else math.inf
