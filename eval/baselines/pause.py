"""pause: pauses programs when contexts fill the pool, like ThunderAgent (arXiv 2602.13692), as in Dynamo."""

from __future__ import annotations

from engine.core.policy import PolicyContext, PolicyDescription
from eval.baselines.pausing import PausingPolicy, Program

PAUSE_TARGET = 0.8
RESUME_HYSTERESIS = 0.1


class PausePolicy(PausingPolicy):
    """Above ``share`` of the pool, pauses the smallest programs in a tool, then those with a running turn
    (when that ends), until the others fit in 0.8. Up to ``share`` - 0.1, resumes programs with a waiting
    turn, then new ones, then those in a tool, the smallest first. Pins nothing.

    Left out: what only chooses an engine (best fit, and that a tool's weight halves every second), and small
    shifts of priority after a resume and between 0.8 and the threshold.
    """

    name = "pause"

    def __init__(self, context: PolicyContext, share: float = 0.95) -> None:
        super().__init__(context)
        self._share = share

    def describe(self) -> PolicyDescription:
        return PolicyDescription(self.name, {"share": self._share})

    def tick(self, now: float) -> None:
        self._resume_some(now)
        used = sum(program.room for program in self.active())
        if used <= self._share * self._capacity:
            return
        for program in sorted(self.active(), key=lambda p: (bool(p.requests), p.room)):
            if used <= min(PAUSE_TARGET, self._share) * self._capacity:
                break
            used -= program.room
            self.pause(program)

    def _resume_some(self, now: float) -> None:
        used = sum(program.room for program in self._programs.values() if program.is_active)
        for program in self.resume_order(now):
            if used + program.room <= (self._share - RESUME_HYSTERESIS) * self._capacity:
                used += program.room
                self.resume(program)

    def resume_order(self, now: float) -> list[Program]:
        paused = (program for program in self._programs.values() if not program.is_active)
        return sorted(paused, key=lambda p: (1 if p.num_turns == 1 else 0 if p.requests else 2, p.room))
