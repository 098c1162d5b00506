"""Runs step plans without a model: returns what each step samples and how long it would take."""

from __future__ import annotations

from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from eval.sim.cost_model import StepCost, StepWork
from eval.sim.drafts import SimDrafts
from eval.sim.sim_request import TOKEN_IDS


class SimExecutor:
    """Charges a step's time by a cost model. A draft is a decode row without its context."""

    def __init__(self, cost: StepCost, drafts: SimDrafts | None = None) -> None:
        self._cost = cost
        self._drafts = drafts
        self._num_known: dict[str, int] = {}
        """Tokens of each request so far, prompt and output."""
        self.num_computed_tokens = 0
        """Prefill tokens, including recomputed ones: all but one token per request and step."""

    def execute(self, plan: SchedulerOutput) -> tuple[ModelRunnerOutput, float]:
        """Returns the step's samples and its seconds."""
        known = self._num_known
        for request_id in plan.finished_req_ids:
            known.pop(request_id, None)
        computed: list[tuple[str, int]] = []
        for new in plan.scheduled_new_reqs:
            known[new.req_id] = len(new.prompt_token_ids)
            computed.append((new.req_id, new.num_computed_tokens))
        cached = plan.scheduled_cached_reqs
        computed.extend(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        work = StepWork()
        if self._drafts is not None and plan.scheduled_spec_decode_tokens:
            sampled, tokens = self._verify(computed, plan, work, self._drafts)
        else:
            sampled = self._compute(computed, plan.num_scheduled_tokens, work)
            tokens = [TOKEN_IDS] * len(sampled)
        result = ModelRunnerOutput(sampled, tokens)
        return result, self._cost.step_s(work)

    def _verify(
        self, computed: list[tuple[str, int]], plan: SchedulerOutput, work: StepWork, drafts: SimDrafts
    ) -> tuple[list[str], list[list[int]]]:
        """Does ``_compute`` for a step with drafts; also returns what each request samples."""
        drafted = plan.scheduled_spec_decode_tokens
        scheduled = {
            request_id: num_new - len(drafted.get(request_id, ()))
            for request_id, num_new in plan.num_scheduled_tokens.items()
        }
        sampled = self._compute(computed, scheduled, work)
        tokens: list[list[int]] = []
        for request_id in sampled:
            num_drafts = len(drafted.get(request_id, ()))
            num_accepted = drafts.num_accepted(request_id, num_drafts)
            work.num_decodes += num_drafts
            self._num_known[request_id] += num_accepted
            tokens.append(TOKEN_IDS * (num_accepted + 1))
        return sampled, tokens

    def _compute(
        self, computed: list[tuple[str, int]], scheduled: dict[str, int], work: StepWork
    ) -> list[str]:
        """Adds up the work of requests with these numbers of computed tokens; returns those that sample."""
        known = self._num_known
        sampled: list[str] = []
        num_decodes = decode_context = 0
        for request_id, num_computed in computed:
            num_new = scheduled[request_id]
            num_computed += num_new
            if num_new == 1:
                num_decodes += 1
                decode_context += num_computed
            else:
                work.prefills.append((num_new, num_computed - num_new))
                self.num_computed_tokens += num_new
            if num_computed == known[request_id]:
                known[request_id] = num_computed + 1
                sampled.append(request_id)
        work.num_decodes = num_decodes
        work.decode_context_tokens = decode_context
        return sampled
