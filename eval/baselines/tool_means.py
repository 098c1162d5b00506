"""What policies share that go by the mean gap after a tool, named as the published rules name it."""

from __future__ import annotations

from collections.abc import Sequence

from continuum.jobs import Frontier, Turn
from continuum.tool_gaps import MeanGaps, tool_name
from engine.messages import ToolCall
from engine.policy import PolicyContext
from estimator.tool_key import ToolKey
from eval.baselines.holding import HoldingPolicy


class ToolMeanPolicy(HoldingPolicy):
    """A turn with no call, or with several, has no tool."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._gaps = MeanGaps()

    def mean_gap_s(self, frontier: Frontier) -> float | None:
        """None without a tool, and for one never seen."""
        return self._gaps.mean_s(str(frontier.tools[0])) if frontier.tools else None

    def tools_known(self, frontier: Frontier, calls: Sequence[ToolCall], now: float) -> None:
        name = tool_name(calls)
        frontier.tools = [] if name is None else [ToolKey((name,))]
        super().tools_known(frontier, calls, now)

    def gap_over(self, turn: Turn, frontier: Frontier, gap_s: float, now: float) -> None:
        super().gap_over(turn, frontier, gap_s, now)
        if frontier.tools:
            self._gaps.observe(str(frontier.tools[0]), gap_s)
