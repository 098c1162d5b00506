"""Runs step plans without a model: says what each step samples and how long it would take."""

from __future__ import annotations

from engine.outputs import ModelRunnerOutput, SchedulerOutput
from eval.sim.cost_model import StepCost, StepWork
from eval.sim.sim_request import TOKEN_IDS


class SimExecutor:
    """Charges a step's time by a cost model."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._num_known: dict[str, int] = {}
        """Tokens of each request so far, prompt and output."""
        self.num_computed_tokens = 0
        """Of prompts, or of what a preemption threw away: all but one token per request and step."""

    def execute(self, plan: SchedulerOutput) -> tuple[ModelRunnerOutput, float]:
        """The step's samples and its seconds."""
        known = self._num_known
        for request_id in plan.finished_req_ids:
            known.pop(request_id, None)
        work = StepWork()
        sampled: list[str] = []
        scheduled = plan.num_scheduled_tokens
        for new in plan.scheduled_new_reqs:
            known[new.req_id] = len(new.prompt_token_ids)
            self._compute(new.req_id, scheduled[new.req_id], new.num_computed_tokens, work, sampled)
        cached = plan.scheduled_cached_reqs
        for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            self._compute(request_id, scheduled[request_id], num_computed, work, sampled)
        result = ModelRunnerOutput(sampled, [TOKEN_IDS] * len(sampled))
        return result, self._cost.step_s(work)

    def _compute(
        self, request_id: str, num_new: int, num_computed: int, work: StepWork, sampled: list[str]
    ) -> None:
        if num_new == 1:
            work.num_decodes += 1
            work.decode_context_tokens += num_computed + 1
        else:
            work.prefills.append((num_new, num_computed))
            self.num_computed_tokens += num_new
        if num_computed + num_new == self._num_known[request_id]:
            self._num_known[request_id] += 1
            sampled.append(request_id)
