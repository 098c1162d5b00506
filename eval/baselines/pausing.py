"""The base of policies that pause whole programs, every few seconds, so that the contexts of others fit."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from continuum.jobs.job import BranchTip, Job
from engine.core.policy import Pin, PolicyContext, WaitingKey
from engine.core.request import Request
from eval.baselines.holding import RetainingPolicy
from eval.baselines.program import owner_of

TICK_S = 5.0
"""Interval of pausing and resuming, in ThunderAgent and in MORI."""
FORCED_AFTER_S = 1800.0
"""ThunderAgent's bound: a request that has waited this long starts, and its program is resumed."""
BUFFER_TOKENS = 100
"""ThunderAgent's reserve for the next output of each program that is not paused."""


@dataclass(slots=True, eq=False)
class Program:
    """A job, or a request without one."""

    num_turns: int = 0
    num_tokens: int = 0
    """Its context when its last turn ended."""
    is_active: bool = False
    pauses_next: bool = False
    """Whether it is paused when its turn ends."""
    is_over: bool = False
    is_in_host: bool = False
    """Whether it is paused and counts for host memory."""
    requests: dict[str, Request] = field(default_factory=dict)
    """Its open turns; without any, the program is in a tool."""
    in_tool_since_s: float = 0.0
    cycles: deque[list[float]] = field(default_factory=lambda: deque(maxlen=5))
    """Seconds of each of its last turns in the batch, and of the tool after it."""

    @property
    def room(self) -> int:
        """Tokens that it needs in the pool."""
        return BUFFER_TOKENS + max((r.num_tokens for r in self.requests.values()), default=self.num_tokens)


class PausingPolicy(RetainingPolicy):
    """First come, first served among programs that are not paused. If all are paused, the next one that has a
    turn is resumed at once, whatever its size."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._capacity = context.num_blocks / max(1, context.blocks_per_block) * context.block_size
        self._programs: dict[str, Program] = {}
        self._next_tick_s = 0.0

    # ---- for subclasses ----

    def tick(self, now: float) -> None:
        """Pauses and resumes programs."""
        raise NotImplementedError

    def resume_order(self, now: float) -> list[Program]:
        """Returns the programs that wait to be resumed, the next one first; new ones queue after them."""
        raise NotImplementedError

    def pause(self, program: Program) -> None:
        """Makes its next requests wait. A program with an open turn is paused when that turn ends."""
        program.pauses_next = bool(program.requests)
        program.is_active = program.pauses_next

    def resume(self, program: Program) -> None:
        program.is_active = True
        program.is_in_host = False

    def active(self) -> list[Program]:
        """Returns programs that are not paused and will not be when their turn ends."""
        return [
            program for program in self._programs.values() if program.is_active and not program.pauses_next
        ]

    def ttl_s(self, tip: BranchTip, request: Request | None, now: float) -> float:
        return 0.0

    # ---- called by the scheduler ----

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return ()

    def changed_keys(self, now: float) -> Iterable[Request]:
        if now >= self._next_tick_s:
            self._next_tick_s = now + TICK_S
            self.tick(now)
        if not any(program.is_active for program in self._programs.values()):
            waiting = (program for program in self.resume_order(now) if program.requests)
            for program in islice(waiting, 1):
                self.resume(program)
        return super().changed_keys(now)

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        program = self._programs[owner_of(request)]
        if not program.is_active and now - request.arrival_time >= FORCED_AFTER_S:
            self.resume(program)
        return program.is_active

    def on_arrival(self, request: Request, now: float) -> None:
        super().on_arrival(request, now)
        owner = owner_of(request)
        others = () if owner in self._programs else self.resume_order(now)
        program = self._programs.setdefault(owner, Program())
        if program.cycles and not program.requests:
            program.cycles[-1][1] = request.arrival_time - program.in_tool_since_s
        program.num_turns += 1
        program.is_over = False
        program.requests[request.request_id] = request
        if program.num_turns == 1 and not others:
            program.is_active = sum(p.room for p in self.active()) + program.room <= self._capacity

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        self._ended(request, now)
        return super().on_turn_end(request, now)

    def on_request_gone(self, request: Request, now: float) -> None:
        self._ended(request, now)
        super().on_request_gone(request, now)

    def _ended(self, request: Request, now: float) -> None:
        owner = owner_of(request)
        program = self._programs[owner]
        del program.requests[request.request_id]
        program.num_tokens = request.num_tokens
        program.in_tool_since_s = now
        if request.first_scheduled_time is not None:
            program.cycles.append([now - request.first_scheduled_time, 0.0])
        if program.pauses_next:
            self.pause(program)
        program.is_over |= request.request_id not in self._turns
        self._forget_if_over(owner)

    def _forget_if_over(self, owner: str) -> None:
        program = self._programs.get(owner)
        if program is not None and program.is_over and not program.requests:
            del self._programs[owner]

    def program_over(self, job: Job, now: float) -> None:
        program = self._programs.get(job.job_id)
        if program is not None:
            program.is_over = True
            self._forget_if_over(job.job_id)

    def program_gone(self, job: Job) -> None:
        self._programs.pop(job.job_id, None)
