"""Counts each tenant's slots in the batch, and finds which tenant should give one up to another.

Slots are shared max-min fairly among the tenants that want some now; a single tenant may have all. Which of a
tenant's requests gets a slot is decided elsewhere.
"""

from __future__ import annotations

from engine.core.request import Request


class TenantSlots:
    """Slots in the batch by tenant, those of requests that are being loaded included."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._tenants: dict[str, str] = {}
        """The tenant of each request that has a slot."""
        self._by_right: dict[str, str] = {}
        """Each tenant's request, if any, that got its slot out of turn, as it had waited too long."""

    def __len__(self) -> int:
        """How many tenants have slots."""
        return len(self._held)

    def are_all_of(self, tenant: str) -> bool:
        """Whether no other tenant has a slot."""
        return not self._held or (len(self._held) == 1 and tenant in self._held)

    def held(self, tenant: str) -> int:
        """How many slots the tenant has."""
        return self._held.get(tenant, 0)

    def rank(self, tenant: str, *, is_overdue: bool) -> int:
        """The tenant's rank in the queue, the smallest first.

        A request that has waited for too long ranks like one of a tenant without slots, but only one request
        of each tenant at a time, so that a flood of them delays no other tenant.
        """
        held = self._held.get(tenant, 0)
        return 0 if is_overdue and held and tenant not in self._by_right else held

    def take(self, request: Request, *, is_overdue: bool) -> None:
        """Give the request a slot."""
        tenant = request.tenant
        request_id = request.request_id
        if is_overdue and tenant in self._held:
            self._by_right.setdefault(tenant, request_id)
        self._tenants[request_id] = tenant
        self._held[tenant] = self._held.get(tenant, 0) + 1

    def give_back(self, request: Request) -> bool:
        """Free the request's slot; False if it has none."""
        tenant = self._tenants.pop(request.request_id, None)
        if tenant is None:
            return False
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        if self._by_right.get(tenant) == request.request_id:
            del self._by_right[tenant]
        return True

    def owes(self, tenant: str) -> str | None:
        """The tenant with most slots, if it would have no fewer than this one after giving it one."""
        most = max(self._held, key=self._held.__getitem__, default=None)
        if most is None or self._held[most] - self.held(tenant) < 2:
            return None
        return most

    def richest(self) -> set[str]:
        """The tenants with most slots."""
        most = max(self._held.values())
        return {tenant for tenant, held in self._held.items() if held == most}

    def check_invariants(self, with_slot: list[Request]) -> None:
        """Raise AssertionError unless exactly these requests have a slot."""
        assert self._tenants == {request.request_id: request.tenant for request in with_slot}
        assert sum(self._held.values()) == len(with_slot)
        assert all(self._held.values())
        assert all(self._tenants[request_id] == tenant for tenant, request_id in self._by_right.items())
