"""without-PART: ``continuum`` without one of its parts, to measure the effect of that part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from continuum.config import ContinuumConfig
from continuum.learning.tool_stats import ToolStats
from continuum.policy import ContinuumPolicy
from continuum.queueing.order import COLD, WARM, JobRanks
from engine.core.policy import Pin, PolicyContext, SchedulingPolicy, WaitingKey
from engine.core.request import Request
from engine.records.messages import ToolCall
from estimator.survival import SurvivalCurve
from estimator.tool_key import ToolKey

ANY_CALL = ToolKey()


class WithoutOrder(ContinuumPolicy):
    """Turns are served as they come, warm or not, and none passes another."""

    name = "without-order"
    lets_pass = False

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        place, *_ = super().waiting_key(request, now)
        return (COLD if place == WARM else place, request.arrival_time)


class WithoutWarmFirst(ContinuumPolicy):
    """A turn whose KV is pinned is ordered by its job's rank."""

    name = "without-warm-first"
    lets_pass = False

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        place, *rank = super().waiting_key(request, now)
        return (COLD if place == WARM else place, *rank)


class WithoutBreakRule(ContinuumPolicy):
    """A request that does not fit may have any pin revoked: a failed allocation is reason enough."""

    name = "without-break-rule"

    def revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        return super().revocable_for(requester, now, last_resort=True)


class WithoutVictimRule(ContinuumPolicy):
    """The request that was admitted last is preempted."""

    name = "without-victim-rule"

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        return running[-1]


class WithoutAdmission(ContinuumPolicy):
    """A new job may start as soon as its prompt fits."""

    name = "without-admission"

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        return True


class _ByAge(JobRanks):
    def _age_weight(self) -> float:
        return 1.0


class WithoutFadingAge(ContinuumPolicy):
    """A job's age counts in full, with a host tier as without."""

    name = "without-fading-age"
    ranks = _ByAge


class _OneKind(ToolStats):
    def keys(self, calls: Sequence[ToolCall]) -> list[ToolKey]:
        return [ANY_CALL for _ in calls]


class WithoutToolKinds(ContinuumPolicy):
    """All tool calls are of one kind."""

    name = "without-tool-kinds"
    tool_stats = _OneKind


class _OfNoJob(ToolStats):
    def curve(
        self, tools: Sequence[ToolKey] | None, job_id: str | None = None, tenant: str | None = None
    ) -> SurvivalCurve:
        return super().curve(tools, tenant=tenant)


class WithoutOwnCalls(ContinuumPolicy):
    """A job's own calls predict its next one no better than any other job's calls."""

    name = "without-own-calls"
    tool_stats = _OfNoJob


WITHOUT: tuple[type[ContinuumPolicy], ...] = (
    WithoutOrder,
    WithoutWarmFirst,
    WithoutBreakRule,
    WithoutVictimRule,
    WithoutAdmission,
    WithoutFadingAge,
    WithoutToolKinds,
    WithoutOwnCalls,
)


@dataclass(frozen=True, slots=True)
class LessenedFactory:
    """Makes one of ``WITHOUT`` inside the core process."""

    kind: type[ContinuumPolicy]
    config: ContinuumConfig

    def __call__(self, context: PolicyContext) -> SchedulingPolicy:
        return self.kind(context, self.config)
