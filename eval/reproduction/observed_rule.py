"""Observes the paper's rule: the times to live it sets and their inputs. Decides nothing itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from continuum.jobs.job import BranchTip
from engine.core.policy import PolicyContext
from engine.core.request import Request
from eval.baselines.knowledge import Knowledge, NamedPolicy
from eval.baselines.paper import NO_TOOL, PaperPolicy
from eval.report.metrics import RunResult
from eval.sim.simulate import SimulationPlan, SimulationRun, simulate_one


@dataclass(frozen=True, slots=True)
class Decision:
    """The rule's decision after one tool call."""

    ttl_s: float
    prefill_or_reload_s: float
    queue_delay_s: float
    """The paper's T̄."""


@dataclass(frozen=True, slots=True)
class RetentionTimes:
    """All decisions of a run, averaged."""

    num_decisions: int
    zero_share: float
    """Share of decisions with a time to live of zero."""
    mean_ttl_s: float
    mean_prefill_or_reload_s: float
    mean_queue_delay_s: float

    @classmethod
    def of(cls, decisions: list[Decision]) -> RetentionTimes | None:
        """Returns the averages; None without decisions."""
        number = len(decisions)
        if not number:
            return None
        return cls(
            number,
            sum(one.ttl_s <= 0 for one in decisions) / number,
            math.fsum(one.ttl_s for one in decisions) / number,
            math.fsum(one.prefill_or_reload_s for one in decisions) / number,
            math.fsum(one.queue_delay_s for one in decisions) / number,
        )


class _ObservedRule(PaperPolicy):
    def __init__(self, decisions: list[Decision], context: PolicyContext, knowledge: Knowledge) -> None:
        super().__init__(context, knowledge)
        self._decisions = decisions

    def ttl_s(self, tip: BranchTip, request: Request | None, now: float) -> float:
        ttl_s = super().ttl_s(tip, request, now)
        if tip.tools and tip.tools[0] is not NO_TOOL:
            reload_s = self._prefill_or_reload_s(len(tip.chain) * self._block_size)
            self._decisions.append(Decision(ttl_s, reload_s, self._queue_delay.mean_s))
        return ttl_s


def observe_rule(plan: SimulationPlan, run: SimulationRun) -> tuple[RunResult, RetentionTimes | None]:
    """Returns the run under the paper's rule, and the times to live that it set."""
    decisions: list[Decision] = []
    result = simulate_one(plan, run, NamedPolicy(run.policy, partial(_ObservedRule, decisions)))
    return result, RetentionTimes.of(decisions)
