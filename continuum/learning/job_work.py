"""Predicts how much work a job is from the jobs of its kind, and updates that forecast with its own turns."""

from __future__ import annotations

from continuum.jobs.branches import BranchListener
from continuum.jobs.job import BranchTip, Job, Turn
from continuum.learning.remaining_work import RemainingWork
from continuum.learning.work_forecast import WorkForecast
from engine.core.kv_cache.block_hash import BlockHash
from engine.core.request import Request
from estimator.kinds import Kind
from estimator.learned.work_model import WorkModel


class JobWork(BranchListener):
    """Counts a job's turns and their service for the forecast of its kind."""

    def __init__(self, forecast: WorkForecast, remaining: RemainingWork, num_kind_blocks: int) -> None:
        """``remaining`` takes precedence once it has a model. ``num_kind_blocks``: jobs whose prompts begin
        with this many equal blocks are of one kind."""
        self.forecast = forecast
        self.remaining = remaining
        self._num_kind_blocks = num_kind_blocks

    @property
    def num_lessons(self) -> int:
        """A counter that changes whenever forecasts may have changed."""
        return self.forecast.num_lessons + self.remaining.num_models

    def learned(self, model: WorkModel) -> None:
        """Installs a new model of remaining work."""
        self.remaining.learned(model)

    def turn_began(self, job: Job, request: Request) -> None:
        """Counts a new turn. A job counts from its second turn on, since a single-turn request says nothing
        about jobs."""
        if job.kind is None:
            job.kind = kind_of(request, self._num_kind_blocks)
        self.remaining.job_here(job)
        if not job.is_established:
            return
        num_turns = 1
        if job.course is None:
            job.course = self.forecast.course(kind_name(job), request.num_prompt_tokens)
            num_turns = job.num_turns
        for _ in range(num_turns):
            job.course.begin_turn()

    def turn_ended(self, turn: Turn, now: float) -> None:
        if turn.request.first_scheduled_time is not None and turn.job.course is not None:
            turn.job.course.end_turn(now - turn.request.first_scheduled_time)
        self.remaining.turn_ended(turn, now)

    def on_tools_known(self, tip: BranchTip, now: float) -> None:
        if not tip.tools:
            self.on_job_done(tip.job, now)  # an answer without a call may be the job's last

    def on_job_done(self, job: Job, now: float) -> None:
        if job.course is not None:
            job.course.looks_finished()

    def excess_s(self, turn: Turn) -> float:
        """Seconds of service that the job is predicted to need beyond usual jobs; 0 if nothing is known."""
        turn.predicted_excess_s = self.remaining.excess_s(turn)
        if turn.predicted_excess_s is not None:
            return turn.predicted_excess_s
        course = turn.job.course
        return course.excess_s if course is not None else self.forecast.excess_s(kind_name(turn.job))


def kind_of(request: Request, num_blocks: int) -> BlockHash | None:
    """The hash of the first blocks of the prompt, which identifies the agent; None if the prompt is
    shorter."""
    return request.block_hashes[num_blocks - 1] if 0 < num_blocks <= len(request.block_hashes) else None


def kind_name(job: Job) -> Kind | None:
    """The name of the job's kind. Equal prompts of two tenants are two kinds."""
    return None if job.kind is None else Kind(job.tenant, job.kind)
