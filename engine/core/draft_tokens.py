"""Bookkeeping of draft tokens, from proposal to verification, as in V1.

Drafts are scheduled after the last known token and computed with it. The token sampled after a draft counts
only if that draft equals the token sampled in its place. Rejected drafts no longer count as computed, and the
next step overwrites their KV.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.outputs import SchedulerOutput
from engine.core.parts import Left, SchedulerPart
from engine.core.request import Request, RequestStatus
from engine.core.step import Step
from engine.records.reported_stats import SchedulerStats, SpecDecodingStats


class DraftTokens(SchedulerPart):
    """Chooses the drafts that the next step verifies, and settles those of the last step."""

    def __init__(self, kv: KVCacheManager, max_model_len: int) -> None:
        self._kv = kv
        self._max_model_len = max_model_len
        self._proposed: dict[str, Request] = {}
        """Running requests that have drafts for the next step."""
        self._stats = SpecDecodingStats()

    def propose(self, proposals: Mapping[str, Sequence[int]], requests: Mapping[str, Request]) -> None:
        """Keep proposals for the next step, of running requests whose tokens are all known.

        A request gets one draft fewer than the tokens it may still output, as one more is sampled.
        """
        for request_id, token_ids in proposals.items():
            request = requests.get(request_id)
            if request is not None and self._may_have_drafts(request):
                request.spec_token_ids = list(token_ids[: self._most(request)])
                self._proposed[request_id] = request

    @staticmethod
    def _may_have_drafts(request: Request) -> bool:
        is_known = request.num_computed_tokens == request.num_tokens - 1
        return request.status is RequestStatus.RUNNING and is_known

    def _most(self, request: Request) -> int:
        most_output = min(request.max_tokens, self._max_model_len - request.num_prompt_tokens)
        return max(0, most_output - request.num_output_tokens - 1)

    def hold(self, step: Step, num_running: int) -> int:
        """Reserve tokens of the step's budget for drafts, but leave one for each running request.

        Returns the number reserved.
        """
        if not self._proposed:
            return 0
        num_drafts = sum(len(request.spec_token_ids) for request in self._proposed.values())
        num_held = max(0, min(num_drafts, step.budget - num_running))
        step.budget -= num_held
        return num_held

    def place(self, step: Step, num_held: int, most_tokens: int) -> None:
        """Schedule up to ``num_held`` drafts after the requests' tokens, when all else is decided.

        Drafts take only blocks that are left, so no request is preempted, loses a pin or waits for them. A
        step has at most ``most_tokens`` of a request. Drafts of a request not in the step are kept.
        """
        for request_id in [i for i in self._proposed if i in step.num_scheduled]:
            request = self._proposed.pop(request_id)
            drafts = request.spec_token_ids
            request.spec_token_ids = []
            num_known = step.num_scheduled[request_id]
            wanted = min(len(drafts), num_held, most_tokens - num_known)
            num_drafts = self._num_that_fit(request, num_known, step.cut_drafts(request, wanted))
            if num_drafts > 0:
                num_held -= num_drafts
                blocks = self._kv.allocate_slots(request, num_known + num_drafts)
                assert blocks is not None, "it was found to fit"
                step.add_drafts(request, drafts[:num_drafts], blocks)

    def _num_that_fit(self, request: Request, num_known: int, num_drafts: int) -> int:
        """How many of these drafts have blocks: free ones, or the request's last block; 0 or less: none."""
        end = request.num_computed_tokens + num_known
        if self._kv.states is not None and self._kv.enable_caching:
            # A step that ends with a block keeps the state there. How many drafts are accepted is not known
            # yet, so drafts end before the block does.
            num_drafts = min(num_drafts, -end % self._kv.block_size - 1)
        if self._kv.fits(request, end + num_drafts):
            return num_drafts
        return min(num_drafts, self._kv.num_slots_of(request.request_id) - end)

    def fill(self, plan: SchedulerOutput, requests: Mapping[str, Request], now: float) -> None:
        """Note the plan's drafts, which are neither accepted nor rejected until its output returns."""
        for request_id, drafts in plan.scheduled_spec_decode_tokens.items():
            requests[request_id].num_drafts_under_way = len(drafts)

    def settle(self, request: Request, num_sampled: int, num_taken: int) -> None:
        """Uncount the drafts that were rejected, and cache the blocks that the accepted ones filled.

        All ``num_sampled`` tokens but one are accepted drafts. ``num_taken`` of the sampled tokens were
        appended: fewer if one of them ended the request. Then the last one does not count as computed, as
        without drafts. Statistics count the tokens taken, less the one that the request would have got
        without drafts.
        """
        num_drafts = request.num_drafts_under_way
        request.num_drafts_under_way = 0
        num_accepted = num_sampled - 1
        assert num_accepted <= num_drafts, "more tokens than were asked for"
        num_computed = request.num_computed_tokens - num_drafts + num_accepted
        request.num_computed_tokens = min(num_computed, request.num_tokens - 1)
        self._kv.cache_computed(request)
        num_kept = max(0, num_taken - 1)
        request.num_draft_tokens += num_drafts
        request.num_accepted_tokens += num_kept
        self._stats.observe(num_drafts, num_kept)

    def left(self, request: Request, how: Left, now: float) -> None:
        """Forget the drafts of a request that leaves the batch; none of them counts as computed."""
        if self._proposed.pop(request.request_id, None) is not None:
            request.spec_token_ids = []
        if request.num_drafts_under_way:
            request.num_drafts_under_way = 0
            request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)

    def fill_stats(self, stats: SchedulerStats, running: Sequence[Request]) -> None:
        if self._stats.num_drafts:
            stats.spec_decoding = self._stats
            self._stats = SpecDecodingStats()
