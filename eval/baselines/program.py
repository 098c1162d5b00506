"""The common base of most published policies: which program a request belongs to, and since when.

A program here is a chain of turns under one job id, as in those policies: a turn continues the turn of its
job that ended last. Requests without a job are programs of one turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from continuum.jobs.job import BranchTip, Job, JobTable, Turn
from engine.core.policy import FcfsPolicy, Pin, PolicyContext, WaitingKey
from engine.core.request import Request
from engine.records.block_chain import BlockChain
from engine.records.messages import JobFinished, Signal, ToolCall, ToolGapStarted, TurnReceipt

MAX_PROGRAMS = 10_000
PROGRAM_IDLE_S = 3600.0
"""A program that is idle for this long is forgotten."""


def owner_of(request: Request) -> str:
    """Returns the id of the request's job, or its own id without one."""
    job_id = request.job.job_id if request.job is not None else None
    return request.request_id if job_id is None else job_id


class ProgramPolicy(FcfsPolicy):
    """Orders by the first arrival of the program, preempts the youngest program, pins nothing.

    Subclasses learn in ``gap_over``, ``tools_known`` and ``program_over``; ``RetainingPolicy`` pins.
    """

    wants_signals = True

    def __init__(self, context: PolicyContext) -> None:
        self._block_size = context.block_size
        self._jobs = JobTable(MAX_PROGRAMS, PROGRAM_IDLE_S)
        self._turns: dict[str, Turn] = {}
        self._tips: dict[str, BranchTip] = {}
        """Branch tips that are not continued yet, by request id."""
        self._changed: list[Request] = []
        """Requests whose place in the queue has changed."""

    # ---- for subclasses ----

    def gap_over(self, turn: Turn, tip: BranchTip, gap_s: float, now: float) -> None:
        """Called when the program's next turn arrives, ``gap_s`` after the one before had ended."""

    def tools_known(self, tip: BranchTip, calls: Sequence[ToolCall], now: float) -> None:
        """Called when the API server has reported which tools the ended turn called."""

    def program_over(self, job: Job, now: float) -> None:
        """Called when the program's last turn has ended: its client said so, or the turn called no tool."""

    def program_gone(self, job: Job) -> None:
        """Called when the program is forgotten."""

    def drop(self, tip: BranchTip) -> None:
        """Drops a tip that no turn will continue."""
        self._forget(tip)

    # ---- called by the scheduler ----

    def on_arrival(self, request: Request, now: float) -> None:
        for idle in self._jobs.forget_idle(now):
            self._drop_all(idle)
            self.program_gone(idle)
        if request.job is None or request.job.job_id is None:
            return
        job = self._jobs.open(request.job.job_id, request.job.tenant, request.arrival_time)
        job.num_turns += 1
        tip = job.tips[-1] if job.tips else None
        turn = Turn(job, request, job.num_turns, tip)
        job.turns[request.request_id] = self._turns[request.request_id] = turn
        if tip is not None:
            self._forget(tip)
            turn.gap_s = max(0.0, request.arrival_time - tip.ended_s)
            self.gap_over(turn, tip, turn.gap_s, now)

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return (self.program_arrival_s(request),)

    def changed_keys(self, now: float) -> Iterable[Request]:
        changed = self._changed
        self._changed = []
        return changed

    def program_arrival_s(self, request: Request) -> float:
        turn = self._turns.get(request.request_id)
        return request.arrival_time if turn is None else turn.job.first_arrival_s

    def victim(self, running: Sequence[Request], requester: Request, now: float) -> Request:
        # Preempt the last admitted of one program's turns, or two could alternate forever.
        return max(reversed(running), key=self.program_arrival_s)

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        turn = self._turns.get(request.request_id)
        if turn is not None and turn.admitted_s is None:
            turn.admitted_s = now
        return ()

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        turn = self._close(request, now)
        if turn is None:
            return None
        self._drop_all(turn.job)
        if request.job is not None and request.job.is_last_step:
            self._finish(turn.job, now)
            return None
        block_hashes = request.block_hashes[: request.num_computed_tokens // self._block_size]
        chain = BlockChain(block_hashes)
        tip = BranchTip(
            turn.job, request.request_id, turn.number, chain, request.num_prompt_tokens, now, turn.job.place
        )
        turn.job.tips.append(tip)
        self._tips[request.request_id] = tip
        return self.hold(tip, request, now)

    def hold(self, tip: BranchTip, request: Request, now: float) -> Pin | None:
        """Pins the blocks of an ended turn, or returns None."""
        return None

    def on_request_gone(self, request: Request, now: float) -> None:
        self._close(request, now)

    def on_signal(self, signal: Signal, now: float) -> TurnReceipt | None:
        match signal:
            case ToolGapStarted():
                tip = self._tips.get(signal.request_id)
                if tip is not None:
                    self.tools_known(tip, signal.calls, now)
                    if not signal.calls:
                        self.program_over(tip.job, now)
            case JobFinished():
                job = self._jobs.get(signal.job_id)
                if job is not None:
                    self._drop_all(job)
                    self._finish(job, now)
        return None

    def _close(self, request: Request, now: float) -> Turn | None:
        turn = self._turns.pop(request.request_id, None)
        if turn is not None:
            del turn.job.turns[request.request_id]
            turn.job.last_active_s = now
        return turn

    def _forget(self, tip: BranchTip) -> None:
        tip.job.tips.remove(tip)
        self._tips.pop(tip.request_id, None)

    def _drop_all(self, job: Job) -> None:
        for tip in list(job.tips):
            self.drop(tip)

    def _finish(self, job: Job, now: float) -> None:
        self.program_over(job, now)
        if not job.turns:
            self._jobs.remove(job)
            self.program_gone(job)
