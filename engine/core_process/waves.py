"""When a core that shares experts with others has a part in their steps."""

from __future__ import annotations

from engine.core.outputs import CachedRequestData, SchedulerOutput
from engine.executor import Executor


class Waves:
    """Numbers of waves, which are steps that all cores run together; they count from 1. Only
    ``begun_by_other`` and ``has_part`` need the core's lock."""

    def __init__(self, num_cores: int) -> None:
        """``num_cores``: those that share experts; of one there are no waves."""
        self._is_shared = num_cores > 1
        self._begun = self._ended = 0

    @property
    def running(self) -> bool:
        """Whether this core must run a step, if only one without tokens: others wait for it."""
        return self._begun > self._ended

    def begun_by_other(self, number: int) -> None:
        """Another core waits in this wave. It may be known already, or even over."""
        self._begun = max(self._begun, number)

    def has_part(self, num_tokens: int) -> bool:
        """Whether a step with so many tokens is one of a wave, which it may begin."""
        if num_tokens and self._is_shared:
            self._begun = max(self._begun, self._ended + 1)
        return self.running

    def serve(self, executor: Executor) -> None:
        """Have a part in a step of the others, without tokens."""
        plan = SchedulerOutput([], CachedRequestData(), {}, 0, set(), set(), in_wave=True)
        self.ended(executor.submit(plan).result().waves_ended)

    def ended(self, number: int) -> None:
        """All waves up to this one are over."""
        self._ended = number
