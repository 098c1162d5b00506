"""How tenants share the pin budget: max-min fair among those that want it now, all of it for one alone.

Knows how much each tenant holds, and that it can be asked for a pin that it could do without.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace

from engine.core.policy import Pin


class TenantShares:
    """Pinned blocks by tenant."""

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks``: what all may hold together."""
        self._budget = num_blocks
        self._held: dict[str, int] = {}
        self._by_size: list[tuple[int, str]] = []

    def held(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def count(self, tenant: str, num_blocks: int) -> None:
        """So many more; fewer, if negative."""
        before = self._held.pop(tenant, 0)
        if before:
            del self._by_size[bisect_left(self._by_size, (before, tenant))]
        after = before + num_blocks
        if after:
            self._held[tenant] = after
            insort(self._by_size, (after, tenant))

    def richer_than(self, num_blocks: int) -> list[tuple[int, str]]:
        """Tenants that hold more than so many blocks, after what they hold."""
        return self._by_size[bisect_left(self._by_size, (num_blocks + 1, "")) :]

    def is_safe(self, tenant: str, from_tenant: str) -> bool:
        """Whether another tenant has no claim to what this one holds: no more than an equal part of the
        budget, counting the other among those that want some."""
        if tenant == from_tenant:
            return False
        num_wanting = len(self._held) + (from_tenant not in self._held)
        return self._held.get(tenant, 0) * num_wanting <= self._budget


class Givers:
    """Tenants that hold more than another one would, and what they can do without."""

    def __init__(self, richer: list[tuple[int, str]], pins_of: Callable[[str], Iterator[Pin]]) -> None:
        """``pins_of``: a tenant's pins, those it would give first in front."""
        self._heap = [(-held, tenant) for held, tenant in richer]
        heapify(self._heap)
        self._pins = {tenant: pins_of(tenant) for _, tenant in richer}

    def give(self, had: int, wants: int) -> Pin | None:
        """A pin of the tenant that holds most, if that is more than somebody who has ``had`` so much
        ``wants`` in all; it keeps no less than was had. None: nobody has one."""
        while self._heap and -self._heap[0][0] > wants:
            held, tenant = -self._heap[0][0], self._heap[0][1]
            pin = next((pin for pin in self._pins[tenant] if held - pin.num_blocks >= had), None)
            if pin is not None:
                heapreplace(self._heap, (pin.num_blocks - held, tenant))
                return pin
            heappop(self._heap)
        return None
