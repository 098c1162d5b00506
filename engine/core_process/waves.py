"""Decides when a core that shares experts with others takes part in their steps."""

from __future__ import annotations

from engine.core.outputs import CachedRequestData, SchedulerOutput
from engine.executor import Executor


class Waves:
    """Counts waves, from 1: steps that all cores run together. Only ``begun_by_other`` and ``has_part`` need
    the core's lock."""

    def __init__(self, num_cores: int) -> None:
        """``num_cores``: how many share experts; with one core there are no waves."""
        self._is_shared = num_cores > 1
        self._begun = self._ended = 0

    @property
    def running(self) -> bool:
        """Whether this core must run a step, if only one without tokens: others wait for it."""
        return self._begun > self._ended

    def begun_by_other(self, number: int) -> None:
        """Note that another core waits in this wave. It may be known already, or even over."""
        self._begun = max(self._begun, number)

    def has_part(self, num_tokens: int) -> bool:
        """Whether a step with ``num_tokens`` tokens is part of a wave, which it may begin."""
        if num_tokens and self._is_shared:
            self._begun = max(self._begun, self._ended + 1)
        return self.running

    def serve(self, executor: Executor) -> None:
        """Take part in a step of the others, without tokens."""
        plan = SchedulerOutput([], CachedRequestData(), {}, 0, set(), set(), in_wave=True)
        self.ended(executor.submit(plan).result().waves_ended)

    def ended(self, number: int) -> None:
        """Note that all waves up to this one are over."""
        self._ended = number
