"""Proposes drafts between two steps: after an output, for the next plan, which waits for them."""

from __future__ import annotations

from collections.abc import Callable

from engine.config.engine_config import EngineConfig
from engine.core.drafts.drafter import make_drafter
from engine.core.drafts.proposals import DraftProposals
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.core.request import Request
from engine.core.scheduler import Scheduler
from engine.core.traced_scheduler import TracedScheduler
from engine.core_process.core_part import CorePart
from engine.core_process.step_costs import measure_step_costs
from engine.errors import ConfigError
from engine.executor import Executor


class Drafting(CorePart):
    """Proposes drafts to a scheduler."""

    def __init__(self, proposals: DraftProposals) -> None:
        self._proposals = proposals
        self.awaits_output = False
        """Whether a request is likely to have drafts after the step under way; no plan is made before."""

    def after_output(
        self,
        scheduler: Scheduler | TracedScheduler,
        plan: SchedulerOutput,
        result: ModelRunnerOutput,
        now: float,
        *,
        is_idle: bool,
    ) -> None:
        """Record the results of a step's drafts, and propose the next ones.

        Unless the worker ``is_idle``, the tokens of the step under way are not known: then this only finds
        out whether to wait for them.
        """
        self._proposals.observe(plan, result)
        proposals = self._proposals.propose(scheduler.running)
        self.awaits_output = bool(proposals)
        if proposals and is_idle:
            scheduler.update_draft_token_ids(proposals, now)

    def request_ended(self, request: Request, now: float) -> None:
        self._proposals.ended(request)


def make_drafting(
    config: EngineConfig, executor: Executor, job_of: Callable[[Request], str | None]
) -> Drafting | None:
    """The drafting part, or None; ConfigError for a drafter that does not go with the model.

    Runs steps to learn what they cost, so it is called before the first request.
    """
    speculative = config.speculative
    if speculative is None:
        return None
    if speculative.has_weights and executor.info.num_states:
        raise ConfigError(
            f"speculative_config: method {speculative.method} does not draft yet for models that have layers "
            "with states (linear attention or Mamba); suffix, ngram and grammar do."
        )
    most = speculative.num_speculative_tokens
    costs = measure_step_costs(executor, config, most) if speculative.weigh_costs else None
    drafter = make_drafter(speculative, job_of)
    return Drafting(DraftProposals(drafter, most, costs, config.scheduler.max_num_batched_tokens))
