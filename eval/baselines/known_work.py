"""known-work: as ``continuum``, but it knows how much work each job has left. The limit of any forecast."""

from __future__ import annotations

from continuum.config import ContinuumConfig
from continuum.jobs.job import Turn
from continuum.policy import ContinuumPolicy
from engine.core.policy import PolicyContext
from eval.baselines.knowledge import Knowledge


class KnownWorkPolicy(ContinuumPolicy):
    """Asks the simulator instead of a forecast."""

    name = "known-work"

    def __init__(self, context: PolicyContext, knowledge: Knowledge, config: ContinuumConfig) -> None:
        super().__init__(context, config)
        self._knowledge = knowledge

    def work_s(self, turn: Turn) -> float:
        return self._knowledge.remaining_s(turn.request.request_id)
