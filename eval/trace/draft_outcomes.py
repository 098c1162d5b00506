"""Pairs the drafts of a step's decision with the counts in its result. Knows nothing else of a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tracing.events import StepDecision, StepOutput


class DraftOutcome(NamedTuple):
    """One request's drafts in one step, and how many were accepted."""

    req_id: str
    num_drafts: int
    num_accepted: int
    """Tokens that the step generated beyond one."""


class DraftOutcomes:
    """Takes the decisions and results of a trace in their order."""

    def __init__(self) -> None:
        self._under_way: dict[int, Mapping[str, int]] = {}

    def decided(self, decision: StepDecision) -> None:
        """Stores the step's drafts, and keeps those of the step before it, which may have no result yet."""
        if decision.drafts or self._under_way:
            before = self._under_way.get(decision.step - 1, {})
            self._under_way = {decision.step - 1: before, decision.step: decision.drafts}

    def came(self, output: StepOutput) -> Iterator[DraftOutcome]:
        """Yields the outcome of each of the step's drafts."""
        drafts = self._under_way.pop(output.step, None)
        if not drafts:
            return
        for req_id, num_drafts in drafts.items():
            if output.sampled is None or req_id in output.sampled:
                num_taken = output.num_tokens.get(req_id, 1)
                yield DraftOutcome(req_id, num_drafts, max(0, num_taken - 1))
