"""Learns from the time between turns: how long tools take, when jobs end, how accurate clients'
hints are."""

from __future__ import annotations

from continuum.jobs.branches import BranchEnd, BranchListener
from continuum.jobs.job import BranchTip, Turn
from continuum.learning.gap_corrections import GapCorrections
from continuum.learning.hint_accuracy import HintAccuracy
from continuum.learning.tool_gaps import PublishedGaps
from continuum.learning.tool_stats import ToolStats
from engine.records.messages import ToolSignal, ToolState
from estimator.survival import SurvivalCurve


class GapLearner(BranchListener):
    """Learns from each gap once, however it ends, and predicts the rest of an open gap."""

    def __init__(
        self,
        tools: ToolStats,
        corrections: GapCorrections,
        published: PublishedGaps | None,
        block_size: int,
    ) -> None:
        """``published`` learns as the published rules do; None if no rule needs that."""
        self._tools = tools
        self._corrections = corrections
        self._published = published
        self._told = HintAccuracy()
        self._block_size = block_size

    def remaining(self, tip: BranchTip, now: float) -> SurvivalCurve:
        """Time until the turn returns, from now, by past gaps and its client's hints."""
        known = self._tools.curve(tip.tools, tip.job.job_id, tip.job.tenant)
        return self._told.remaining(tip, known, now)

    def expected(self, tip: BranchTip, now: float) -> SurvivalCurve:
        """Like ``remaining``, corrected by a learned model; only reported, never used for decisions."""
        return self._told.remaining(tip, self._tools.corrected_curve(tip), now)

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        gap_s = turn.gap_s
        if gap_s is None or tip.tools is None or tip.learned:
            return
        tip.learned = True
        job_id = tip.job.job_id
        tenant = tip.job.tenant
        if self._published is not None:
            self._published.returned(tip, gap_s)
        with_result = _brings_result(turn, tip)
        if with_result and tip.hint is not None:
            self._told.observe(tip, gap_s, self._tools.curve(tip.tools, job_id, tenant))
        if with_result:
            self._corrections.ended(tip, gap_s)
        self._tools.observe(tip.tools, gap_s, now, censored=not with_result, job_id=job_id, tenant=tenant)
        growth_tokens = turn.request.num_prompt_tokens - len(tip.chain) * self._block_size
        self._tools.observe_next_turn(tip.tools, growth_tokens, tenant)

    def on_hint(self, tip: BranchTip, signal: ToolSignal, now: float) -> None:
        if tip.hint is not None and tip.hint.state is ToolState.CANCELLED:
            self._cut_off(tip, now)

    def on_dropped(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        """Records that the gap was dropped. If the job is forgotten while its tools run, they took at least
        this long. Otherwise the turn was the job's last, unless its job had too many branches."""
        if end is BranchEnd.JOB_FORGOTTEN and tip.tools:
            self._cut_off(tip, now)
        elif end is not BranchEnd.CROWDED_OUT:
            self._was_last(tip)

    def _cut_off(self, tip: BranchTip, now: float) -> None:
        """Records that the tools ran for at least this long (censored)."""
        if tip.tools and not tip.learned:
            tip.learned = True
            job = tip.job
            waited_s = now - tip.ended_s
            self._tools.observe(tip.tools, waited_s, now, censored=True, job_id=job.job_id, tenant=job.tenant)

    def _was_last(self, tip: BranchTip) -> None:
        """Records that no turn followed this one. Single-turn requests are skipped, since they say nothing
        about jobs."""
        if tip.tools is not None and tip.job.is_established:
            self._tools.observe_last_turn(tip.tools, tip.job.tenant)


def _brings_result(turn: Turn, tip: BranchTip) -> bool:
    """Whether the prompt holds more tool results than the previous one: a conversation may go on without the
    result if its client gave up the call.

    True if results are not counted, or if the prompt has none.
    """
    job = turn.request.job
    now = job.num_results if job is not None else None
    return not tip.tools or not now or tip.num_results is None or now > tip.num_results
