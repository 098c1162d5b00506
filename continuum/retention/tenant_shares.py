"""Shares of the pin budget: max-min fair among the tenants that want it now; a single tenant may have all.

It knows how many blocks each tenant has pinned, and can request a pin to give up from a tenant.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heapreplace

from engine.core.policy import Pin


class TenantShares:
    """Pinned blocks by tenant."""

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks`` is the maximum for all tenants together."""
        self._budget = num_blocks
        self._held: dict[str, int] = {}
        self._by_size: list[tuple[int, str]] = []

    def held(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def count(self, tenant: str, num_blocks: int) -> None:
        """Add blocks to a tenant's count; a negative number removes some."""
        before = self._held.pop(tenant, 0)
        if before:
            del self._by_size[bisect_left(self._by_size, (before, tenant))]
        after = before + num_blocks
        if after:
            self._held[tenant] = after
            insort(self._by_size, (after, tenant))

    def richer_than(self, num_blocks: int) -> list[tuple[int, str]]:
        """Tenants with more than ``num_blocks`` pinned blocks, in ascending order."""
        return self._by_size[bisect_left(self._by_size, (num_blocks + 1, "")) :]

    def is_safe(self, tenant: str, from_tenant: str) -> bool:
        """Whether ``from_tenant`` has no claim to the tenant's blocks: the tenant holds no more than an equal
        part of the budget, with ``from_tenant`` counted among those that want some."""
        if tenant == from_tenant:
            return False
        num_wanting = len(self._held) + (from_tenant not in self._held)
        return self._held.get(tenant, 0) * num_wanting <= self._budget


class Givers:
    """Tenants with more pinned blocks than the requesting tenant would have, and the pins that they can give
    up."""

    def __init__(self, richer: list[tuple[int, str]], pins_of: Callable[[str], Iterator[Pin]]) -> None:
        """``pins_of`` returns a tenant's pins, in the order in which it would give them up."""
        self._heap = [(-held, tenant) for held, tenant in richer]
        heapify(self._heap)
        self._pins = {tenant: pins_of(tenant) for _, tenant in richer}

    def give(self, had: int, wants: int) -> Pin | None:
        """A pin of the tenant with the most blocks, if it has more than the ``wants`` of the requesting
        tenant, which had ``had``; the giver keeps at least ``had``. None if no tenant has such a pin."""
        while self._heap and -self._heap[0][0] > wants:
            held = -self._heap[0][0]
            tenant = self._heap[0][1]
            pin = next((pin for pin in self._pins[tenant] if held - pin.num_blocks >= had), None)
            if pin is not None:
                heapreplace(self._heap, (pin.num_blocks - held, tenant))
                return pin
            heappop(self._heap)
        return None
