"""Tracks steps whose output is yet to come when the next one is planned: with async scheduling, or to keep
all stages of a pipeline busy.

For each step it knows the requests, and the blocks that stay allocated until the step returns.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from engine.config.engine_config import SchedulerConfig
from engine.core.kv_cache.kv_cache_manager import KVCacheManager
from engine.core.outputs import SchedulerOutput
from engine.core.request import Request

MAX_STEPS_OF_ONE_STAGE = 2
"""One step runs, and the next one waits for it."""


def max_steps(num_stages: int) -> int:
    """The most steps under way: one in each stage, or two for a single stage."""
    return max(MAX_STEPS_OF_ONE_STAGE, num_stages)


def max_tokens_under_way(config: SchedulerConfig, num_stages: int) -> int:
    """The most tokens of a request that are computed before the output of the first of them is taken."""
    threshold = config.long_prefill_token_threshold
    num_tokens = min(config.max_num_batched_tokens, threshold or config.max_num_batched_tokens)
    return num_tokens * (max_steps(num_stages) if config.async_scheduling else 1)


@dataclass(slots=True, eq=False)
class _Step:
    """A plan under way. It holds requests, not ids: an id may be used again before the step returns."""

    step_id: int
    plan: SchedulerOutput
    requests: dict[str, Request]
    """The requests whose tokens it computes, without those that have ended."""
    sampled: dict[str, Request] = field(default_factory=dict)
    """Those of its requests for which it samples a token."""

    def start(self, now: float) -> None:
        """Start the clock of the requests that are new in this step, as the step before has returned.

        Until now they have waited, which does not count as computing time.
        """
        for new in self.plan.scheduled_new_reqs:
            request = self.requests.get(new.req_id)
            if request is not None:
                request.first_scheduled_time = now


class StepsInFlight:
    """The steps under way, in the order in which they were planned.

    Without ``overlap`` a step's output comes before the next is planned, and there is nothing to remember. In
    a pipeline no place is reserved for a token before it is sampled: its request waits for it, and other
    stages run steps of other requests, or of other parts of a prompt.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        requests: Mapping[str, Request],
        max_model_len: int,
        num_stages: int = 1,
        *,
        overlap: bool,
    ) -> None:
        self.overlap = overlap
        self.num_stages = num_stages
        self._max_steps = max_steps(num_stages)
        self._kv = kv
        self._requests = requests
        self._max_model_len = max_model_len
        self._ids = itertools.count()
        self._steps: deque[_Step] = deque()

    @property
    def num_under_way(self) -> int:
        """Number of steps whose output has not returned."""
        return len(self._steps)

    def begin(self, plan: SchedulerOutput) -> None:
        """Add a plan whose tokens count as computed, and reserve places for the tokens it will sample."""
        if not self.overlap:
            return
        assert len(self._steps) < self._max_steps, "a step's output was not taken"
        requests = self._requests
        step = _Step(next(self._ids), plan, {i: requests[i] for i in plan.num_scheduled_tokens})
        for request in step.requests.values():
            num_tokens = request.num_tokens + request.num_output_placeholders
            if request.num_computed_tokens - request.num_drafts_under_way == num_tokens:
                step.sampled[request.request_id] = request
                # The last token that it may have is never computed: it needs no place.
                has_place = self.num_stages == 1 and num_tokens + 1 < self._max_tokens(request)
                request.num_output_placeholders += has_place
        self._steps.append(step)

    def _max_tokens(self, request: Request) -> int:
        """How many tokens the request may have, its prompt included."""
        return min(request.num_prompt_tokens + request.max_tokens, self._max_model_len)

    def requests_of(self, plan: SchedulerOutput) -> Mapping[str, Request]:
        """The requests that may take tokens from the oldest step, which has this plan, by id.

        A request that has ended gets none, nor does one that came later under its id.
        """
        if not self.overlap:
            return self._requests
        step = self._steps[0]
        assert step.plan is plan, "outputs come in the order of their plans"
        return step.requests

    def end(self, plan: SchedulerOutput, now: float) -> Mapping[str, Request]:
        """Remove the oldest step, whose output has come; returns the requests that may take its tokens."""
        if not self.overlap:
            if self._kv.has_windows:
                self._free_passed_blocks(plan, self._requests)
            return self._requests
        requests = self.requests_of(plan)
        step = self._steps.popleft()
        self._kv.release_deferred(step.step_id)
        for request in step.sampled.values():
            if request.num_output_placeholders:
                request.num_output_placeholders -= 1
        if self._steps:
            self._steps[0].start(now)
        if self._kv.has_windows:
            self._free_passed_blocks(plan, requests)
        return requests

    def _free_passed_blocks(self, plan: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        """Free what the windows of a returned step's requests have left: no other step reads that."""
        for request_id in plan.num_scheduled_tokens:
            request = requests.get(request_id)
            if request is not None:
                num_drafts = len(plan.scheduled_spec_decode_tokens.get(request_id, ()))
                num_computed = request.num_computed_tokens - self._num_tokens_of(request) - num_drafts
                self._kv.remove_skipped_blocks(request, num_computed)

    def _num_tokens_of(self, request: Request) -> int:
        """Tokens of the request that steps under way compute."""
        request_id = request.request_id
        return sum(
            step.plan.num_scheduled_tokens[request_id]
            for step in self._steps
            if step.requests.get(request_id) is request
        )

    def most_running(self, num_running: int) -> int:
        """How many of the running requests a plan takes at most: an equal part for each stage."""
        return -(-num_running // self.num_stages)

    def awaits_token(self, request: Request) -> bool:
        """Whether a step under way samples a token for the request, which may have lost its blocks since."""
        return any(step.sampled.get(request.request_id) is request for step in self._steps)

    def samples(self, plan: SchedulerOutput, request: Request) -> bool:
        """Whether this plan, which is under way, samples a token for the request, which has not ended."""
        request_id = request.request_id
        if not self.overlap:
            is_complete = request.num_computed_tokens - request.num_drafts_under_way == request.num_tokens
            return is_complete and request_id in plan.num_scheduled_tokens
        step = next(step for step in self._steps if step.plan is plan)
        return step.sampled.get(request_id) is request

    def defer_free(self, request: Request) -> None:
        """Prepare for a request to lose its blocks.

        Only its confirmed tokens count as computed from here on: their full blocks are cached. No block is
        reused before the steps that use it have returned.
        """
        if not self.overlap:
            return
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        self._kv.cache_computed(request)
        for step in reversed(self._steps):
            if step.requests.get(request.request_id) is request:
                self._kv.defer_free(step.step_id, request)
                return

    def leave(self, request: Request) -> None:
        """Remove a request that has ended; tokens that are still sampled for it are dropped."""
        self.defer_free(request)
        for step in self._steps:
            if step.requests.get(request.request_id) is request:
                del step.requests[request.request_id]
                step.sampled.pop(request.request_id, None)

    def check_invariants(self) -> None:
        """Raise AssertionError unless each reserved place is for a token under way."""
        assert len(self._steps) <= (self._max_steps if self.overlap else 0)
        for request in self._requests.values():
            num_sampled = sum(s.sampled.get(request.request_id) is request for s in self._steps)
            num_places = request.num_output_placeholders
            assert num_places <= num_sampled <= num_places + 1
            assert request.num_tokens + num_sampled <= self._max_tokens(request), "more than it may have"
        self._kv.check_deferred([step.step_id for step in self._steps])
