"""Finds the running requests that may be preempted where several tenants share the batch.

A tenant with more slots gives up to one with fewer, until each has as many as it wants or as any other has.
With a single tenant, any request may be preempted. The policy chooses among these requests.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.fairness.tenant_slots import TenantSlots
from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.policy import QueuePolicy
from engine.core.request import Request
from engine.core.step import Step


class FairPreemption:
    """Names the victims; the scheduler preempts them."""

    def __init__(self, kv: KVCacheManager, slots: TenantSlots, policy: QueuePolicy) -> None:
        self._kv = kv
        self._slots = slots
        self._policy = policy

    def candidates(self, running: list[Request]) -> list[Request]:
        """Requests of the tenants with most slots: one of them may be preempted for a running request."""
        if len(self._slots) <= 1:
            return running
        richest = self._slots.richest()
        return [request for request in running if request.tenant in richest] or running

    def owed_to(self, request: Request, running: list[Request], step: Step) -> list[Request]:
        """Requests that the tenant with most slots may lose to this one, whose tenant has at least two fewer.

        Excludes those that this step has started, and those whose new blocks another request has hit.
        """
        giver = self._slots.owes(request.tenant)
        if giver is None:
            return []
        started = {each.request_id for each in (*step.new, *step.resumed)}
        return [
            each
            for each in running
            if each.tenant == giver
            and each.request_id not in started
            and not self._kv.are_shared(each, step.num_scheduled.get(each.request_id, 0))
        ]

    def victims_for(
        self,
        request: Request,
        num_tokens: int,
        hit: Sequence[KVCacheBlock],
        running: list[Request],
        step: Step,
    ) -> list[Request]:
        """Requests of the tenant with most slots whose blocks together make this one fit.

        Empty if the requests that may be preempted are not enough. A request that was preempted itself waits
        for free blocks: two that preempt each other would never end.
        """
        giver = self._slots.owes(request.tenant)
        if giver is None or request.num_preemptions:
            return []
        owed = self.owed_to(request, running, step)
        victims = list[Request]()
        num_freed = 0
        num_short = self._kv.num_blocks_short(request, num_tokens, hit)
        num_victims = self._kv.num_states_short(request, hit)  # each frees at least one
        may_take = self._slots.held(giver) - self._slots.held(request.tenant) - 1
        while owed and len(victims) < may_take and (num_freed < num_short or len(victims) < num_victims):
            victim = self._policy.victim(owed, request, step.now)
            owed.remove(victim)
            victims.append(victim)
            num_freed += self._kv.num_blocks_of(victim.request_id)
        return victims if num_freed >= num_short and len(victims) >= num_victims else []
