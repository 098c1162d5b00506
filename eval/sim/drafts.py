"""Draft tokens in a simulation: how many a step verifies and accepts, as on recorded texts.

Each step draws a pair (drafts, accepted drafts) with the frequency that ``python -m benchmarks.drafts``
counted. ASSUMED: the draws of steps are independent.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from engine.core.request import Request
from eval.errors import UNREADABLE, WorkloadError

Count = Annotated[int, msgspec.Meta(ge=0)]
ALL_TURNS = "all"


class _Counted(msgspec.Struct):
    """One drafter's counts for one kind of turns; the file has more fields."""

    drafter: str
    turns: str
    steps_by_drafts: list[tuple[Count, Count, Count]]


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Steps by numbers of drafts and of accepted drafts."""

    drafter: str
    pairs: Sequence[tuple[int, int]]
    """Drafts and accepted drafts of a step."""
    steps: Sequence[int]
    """Count of each pair."""

    @property
    def tokens_per_step(self) -> float:
        accepted = sum(steps * pair[1] for pair, steps in zip(self.pairs, self.steps, strict=True))
        return 1 + accepted / sum(self.steps)


def read_draft_counts(path: Path) -> DraftCounts:
    """The first drafter of ``benchmarks.drafts``' file, over all turns; WorkloadError if it has none."""
    try:
        counted = msgspec.json.decode(path.read_bytes(), type=list[_Counted])
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}.") from error
    except UNREADABLE as error:
        raise WorkloadError(f"{path} has no counts of drafts: {error}.") from error
    for one in counted:
        pairs = [(drafts, accepted) for drafts, accepted, _ in one.steps_by_drafts]
        counts = [num_steps for _, _, num_steps in one.steps_by_drafts]
        if one.turns == ALL_TURNS and any(counts) and all(accepted <= drafts for drafts, accepted in pairs):
            return DraftCounts(one.drafter, pairs, counts)
    raise WorkloadError(f"{path} has no counts of drafts over all turns.")


class SimDrafts:
    """Draws for one engine. The same seed gives the same draws."""

    def __init__(self, counts: DraftCounts, seed: int = 0) -> None:
        self._counts = counts
        self._random = random.Random(seed)
        self._accepted: dict[str, int] = {}
        """Accepted drafts by request, in the step that is planned."""

    def propose(self, running: Iterable[Request]) -> Mapping[str, list[int]]:
        """Returns drafts of the next step; their token ids do not matter."""
        self._accepted.clear()
        proposals: dict[str, list[int]] = {}
        for request in running:
            if request.num_output_tokens:
                drafts, accepted = self._random.choices(self._counts.pairs, self._counts.steps)[0]
                if drafts:
                    proposals[request.request_id] = [0] * drafts
                    self._accepted[request.request_id] = accepted
        return proposals

    def num_accepted(self, request_id: str, num_drafts: int) -> int:
        """Returns how many of the scheduled drafts are accepted."""
        return min(self._accepted.get(request_id, 0), num_drafts)
