"""fork: the rule of the Continuum preview, a vLLM 0.10.2 fork (Weili-0234/vllm-continuum).

Reproduces its decisions, not its faults: no crash without pins or job ids, no pins of aborted turns, no
softened assertion, no expiry skipped while a list is scanned; gaps are separated by job.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from continuum.jobs.job import BranchTip
from continuum.retention.ttl import ForkRule
from engine.core.policy import Pin, WaitingKey
from engine.core.request import Request
from eval.baselines.holding import GRACE_S
from eval.baselines.tool_means import ToolMeanPolicy

RULE = ForkRule()


class ForkPolicy(ToolMeanPolicy):
    """Pins for 2 s if the tool's mean gap is at most 2 s or the tool is new; else, or without a tool, not.

    Queue: pinned jobs, then the earliest job; preempted ones get no precedence. Running requests are
    preempted before any pin while two or more run; with fewer, the pin that ends last is dropped.
    """

    name = "fork"

    def ttl_s(self, tip: BranchTip, request: Request | None, now: float) -> float:
        if tip.tools is None:
            return GRACE_S  # the fork parses calls in the scheduler; here the API server does
        return RULE.decide(self.mean_gap_s(tip), has_tool=bool(tip.tools)).ttl_s

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        turn = self._turns.get(request.request_id)
        return (turn is None or not turn.warm, self.program_arrival_s(request))

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        """Returns the latest job's request, preferring those not flagged as their job's last step."""
        unflagged = [r for r in running if r.job is None or not r.job.is_last_step]
        return super().victim(unflagged or running, requester, now)

    def pins_to_break(self, requester: Request) -> Iterator[Pin]:
        return iter(sorted(self._pins, key=lambda pin: pin.deadline_s, reverse=True))
