"""The pool and the queue, step by step. Knows nothing of jobs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLife:
    """A step: the state that it began with, and what it decided."""

    step: int
    now: float
    until_s: float
    """When the next step began, or the trace ends."""
    ended_s: float | None
    """When its result came back; None: the trace does not say."""
    num_running: int
    """Requests, before the decision; likewise below."""
    num_waiting: int
    num_loading: int
    free_blocks: int
    """Neither running nor pinned, those with a findable prefix included; like the other blocks, before the
    decision."""
    empty_blocks: int | None
    """Of the free ones, those without; None: not told."""
    pinned_blocks: int
    num_pins: int
    total_blocks: int
    host_blocks: int
    token_budget: int
    tokens: int
    """Scheduled."""
    num_scheduled: int
    """Requests that got some of them."""
    num_admitted: int
    num_resumed: int
    num_preempted: int
    loaded_blocks: int
    stored_blocks: int

    @property
    def running_blocks(self) -> int:
        """Of requests that run or are loaded and not also pinned."""
        return self.total_blocks - self.free_blocks - self.pinned_blocks
