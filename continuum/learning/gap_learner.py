"""What the time between turns teaches: how long tools take, when jobs end, how right their clients were."""

from __future__ import annotations

from continuum.jobs.branches import BranchEnd, BranchListener
from continuum.jobs.job import BranchTip, Turn
from continuum.learning.hint_accuracy import HintAccuracy
from continuum.learning.tool_gaps import PublishedGaps
from continuum.learning.tool_stats import ToolStats
from engine.messages import ToolSignal, ToolState
from estimator.survival import SurvivalCurve


class GapLearner(BranchListener):
    """Learns from each gap once, however it ends, and tells what is left of one."""

    def __init__(self, tools: ToolStats, published: PublishedGaps | None, block_size: int) -> None:
        """``published`` learns as the published rules do; None: nobody asks for that."""
        self._tools = tools
        self._published = published
        self._told = HintAccuracy()
        self._block_size = block_size

    def remaining(self, tip: BranchTip, now: float) -> SurvivalCurve:
        """Time until the turn returns, from now, by experience and by what its client has said."""
        known = self._tools.curve(tip.tools, tip.job.job_id, tip.job.tenant)
        return self._told.remaining(tip, known, now)

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        gap_s = turn.gap_s
        if gap_s is None or tip.tools is None or tip.learned:
            return
        tip.learned = True
        job_id, tenant = tip.job.job_id, tip.job.tenant
        if self._published is not None:
            self._published.returned(tip, gap_s)
        with_result = _brings_result(turn, tip)
        if with_result and tip.told is not None:
            self._told.observe(tip, gap_s, self._tools.curve(tip.tools, job_id, tenant))
        self._tools.observe(tip.tools, gap_s, now, censored=not with_result, job_id=job_id, tenant=tenant)
        growth_tokens = turn.request.num_prompt_tokens - len(tip.chain) * self._block_size
        self._tools.observe_next_turn(tip.tools, growth_tokens, tenant)

    def on_hint(self, tip: BranchTip, signal: ToolSignal, now: float) -> None:
        if tip.told is not None and tip.told.state is ToolState.CANCELLED:
            self._cut_off(tip, now)

    def on_dropped(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        """Of a job that is forgotten while its tools run it is known that they took at least so long. If
        nothing ran, it was done."""
        if end is BranchEnd.JOB_FORGOTTEN and tip.tools:
            self._cut_off(tip, now)
        elif end is not BranchEnd.CROWDED_OUT:
            self._was_last(tip)

    def _cut_off(self, tip: BranchTip, now: float) -> None:
        """Its tools ran for so long and then were heard of no more."""
        if tip.tools and not tip.learned:
            tip.learned = True
            job, waited_s = tip.job, now - tip.ended_s
            self._tools.observe(tip.tools, waited_s, now, censored=True, job_id=job.job_id, tenant=job.tenant)

    def _was_last(self, tip: BranchTip) -> None:
        """No turn came after it, or will. A question that was only asked once tells nothing of jobs."""
        if tip.tools is not None and tip.job.is_established:
            self._tools.observe_last_turn(tip.tools, tip.job.tenant)


def _brings_result(turn: Turn, tip: BranchTip) -> bool:
    """Whether the prompt holds a tool result more than the one before: a conversation may go on without, its
    call given up. Where no results are counted, or none of this agent's ever is one, it is taken to."""
    job = turn.request.job
    now = job.num_results if job is not None else None
    return not tip.tools or not now or tip.num_results is None or now > tip.num_results
