"""Predicts when a turn returns after its client gave a hint, and learns how accurate such hints were."""

from __future__ import annotations

from continuum.jobs.job import BranchTip
from estimator.expectation import ExpectationMemory, Source
from estimator.survival import SurvivalCurve

RETURN_S = 0.5
"""Seconds from the end of the tools to the next turn, until that is learned."""
FINISHED = "finished"
"""Takes the place of a tool's name, for the time from the end of the calls to the client's next turn."""


class HintAccuracy:
    """Compares clients' hints with the actual durations, by client and tool."""

    def __init__(self) -> None:
        self._expectations = ExpectationMemory()

    def remaining(self, tip: BranchTip, known: SurvivalCurve, now: float) -> SurvivalCurve:
        """Time until the turn returns, from now. ``known`` is the same time from the turn's end, by past gaps
        alone."""
        hint = tip.hint
        elapsed_s = now - tip.ended_s
        if hint is not None and hint.finished_s is not None:
            since_s = elapsed_s - hint.finished_s
            return self._expectations.remaining(_source(tip, FINISHED), RETURN_S, None).after(since_s)
        if hint is None or hint.expectation is None:
            return known.after(elapsed_s)
        stated = hint.expectation
        curve = self._expectations.remaining(_source(tip), stated.remaining_s, known.after(stated.said_s))
        return curve.after(elapsed_s - stated.said_s)

    def observe(self, tip: BranchTip, gap_s: float, known: SurvivalCurve) -> None:
        """Compares the client's hint with the actual gap of a turn that has returned."""
        hint = tip.hint
        assert hint is not None, "no client gave a hint"
        if hint.finished_s is not None:
            self._expectations.observe(_source(tip, FINISHED), RETURN_S, gap_s - hint.finished_s, None)
        stated = hint.expectation
        if stated is not None and gap_s > stated.said_s:
            after = known.after(stated.said_s)
            known_s = after.median_remaining(0.0) if after.num_observations else None
            self._expectations.observe(_source(tip), stated.remaining_s, gap_s - stated.said_s, known_s)


def _source(tip: BranchTip, tool: str | None = None) -> Source:
    """The client, and the tool that the hint is about: of parallel calls, the first represents all."""
    if tool is None:
        tool = str(tip.tools[0]) if tip.tools else ""
    return (tip.job.tenant or "", tool)
