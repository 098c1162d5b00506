"""What the time between turns teaches: how long tools take, when jobs end, how right their clients were."""

from __future__ import annotations

from continuum.branches import BranchEnd, BranchListener
from continuum.jobs import Frontier, Turn
from continuum.told_memory import ToldMemory
from continuum.tool_gaps import PublishedGaps
from continuum.tool_memory import ToolMemory
from engine.messages import ToolSignal, ToolState
from estimator.survival import SurvivalCurve


class GapLessons(BranchListener):
    """Learns from each gap once, however it ends, and tells what is left of one."""

    def __init__(self, tools: ToolMemory, published: PublishedGaps | None, block_size: int) -> None:
        """``published`` learns as the published rules do; None: nobody asks for that."""
        self._tools = tools
        self._published = published
        self._told = ToldMemory()
        self._block_size = block_size

    def remaining(self, frontier: Frontier, now: float) -> SurvivalCurve:
        """Time until the turn returns, from now, by experience and by what its client has said."""
        known = self._tools.curve(frontier.tools, frontier.job.job_id, frontier.job.tenant)
        return self._told.remaining(frontier, known, now)

    def on_continued(self, frontier: Frontier, turn: Turn, now: float) -> None:
        gap_s = turn.gap_s
        if gap_s is None or frontier.tools is None or frontier.learned:
            return
        frontier.learned = True
        job_id, tenant = frontier.job.job_id, frontier.job.tenant
        if self._published is not None:
            self._published.returned(frontier, gap_s)
        with_result = _brings_result(turn, frontier)
        if with_result and frontier.told is not None:
            self._told.observe(frontier, gap_s, self._tools.curve(frontier.tools, job_id, tenant))
        self._tools.observe(
            frontier.tools, gap_s, now, censored=not with_result, job_id=job_id, tenant=tenant
        )
        growth_tokens = turn.request.num_prompt_tokens - len(frontier.chain) * self._block_size
        self._tools.observe_next_turn(frontier.tools, growth_tokens, tenant)

    def on_hint(self, frontier: Frontier, signal: ToolSignal, now: float) -> None:
        if frontier.told is not None and frontier.told.state is ToolState.CANCELLED:
            self._cut_off(frontier, now)

    def on_dropped(self, frontier: Frontier, end: BranchEnd, now: float) -> None:
        """Of a job that is forgotten while its tools run it is known that they took at least so long. If
        nothing ran, it was done."""
        if end is BranchEnd.JOB_FORGOTTEN and frontier.tools:
            self._cut_off(frontier, now)
        elif end is not BranchEnd.CROWDED_OUT:
            self._was_last(frontier)

    def _cut_off(self, frontier: Frontier, now: float) -> None:
        """Its tools ran for so long and then were heard of no more."""
        if frontier.tools and not frontier.learned:
            frontier.learned = True
            job, waited_s = frontier.job, now - frontier.ended_s
            self._tools.observe(
                frontier.tools, waited_s, now, censored=True, job_id=job.job_id, tenant=job.tenant
            )

    def _was_last(self, frontier: Frontier) -> None:
        """No turn came after it, or will. A question that was only asked once tells nothing of jobs."""
        if frontier.tools is not None and frontier.job.is_established:
            self._tools.observe_last_turn(frontier.tools, frontier.job.tenant)


def _brings_result(turn: Turn, frontier: Frontier) -> bool:
    """Whether the prompt holds a tool result more than the one before: a conversation may go on without, its
    call given up. Where no results are counted, or none of this agent's ever is one, it is taken to."""
    job = turn.request.job
    now = job.num_results if job is not None else None
    return not frontier.tools or not now or frontier.num_results is None or now > frontier.num_results
