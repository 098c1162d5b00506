"""idleness: programs that are mostly in tools leave the device first, as in MORI (arXiv 2606.00866)."""

from __future__ import annotations

from collections.abc import Iterator

from continuum.jobs.job import BranchTip, Job
from engine.core.policy import Pin, PinEnd, PolicyContext
from engine.core.request import Request
from eval.baselines.pausing import PausingPolicy, Program
from eval.baselines.program import PROGRAM_IDLE_S, owner_of


class IdlenessPolicy(PausingPolicy):
    """A program's idleness is the share of tool time in its last five turns and tools, without waits.

    While the contexts of programs on the device exceed the pool, the idlest one leaves (on ties one in a
    tool): to host memory if that has space, else its KV is dropped. A turn of a program that has left waits
    until the program returns to the device: first those in host memory, the busiest first, then the rest, the
    smallest first, then new jobs. If space is missing, idler programs in a tool leave for it. The KV of
    programs on the device is pinned; requests that need blocks revoke pins, the idlest program's first.

    Left out: several engines. Host memory evicts by LRU, not by idleness, and copies are made as blocks fill
    and are used when a turn is admitted, not when a program moves.
    """

    name = "idleness"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._host_capacity = context.num_host_blocks * context.block_size

    def tick(self, now: float) -> None:
        overflow = sum(program.room for program in self.active()) - self._capacity
        for program in sorted(self.active(), key=lambda p: (-_idleness(p, now), bool(p.requests))):
            if overflow <= 0:
                break
            overflow -= program.room
            self.pause(program)
        for program in self.resume_order(now):
            self._resume_if_fits(program, now)

    def _resume_if_fits(self, program: Program, now: float) -> None:
        missing = sum(p.room for p in self._programs.values() if p.is_active) + program.room - self._capacity
        leaving: list[Program] = []
        if missing > 0 and program.num_turns > 1:
            in_tools = (p for p in self.active() if not p.requests)
            for other in sorted(in_tools, key=lambda p: -_idleness(p, now)):
                if missing > 0 and _idleness(other, now) > _idleness(program, now):
                    leaving.append(other)
                    missing -= other.room
        if missing <= 0:
            for other in leaving:
                self.pause(other)
            self.resume(program)

    def resume_order(self, now: float) -> list[Program]:
        waiting = [p for p in self._programs.values() if p.requests and not p.is_active]
        in_host = [p for p in waiting if p.is_in_host]
        elsewhere = [p for p in waiting if not p.is_in_host]
        in_host.sort(key=lambda p: _idleness(p, now))
        return [*in_host, *sorted(elsewhere, key=lambda p: (p.num_turns == 1, p.room))]

    def pause(self, program: Program) -> None:
        super().pause(program)
        if not program.is_active:
            used = sum(p.room for p in self._programs.values() if p.is_in_host)
            program.is_in_host = used + program.room <= self._host_capacity
            for pin in self._pins:
                if self._programs.get(pin.job_id) is program:
                    self._pins.release(pin)

    def program_over(self, job: Job, now: float) -> None:
        for tip in job.tips:
            self._release(tip)
        super().program_over(job, now)

    def ttl_s(self, tip: BranchTip, request: Request | None, now: float) -> float:
        program = self._programs.get(tip.job.job_id)
        return PROGRAM_IDLE_S if program is not None and program.is_active else 0.0

    def revocable_for(self, requester: Request, now: float, last_resort: bool) -> Iterator[Pin]:
        """Returns all pins, the idlest program's first, the requester's own last."""
        owner = owner_of(requester)
        idleness = {owner: _idleness(program, now) for owner, program in self._programs.items()}
        return iter(sorted(self._pins, key=lambda p: (p.job_id == owner, -idleness.get(p.job_id, 1.0))))

    def on_pin_shrunk(
        self, pin: Pin, num_blocks_lost: int, cause: PinEnd, now: float, by: str | None = None
    ) -> None:
        self._pins.shrunk(pin, num_blocks_lost)


def _idleness(program: Program, now: float) -> float:
    """Returns the idleness, from 0, as for a new program, to 1."""
    in_tools_s = sum(tool_s for _, tool_s in program.cycles)
    if program.cycles and not program.requests:
        in_tools_s += now - program.in_tool_since_s
    all_s = in_tools_s + sum(turn_s for turn_s, _ in program.cycles)
    return in_tools_s / all_s if all_s > 0 else 0.0
