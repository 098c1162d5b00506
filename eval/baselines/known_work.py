"""known-work: ``continuum`` with perfect knowledge of each job's remaining work, an upper bound."""

from __future__ import annotations

from continuum.config import ContinuumConfig
from continuum.jobs.job import Turn
from continuum.policy import ContinuumPolicy
from engine.core.policy import PolicyContext
from eval.baselines.knowledge import Knowledge


class KnownWorkPolicy(ContinuumPolicy):
    """Gets a job's remaining work from the simulator instead of the estimator."""

    name = "known-work"

    def __init__(self, context: PolicyContext, knowledge: Knowledge, config: ContinuumConfig) -> None:
        super().__init__(context, config)
        self._knowledge = knowledge

    def work_s(self, turn: Turn) -> float:
        return self._knowledge.remaining_s(turn.request.request_id)
