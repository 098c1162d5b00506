"""The pool and the queue, step by step. Knows nothing of jobs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLife:
    """A step: the state in which it began, and its decision."""

    step: int
    now: float
    until_s: float
    """When the next step began, or the trace ends."""
    ended_s: float | None
    """When its result arrived; None: not recorded."""
    num_running: int
    """Requests, before the decision; likewise below."""
    num_waiting: int
    num_loading: int
    free_blocks: int
    """Blocks neither running nor pinned, including cached ones; like the other blocks, before the
    decision."""
    empty_blocks: int | None
    """Free blocks without a cached prefix; None: not reported."""
    pinned_blocks: int
    num_pins: int
    total_blocks: int
    host_blocks: int
    token_budget: int
    tokens: int
    """Scheduled tokens."""
    num_scheduled: int
    """Requests that got some of them."""
    num_admitted: int
    num_resumed: int
    num_preempted: int
    loaded_blocks: int
    stored_blocks: int

    @property
    def running_blocks(self) -> int:
        """Blocks of requests that run or are being loaded, without pinned ones."""
        return self.state.running

    @property
    def state(self) -> PoolState:
        """The state in which the step began."""
        in_use = self.total_blocks - self.free_blocks
        pinned = min(self.pinned_blocks, in_use)
        empty = self.empty_blocks or 0
        return PoolState(
            running=in_use - pinned,
            pinned=pinned,
            cached=self.free_blocks - empty,
            free=empty,
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            num_loading=self.num_loading,
        )


@dataclass(frozen=True, slots=True)
class PoolState:
    """Blocks by state, each counted once, and requests by state. A block that a pin holds counts as pinned
    even while a turn uses it; one that two pins hold counts once."""

    running: int
    pinned: int
    cached: int
    """All free blocks, if the trace does not distinguish empty ones."""
    free: int
    """Free blocks that cache nothing."""
    num_running: int
    num_waiting: int
    num_loading: int


def stretches(step: StepLife, following: StepLife | None) -> Iterator[tuple[PoolState, float, float]]:
    """Yields states with their times up to the next step: until this one's result its own, then that of the
    next. The state after the last step's result is unknown."""
    if following is None:
        yield step.state, step.now, step.until_s if step.ended_s is None else step.ended_s
        return
    ended_s = following.now if step.ended_s is None else step.ended_s
    yield step.state, step.now, ended_s
    if following.now > ended_s:
        left = following.state
        yield replace(left, num_waiting=min(step.num_waiting, left.num_waiting)), ended_s, following.now
