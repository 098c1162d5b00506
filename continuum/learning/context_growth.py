"""Predicts the contexts of jobs: how much each turn adds, how many turns follow, and how fast they follow."""

from __future__ import annotations

from continuum.jobs.branches import BranchEnd, BranchListener
from continuum.jobs.job import BranchTip, Job, Turn
from continuum.learning.tool_stats import ToolStats
from engine.core.policy import PolicyContext
from estimator.growth import Growth, what_follows
from estimator.kinds import Kind

MAX_AHEAD = 32
"""Turns that are looked ahead."""
SHARES = (0.0, 0.5, 1.0)
"""When the context is predicted, as shares of the horizon."""

Blocks = tuple[int, ...]
"""Expected blocks at each of ``SHARES``."""


class ContextGrowth(BranchListener):
    """Predicts the blocks of a job from now until a horizon."""

    def __init__(self, tools: ToolStats, context: PolicyContext, horizon_s: float) -> None:
        """``tools`` keeps what is learned across restarts."""
        self._tools = tools
        self._horizon_s = horizon_s
        self._block_size = context.block_size
        self._blocks_per_token = context.blocks_per_block / context.block_size

    @property
    def _learned(self) -> Growth:
        return self._tools.growth

    def blocks(self, job: Job, num_turns: int, num_blocks: int) -> Blocks:
        """Expected blocks of a job that has had this many turns and has this many blocks: at each time what
        it has and has gained, times the probability that it still lasts."""
        learned = self._learned
        if not learned.period_s:
            return (num_blocks,) * len(SHARES)
        counts = learned.counts_of(Kind(job.tenant, job.kind))
        size = float(num_blocks)
        lasts = 1.0
        sizes = [size]  # each further one: the job has had one turn more
        turns_ahead = self._turns_ahead
        for number in range(num_turns, num_turns + int(turns_ahead) + 1):
            following = what_follows(counts, number)
            if following is None:
                break
            size += self._blocks_per_token * following.num_tokens
            lasts *= following.probability
            sizes.append(lasts * size)
        return tuple(round(_between(sizes, share * turns_ahead)) for share in SHARES)

    @property
    def _turns_ahead(self) -> float:
        """Turns that a job has within the horizon, at most ``MAX_AHEAD``."""
        return min(self._horizon_s / self._learned.period_s, MAX_AHEAD)

    def times_s(self) -> tuple[float, ...]:
        """How far ahead each of the expected numbers of blocks is."""
        period_s = self._learned.period_s
        horizon_s = self._turns_ahead * period_s if period_s else self._horizon_s
        return tuple(share * horizon_s for share in SHARES)

    # ---- what is learned ----

    def turn_ended(self, turn: Turn, now: float) -> None:
        if turn.tip is not None:
            self._learned.turn_took(now - turn.tip.ended_s)

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        """Counts a turn without a tool call as its job's last, until a turn follows."""
        if tip.is_answer and not tip.looks_last:
            tip.looks_last = True
            self._count_last(tip, 1)

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        if tip.looks_last:
            tip.looks_last = False
            self._count_last(tip, -1)
        num_tokens = max(0, turn.request.num_prompt_tokens - len(tip.chain) * self._block_size)
        self._learned.followed(Kind(tip.job.tenant, tip.job.kind), tip.turn_number, num_tokens)

    def on_dropped(self, tip: BranchTip, end: BranchEnd, now: float) -> None:
        if end is not BranchEnd.CROWDED_OUT and tip.is_alone and not tip.looks_last:
            self._count_last(tip, 1)

    def _count_last(self, tip: BranchTip, count: int) -> None:
        self._learned.last(Kind(tip.job.tenant, tip.job.kind), tip.turn_number, count)


def _between(values: list[float], place: float) -> float:
    """The value at a place between two of a list; the last one beyond its end."""
    index = int(place)
    if index + 1 >= len(values):
        return values[-1]
    return values[index] + (place - index) * (values[index + 1] - values[index])
