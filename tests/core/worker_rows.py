"""The rows of a worker that knows only what plans contain and what it sampled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.outputs import SchedulerOutput
from tests.core.kv_memory import Work


class WorkerRows:
    """The number of tokens, and of tokens with KV, in each request's row; fails on a plan that continues from
    any other position."""

    def __init__(self, token_at: Callable[[str, int], int], num_stages: int = 1) -> None:
        """``token_at``: the token sampled for a request at a position."""
        self._token_at = token_at
        self._num_stages = num_stages
        self._num_told: dict[str, int] = {}
        """Tokens that a pipeline's first stage, which samples none, has received for each request."""
        self._num_known: dict[str, int] = {}
        """Tokens of each row, including those that the steps taken so far will sample."""
        self._num_valid: dict[str, int] = {}
        """Tokens of each row that then have valid KV; KV of rejected drafts follows them."""
        self.num_drafts = self.num_accepted = 0

    def sampled(self, work: Work) -> dict[str, range]:
        """Takes the next plan; returns the positions at which each request gets tokens."""
        plan, known = work.plan, self._num_known
        for request_id in plan.finished_req_ids:
            known.pop(request_id, None)
        known.update({new.req_id: len(new.prompt_token_ids) for new in plan.scheduled_new_reqs})
        for request_id, token_ids in plan.scheduled_cached_reqs.resumed_token_ids.items():
            assert len(token_ids) == known[request_id], "an output was lost"
        self._tell(plan)
        starts = {span.request.request_id: span.start for span in work.spans}
        self._check_starts(plan, starts)
        sampled = {}
        for request_id, start in starts.items():
            drafts = plan.scheduled_spec_decode_tokens.get(request_id, ())
            end = start + plan.num_scheduled_tokens[request_id] - len(drafts)
            assert end <= known[request_id], "more was scheduled than there is"
            assert self._num_stages == 1 or end <= self._num_told[request_id], "the first stage lacks tokens"
            self._num_valid[request_id] = end
            if end == known[request_id]:
                sampled[request_id] = self._verify(request_id, end, drafts)
            else:
                assert not drafts, "drafts before the last known token"
        return sampled

    def _tell(self, plan: SchedulerOutput) -> None:
        """Passes the plan's tokens to the first stage."""
        cached, told = plan.scheduled_cached_reqs, self._num_told
        told.update({new.req_id: len(new.prompt_token_ids) for new in plan.scheduled_new_reqs})
        told.update({req_id: len(tokens) for req_id, tokens in cached.resumed_token_ids.items()})
        assert len(cached.new_token_ids) == (len(cached.req_ids) if self._num_stages > 1 else 0)
        for req_id, start, tokens in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=False
        ):
            assert list(tokens) == [self._token_at(req_id, start + i) for i in range(len(tokens))]
            told[req_id] = max(told[req_id], start + len(tokens))

    def _check_starts(self, plan: SchedulerOutput, starts: dict[str, int]) -> None:
        cached = plan.scheduled_cached_reqs
        for request_id in (starts.keys() & cached.req_ids) - cached.resumed_req_ids:
            assert starts[request_id] == self._num_valid[request_id], "computed twice, or never"

    def _verify(self, request_id: str, end: int, drafts: Sequence[int]) -> range:
        """Accepts drafts while they equal the sampled tokens from ``end`` on, plus one token."""
        are_right = [draft == self._token_at(request_id, i) for i, draft in enumerate(drafts, end)]
        num_accepted = [*are_right, False].index(False)
        self.num_drafts += len(drafts)
        self.num_accepted += num_accepted
        self._num_valid[request_id] += num_accepted
        self._num_known[request_id] += num_accepted + 1
        return range(end, end + num_accepted + 1)
