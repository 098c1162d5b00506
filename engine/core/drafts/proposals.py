"""Gets drafts for each running request after a step, as many as are worth their cost."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from engine.core.drafts.drafter import Drafter
from engine.core.drafts.forced import behind_forced
from engine.core.drafts.lengths import AcceptanceRecords, StepCosts, best_lengths
from engine.core.drafts.proposal import NOTHING, Proposal
from engine.core.drafts.worker_drafts import WorkerDrafts
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request


class DraftProposals:
    """Calls a drafter, and limits how many of its drafts each request gets."""

    def __init__(
        self, drafter: Drafter, max_tokens: int, costs: StepCosts | None = None, max_rows: int = 1 << 30
    ) -> None:
        """Allow ``max_tokens`` drafts per request, and ``max_rows`` rows in a step.

        ``costs``: those of steps by their rows, if they were measured.
        """
        self._drafter = drafter
        self._max_tokens = max_tokens
        self._costs = costs
        self._max_rows = max_rows
        self._records = AcceptanceRecords()

    def observe(self, plan: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Record how many drafts a step accepted, and take those that the worker made for the next step."""
        if isinstance(self._drafter, WorkerDrafts):
            self._drafter.take(result.drafts)
        if not plan.scheduled_spec_decode_tokens:
            return
        sampled = dict(zip(result.req_ids, result.sampled_token_ids, strict=True))
        for request_id, drafts in plan.scheduled_spec_decode_tokens.items():
            self.verified(request_id, len(drafts), max(0, len(sampled.get(request_id, ())) - 1))

    def verified(self, request_id: str, num_drafts: int, num_accepted: int) -> None:
        """Record how many of one request's drafts were accepted."""
        self._records.observe(request_id, num_drafts, num_accepted)

    def propose(self, running: Collection[Request]) -> Mapping[str, list[int]]:
        """Drafts for the next step, by request id; requests without drafts have no entry."""
        num_rows = len(running)
        if self._costs is not None and not self._costs.may_pay(num_rows, num_rows * self._max_tokens):
            return {}
        # The others compute their prompt, or recompute their tokens after a preemption.
        ready = [
            request
            for request in running
            if request.num_output_tokens and request.num_computed_tokens >= request.num_tokens - 1
        ]
        proposals = [self._ask(request) for request in ready]
        chances = [
            self._records.corrected(request.request_id, proposal.chances)
            for request, proposal in zip(ready, proposals, strict=True)
        ]
        lengths = best_lengths(chances, num_rows, self._costs, self._max_rows)
        drafts: dict[str, list[int]] = {}
        for request, proposal, length in zip(ready, proposals, lengths, strict=True):
            self._records.proposed(request.request_id, proposal.chances[:length])
            if length:
                drafts[request.request_id] = proposal.token_ids[:length]
        return drafts

    def _ask(self, request: Request) -> Proposal:
        """Forced tokens and the drafter's proposal, cut to what the request's grammar allows."""
        proposal = self._drafter.propose(request, self._max_tokens)
        if request.grammar is None:
            return proposal
        try:
            proposal = behind_forced(request.grammar.forced(self._max_tokens), proposal)
            allowed = request.grammar.count_allowed(proposal.token_ids) if proposal.token_ids else 0
        except Exception:  # the mask of its next token will fail, too, and end the request
            return NOTHING
        return Proposal(proposal.token_ids[:allowed], proposal.chances[:allowed])

    def ended(self, request: Request) -> None:
        """Drop the state of a request that has ended."""
        self._drafter.ended(request)
        self._records.ended(request.request_id)
