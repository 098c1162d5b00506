"""Learns how often a turn soon follows one that called no tool."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from continuum.jobs.branches import BranchListener
from continuum.jobs.job import BranchTip, Turn
from estimator.tenants import MAX_TENANTS

PRIOR = 0.5
"""Added to the answers that were followed, and to the others: Jeffreys' prior of a share."""
MAX_ANSWERS = 512.0
"""When this many answers were seen, the counts are halved, so that old answers count less."""


@dataclass(slots=True)
class _Answers:
    """Answers of one tenant."""

    num_seen: float = 0.0
    num_followed: float = 0.0


class AnswerReturns(BranchListener):
    """Counts each tenant's turns without a tool call, and those that another turn followed soon. Single
    questions are left out: they say nothing about jobs, and their KV is not held."""

    def __init__(self, soon_s: float) -> None:
        self._soon_s = soon_s
        self._of: OrderedDict[str | None, _Answers] = OrderedDict()
        """The answers of each tenant, the least recently seen first."""

    def share(self, tenant: str | None) -> float | None:
        """Share of these turns that another turn followed within ``soon_s`` seconds; None before any was
        seen."""
        answers = self._of.get(tenant)
        if answers is None:
            return None
        return (answers.num_followed + PRIOR) / (answers.num_seen + 2 * PRIOR)

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        if not tip.is_answer or tip.is_counted_answer or not tip.job.is_established:
            return
        tip.is_counted_answer = True
        answers = self._of.setdefault(tip.job.tenant, _Answers())
        self._of.move_to_end(tip.job.tenant)
        if len(self._of) > MAX_TENANTS:
            self._of.popitem(last=False)
        answers.num_seen += 1
        if answers.num_seen > MAX_ANSWERS:
            answers.num_seen /= 2
            answers.num_followed /= 2

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        answers = self._of.get(tip.job.tenant)
        if tip.is_counted_answer and answers is not None and now - tip.ended_s <= self._soon_s:
            answers.num_followed = min(answers.num_seen, answers.num_followed + 1)
