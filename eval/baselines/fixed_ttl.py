"""fixed-ttl: every turn except a job's last is pinned for the same time."""

from __future__ import annotations

from continuum.jobs.job import BranchTip
from continuum.queueing.order import waiting_key
from engine.core.policy import PolicyContext, PolicyDescription, WaitingKey
from engine.core.request import Request
from eval.baselines.holding import RetainingPolicy


class FixedTtlPolicy(RetainingPolicy):
    """Orders preempted turns, then warm ones, then by the program's age. Pins last until their deadlines."""

    name = "fixed-ttl"
    wants_signals = False

    def __init__(self, context: PolicyContext, ttl_s: float = 2.0) -> None:
        super().__init__(context)
        self._ttl_s = ttl_s

    def describe(self) -> PolicyDescription:
        return PolicyDescription(self.name, {"ttl_s": self._ttl_s})

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return waiting_key(request, self._turns.get(request.request_id))

    def ttl_s(self, tip: BranchTip, request: Request | None, now: float) -> float:
        return self._ttl_s
