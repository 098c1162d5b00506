"""The link between host memory and a simulated device: loads follow each other in the order of their plans.

Stores go the other way, at low priority and while the link has nothing else to do: they cost no time here.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from engine.outputs import KVLoad
from eval.sim.cost_model import StepCost


class HostLink:
    """One direction of one replica's link."""

    def __init__(self, cost: StepCost, block_size: int) -> None:
        self._cost = cost
        self._block_size = block_size
        self._free_s = 0.0
        self._under_way: deque[tuple[float, int]] = deque()
        """When each load will be done, and its id; in that order."""

    def start(self, loads: Iterable[KVLoad], now: float) -> None:
        """Begin these behind those that are under way."""
        for load in loads:
            num_tokens = len(load.copies) * self._block_size
            self._free_s = max(now, self._free_s) + self._cost.copy_s(num_tokens)
            self._under_way.append((self._free_s, load.load_id))

    def take_done(self, now: float) -> list[int]:
        """Ids of the loads that are done by now; said once."""
        done: list[int] = []
        while self._under_way and self._under_way[0][0] <= now:
            done.append(self._under_way.popleft()[1])
        return done

    @property
    def next_done_s(self) -> float:
        """When the next load is done; infinity if none is under way."""
        return self._under_way[0][0] if self._under_way else math.inf
