"""gate: only bounds the working set, like ThunderAgent (arXiv 2602.13692) but inside the engine."""

from __future__ import annotations

from collections.abc import Iterable

from continuum.jobs.job import Job
from engine.core.policy import Pin, PolicyContext, PolicyDescription, WaitingKey
from engine.core.request import Request
from eval.baselines.program import ProgramPolicy, owner_of

FORCED_AFTER_S = 1800.0
"""ThunderAgent's bound: a job that has waited this long starts regardless of the gate."""


class GatePolicy(ProgramPolicy):
    """First come, first served, but a new job waits while its prompt plus the contexts of jobs that have
    begun and not ended would exceed a share of the pool.

    A context is the last known one: prompt and output of the last ended turn, or the prompt of a running one.
    A job ends when its client says so, when a turn calls no tool, or when it is idle for an hour.
    """

    name = "gate"

    def __init__(
        self, context: PolicyContext, share: float = 0.9, forced_after_s: float = FORCED_AFTER_S
    ) -> None:
        super().__init__(context)
        self._share = share
        num_blocks = context.num_blocks / max(1, context.blocks_per_block)
        self._room_tokens = share * num_blocks * context.block_size
        self._forced_after_s = forced_after_s
        self._contexts: dict[str, int] = {}
        """Tokens of every admitted job, by job id, or by request id without one."""
        self._num_tokens = 0

    def describe(self) -> PolicyDescription:
        return PolicyDescription(self.name, {"share": self._share, "forced_after_s": self._forced_after_s})

    def waiting_key(self, request: Request, now: float) -> WaitingKey:
        return ()

    def may_admit(self, request: Request, num_free_blocks: int, now: float) -> bool:
        return (
            not self._contexts
            or owner_of(request) in self._contexts
            or self._num_tokens + request.num_tokens <= self._room_tokens
            or now - request.arrival_time >= self._forced_after_s
        )

    def _set(self, owner: str, num_tokens: int) -> None:
        """Records the job's context; 0: the job is not admitted."""
        self._num_tokens += num_tokens - self._contexts.pop(owner, 0)
        if num_tokens:
            self._contexts[owner] = num_tokens

    def on_admitted(self, request: Request, now: float) -> Iterable[Pin]:
        self._set(owner_of(request), request.num_tokens)
        return super().on_admitted(request, now)

    def on_turn_end(self, request: Request, now: float) -> Pin | None:
        self._set(owner_of(request), request.num_tokens if request.request_id in self._turns else 0)
        return super().on_turn_end(request, now)

    def on_request_gone(self, request: Request, now: float) -> None:
        turn = self._turns.get(request.request_id)
        super().on_request_gone(request, now)
        if turn is None or not turn.job.turns:
            self._set(owner_of(request), 0)

    def program_over(self, job: Job, now: float) -> None:
        self._set(job.job_id, 0)

    def program_gone(self, job: Job) -> None:
        self._set(job.job_id, 0)
