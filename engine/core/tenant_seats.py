"""Who has places in the batch: how many each tenant has, and whose turn it is to give one up.

Max-min fair among the tenants that want some now, all of them for one alone. Of one tenant nothing is decided
here.
"""

from __future__ import annotations

from engine.request import Request


class TenantSeats:
    """Places in the batch by tenant, those kept for requests that are being loaded included."""

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._tenants: dict[str, str] = {}
        """By request that has a place."""
        self._by_right: dict[str, str] = {}
        """Of a tenant with more places than others had: the request that has one since it had waited for too
        long."""

    def __len__(self) -> int:
        """Tenants that have any."""
        return len(self._held)

    def are_all_of(self, tenant: str) -> bool:
        """Whether no other one has any."""
        return not self._held or (len(self._held) == 1 and tenant in self._held)

    def held(self, tenant: str) -> int:
        return self._held.get(tenant, 0)

    def rank(self, tenant: str, *, is_overdue: bool) -> int:
        """Smaller first. Who has waited for too long stands with those that have nothing, one of a tenant at
        a time: its own flood makes nobody else wait."""
        held = self._held.get(tenant, 0)
        return 0 if is_overdue and held and tenant not in self._by_right else held

    def take(self, request: Request, *, is_overdue: bool) -> None:
        tenant, request_id = request.tenant, request.request_id
        if is_overdue and tenant in self._held:
            self._by_right.setdefault(tenant, request_id)
        self._tenants[request_id] = tenant
        self._held[tenant] = self._held.get(tenant, 0) + 1

    def give_back(self, request: Request) -> bool:
        """False if it has none."""
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
        """The tenant that has most, if it had no less than this one even after giving it a place."""
        most = max(self._held, key=self._held.__getitem__, default=None)
        if most is None or self._held[most] - self.held(tenant) < 2:
            return None
        return most

    def richest(self) -> set[str]:
        """All that have as many as anybody."""
        most = max(self._held.values())
        return {tenant for tenant, held in self._held.items() if held == most}

    def check_invariants(self, seated: list[Request]) -> None:
        """Raise AssertionError unless exactly these requests have a place."""
        assert self._tenants == {request.request_id: request.tenant for request in seated}
        assert sum(self._held.values()) == len(seated)
        assert all(self._held.values())
        assert all(self._tenants[request_id] == tenant for tenant, request_id in self._by_right.items())
