"""A drafter of the core that passes on the drafts that the worker made after a step."""

from __future__ import annotations

from collections.abc import Mapping

from engine.core.drafts.proposal import NOTHING, Proposal
from engine.core.request import Request


class WorkerDrafts:
    """Proposes the drafts that came with the last output."""

    def __init__(self) -> None:
        self._drafts: Mapping[str, Proposal] = {}

    def take(self, drafts: Mapping[str, Proposal]) -> None:
        """Take the drafts of a step's output, by request id; they follow what the step sampled."""
        self._drafts = drafts

    def propose(self, request: Request, max_tokens: int) -> Proposal:
        """See Drafter. A request that was not in the last step has none."""
        drafts = self._drafts.get(request.request_id, NOTHING)
        return Proposal(drafts.token_ids[:max_tokens], drafts.chances[:max_tokens])

    def ended(self, request: Request) -> None:
        """Do nothing: no state is kept."""
