"""What one call of ``schedule`` has decided so far, and the plan that is made of it for the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engine.core.kv_cache.block_pool import KVCacheBlock
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.outputs import CachedRequestData, NewRequestData, SchedulerOutput
from engine.core.parts import ChunkLimit
from engine.core.request import Request


@dataclass(slots=True)
class Step:
    """A step that is being planned: tokens are handed out of its budget, request by request."""

    now: float
    budget: int
    """Tokens that may still be scheduled."""
    new: list[Request] = field(default_factory=list)
    """Requests that run for the first time."""
    resumed: list[Request] = field(default_factory=list)
    """Requests that run again after they were preempted."""
    running: list[Request] = field(default_factory=list)
    """Requests that were in the batch before and have tokens in this step."""
    preempted: list[Request] = field(default_factory=list)
    """Requests that lost their blocks in this step."""
    awaits_blocks: bool = False
    """Whether a running request waits for blocks that steps under way still use."""
    num_scheduled: dict[str, int] = field(default_factory=dict)
    """Tokens of each request, by request id."""
    new_blocks: dict[str, list[KVCacheBlock]] = field(default_factory=dict)
    """Blocks that were added to each request, by request id."""
    drafts: dict[str, list[int]] = field(default_factory=dict)
    """Draft tokens among those that are scheduled, by request id."""
    limits: tuple[ChunkLimit, ...] = ()
    """Limits of parts on what the step computes, in the order in which they cut."""
    num_set_aside: int = 0
    """Waiting requests that were passed over, as a limit let only others start."""
    on_prefix_cache_hit: Callable[[Request], None] | None = None
    """Called with each request just before it joins the batch, once its cached tokens are known."""

    def chunk(
        self, request: Request, start: int, num_tokens: int, hit: Sequence[KVCacheBlock] | None = None
    ) -> int:
        """How many of ``num_tokens`` tokens from ``start`` on the step may compute of a request."""
        for limit in self.limits:
            num_tokens = limit.cut(request, start, num_tokens, hit)
            if num_tokens <= 0:
                return 0
        return num_tokens

    def cut_drafts(self, request: Request, num_drafts: int) -> int:
        """How many of its drafts the step may verify."""
        for limit in self.limits:
            num_drafts = limit.cut_drafts(request, num_drafts)
        return num_drafts

    def defers(self, request: Request) -> bool:
        """Whether no request of this one's tenant may start in this step."""
        return any(limit.defers(request) for limit in self.limits)

    def sets_aside(self, request: Request) -> bool:
        """Whether this waiting request may not start in this step, though later ones may."""
        return any(limit.sets_aside(request) for limit in self.limits)

    def admitted(self, request: Request) -> None:
        """Note that a waiting request was admitted."""
        for limit in self.limits:
            limit.admitted(request)

    def commit(self, request: Request, num_tokens: int, blocks: list[KVCacheBlock]) -> None:
        """Give the request tokens of the budget, and the blocks that were allocated for them."""
        self.num_scheduled[request.request_id] = num_tokens
        self.new_blocks[request.request_id] = blocks
        self.budget -= num_tokens
        if self.limits:
            for limit in self.limits:
                limit.commit(request, request.num_computed_tokens, num_tokens)

    def add_drafts(self, request: Request, drafts: list[int], blocks: list[KVCacheBlock]) -> None:
        """Let the step compute drafts after the tokens of a request, in these further blocks."""
        request_id = request.request_id
        for limit in self.limits:
            limit.commit_drafts(request, len(drafts))
        self.drafts[request_id] = drafts
        self.num_scheduled[request_id] += len(drafts)
        self.new_blocks[request_id] = [*self.new_blocks[request_id], *blocks]

    def withdraw(self, request: Request) -> bool:
        """Take back what a running request was given in this step; False if it was given nothing."""
        num_tokens = self.num_scheduled.pop(request.request_id, None)
        if num_tokens is None:
            return False
        self.running.remove(request)
        del self.new_blocks[request.request_id]
        self.budget += num_tokens
        return True

    def to_output(
        self, kv: KVCacheManager, finished_req_ids: set[str], *, tells_tokens: bool = False
    ) -> SchedulerOutput:
        """The plan, which also lists the requests that have ended since the last one.

        ``tells_tokens``: include sampled tokens, for a worker that did not sample them itself.
        """
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData(
                    req_id=request.request_id,
                    prompt_token_ids=request.all_token_ids[: request.num_prompt_tokens],
                    sampling_params=request.sampling_params,
                    block_ids=kv.block_ids(request.request_id),
                    num_computed_tokens=request.num_computed_tokens,
                    adapter=request.adapter,
                    pooling=request.pooling,
                    media=request.media,
                )
                for request in self.new
            ],
            scheduled_cached_reqs=self._cached_requests(kv, tells_tokens),
            num_scheduled_tokens=self.num_scheduled,
            total_num_scheduled_tokens=sum(self.num_scheduled.values()),
            finished_req_ids=finished_req_ids,
            preempted_req_ids={request.request_id for request in self.preempted},
            scheduled_spec_decode_tokens=self.drafts,
        )

    def _cached_requests(self, kv: KVCacheManager, tells_tokens: bool) -> CachedRequestData:
        """Requests that the worker knows; preempted ones are sent to it in full again."""
        new_blocks = self.new_blocks
        cached = CachedRequestData()
        for request in self.running:
            cached.req_ids.append(request.request_id)
            blocks = new_blocks[request.request_id]
            cached.new_block_ids.append([block.block_id for block in blocks] if blocks else [])
            cached.num_computed_tokens.append(request.num_computed_tokens)
        for request in self.resumed:
            cached.req_ids.append(request.request_id)
            cached.resumed_req_ids.add(request.request_id)
            cached.resumed_token_ids[request.request_id] = list(request.all_token_ids)
            cached.new_block_ids.append(kv.block_ids(request.request_id))
            cached.num_computed_tokens.append(request.num_computed_tokens)
        if tells_tokens:
            cached.new_token_ids = [self._output_tokens(request) for request in self.running]
            cached.new_token_ids += [()] * len(self.resumed)
        return cached

    def _output_tokens(self, request: Request) -> Sequence[int]:
        """The request's tokens that the step computes; none if it begins within the known prompt."""
        start = request.num_computed_tokens
        if start < request.num_prompt_tokens:
            return ()
        return request.all_token_ids[start : start + self.num_scheduled[request.request_id]]
