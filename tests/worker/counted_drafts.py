"""An executor that counts drafts, and accepted drafts."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config.engine_config import EngineConfig
from engine.core.outputs import ModelRunnerOutput, SchedulerOutput
from engine.executor import Executor, PendingOutput
from engine.model_executor import model_executor


@dataclass(slots=True)
class DraftCounts:
    """An ExecutorFactory, for one engine in this process."""

    num_drafts: int = 0
    num_accepted: int = 0
    num_steps: int = 0
    """The number of steps with tokens."""

    def __call__(self, config: EngineConfig) -> Executor:
        executor = model_executor(config)
        submit = executor.submit

        def counted(plan: SchedulerOutput) -> PendingOutput:
            return _Counted(self, plan, submit(plan))

        executor.submit = counted  # type: ignore[method-assign]
        return executor

    def take(self, plan: SchedulerOutput, output: ModelRunnerOutput) -> None:
        """Counts a step's drafts and accepted drafts."""
        self.num_steps += bool(plan.total_num_scheduled_tokens)
        sampled = dict(zip(output.req_ids, output.sampled_token_ids, strict=True))
        for req_id, drafts in plan.scheduled_spec_decode_tokens.items():
            self.num_drafts += len(drafts)
            self.num_accepted += len(sampled[req_id]) - 1


@dataclass(frozen=True, slots=True)
class _Counted:
    counts: DraftCounts
    plan: SchedulerOutput
    pending: PendingOutput

    def result(self) -> ModelRunnerOutput:
        output = self.pending.result()
        self.counts.take(self.plan, output)
        return output
