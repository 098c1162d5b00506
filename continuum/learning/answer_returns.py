"""Learns how often a turn soon follows one that called no tool."""

from __future__ import annotations

from continuum.jobs.branches import BranchListener
from continuum.jobs.job import BranchTip, Turn

PRIOR = 0.5
"""Added to the answers that were followed, and to the others: Jeffreys' prior of a share."""
MIN_ANSWERS = 8
"""The share is unknown before this many answers."""
MAX_ANSWERS = 512.0
"""When this many answers were seen, the counts are halved, so that old answers count less."""


class AnswerReturns(BranchListener):
    """Counts turns without a tool call, and those that another turn followed soon."""

    def __init__(self, soon_s: float) -> None:
        self._soon_s = soon_s
        self._num_answers = self._num_followed = 0.0

    @property
    def share(self) -> float | None:
        """Share of these turns that another turn followed within ``soon_s`` seconds; None if too few were
        seen."""
        if self._num_answers < MIN_ANSWERS:
            return None
        return (self._num_followed + PRIOR) / (self._num_answers + 2 * PRIOR)

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        if not tip.is_at_rest:
            return
        self._num_answers += 1
        if self._num_answers > MAX_ANSWERS:
            self._num_answers /= 2
            self._num_followed /= 2

    def on_continued(self, tip: BranchTip, turn: Turn, now: float) -> None:
        if tip.is_at_rest and now - tip.ended_s <= self._soon_s:
            self._num_followed = min(self._num_answers, self._num_followed + 1)
