"""The base of policies that use the mean gap after a tool, by the tool names of the published rules."""

from __future__ import annotations

from collections.abc import Sequence

from continuum.jobs.job import BranchTip, Turn
from continuum.learning.tool_gaps import MeanGaps, tool_name
from engine.core.policy import PolicyContext
from engine.records.messages import ToolCall
from estimator.tool_key import ToolKey
from eval.baselines.holding import RetainingPolicy


class ToolMeanPolicy(RetainingPolicy):
    """Keeps the mean gap after each tool. A turn with no call, or with several, has no tool."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._gaps = MeanGaps()

    def mean_gap_s(self, tip: BranchTip) -> float | None:
        """Returns the mean gap after the tool; None without a tool and for an unseen one."""
        return self._gaps.mean_s(str(tip.tools[0])) if tip.tools else None

    def tools_known(self, tip: BranchTip, calls: Sequence[ToolCall], now: float) -> None:
        name = tool_name(calls)
        tip.tools = [] if name is None else [ToolKey((name,))]
        super().tools_known(tip, calls, now)

    def gap_over(self, turn: Turn, tip: BranchTip, gap_s: float, now: float) -> None:
        super().gap_over(turn, tip, gap_s, now)
        if tip.tools:
            self._gaps.observe(str(tip.tools[0]), gap_s)
