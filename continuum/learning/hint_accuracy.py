"""When a turn is expected back after its client has spoken, and how right such clients were."""

from __future__ import annotations

from continuum.jobs.job import BranchTip
from estimator.expectation import ExpectationMemory, Source
from estimator.survival import SurvivalCurve

RETURN_S = 0.5
"""The next turn is taken to come so soon after its tools have finished, until it is learned how soon."""
FINISHED = "finished"
"""In the place of a tool's name, for how long a client takes from there to its next turn."""


class HintAccuracy:
    """What clients say against what then comes, by client and tool."""

    def __init__(self) -> None:
        self._expectations = ExpectationMemory()

    def remaining(self, tip: BranchTip, known: SurvivalCurve, now: float) -> SurvivalCurve:
        """Time until the turn returns, from now. ``known``: from the turn's end, by experience alone."""
        told, elapsed_s = tip.told, now - tip.ended_s
        if told is not None and told.finished_s is not None:
            since_s = elapsed_s - told.finished_s
            return self._expectations.remaining(_source(tip, FINISHED), RETURN_S, None).after(since_s)
        if told is None or told.expectation is None:
            return known.after(elapsed_s)
        said = told.expectation
        curve = self._expectations.remaining(_source(tip), said.remaining_s, known.after(said.said_s))
        return curve.after(elapsed_s - said.said_s)

    def observe(self, tip: BranchTip, gap_s: float, known: SurvivalCurve) -> None:
        """The turn is back: was it when its client had said?"""
        told = tip.told
        assert told is not None, "nobody has said anything"
        if told.finished_s is not None:
            self._expectations.observe(_source(tip, FINISHED), RETURN_S, gap_s - told.finished_s, None)
        said = told.expectation
        if said is not None and gap_s > said.said_s:
            after = known.after(said.said_s)
            known_s = after.median_remaining(0.0) if after.num_observations else None
            self._expectations.observe(_source(tip), said.remaining_s, gap_s - said.said_s, known_s)


def _source(tip: BranchTip, tool: str | None = None) -> Source:
    """Who said it, and of what: of parallel calls the first stands for all."""
    if tool is None:
        tool = str(tip.tools[0]) if tip.tools else ""
    return (tip.job.tenant or "", tool)
